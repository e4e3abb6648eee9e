# SPDX-License-Identifier: Apache-2.0
"""torch's wrappers of modules whose activations are recomputed in the backward, or kept in host memory."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

from . import Internal

CHECKPOINT_WRAPPER = Internal(
    name="checkpoint_wrapper",
    what="checkpoint_wrapper and offload_wrapper of torch.distributed.algorithms._checkpoint",
    versions="2.11 to 2.14",
    upstream="https://github.com/pytorch/pytorch/pull/69955, a prototype to be moved to torch.utils.checkpoint",
    needed_by="activation_checkpointing and activation_checkpointing_offload of the FSDP plugin",
    without="modules are not wrapped: the same values, with the memory of all activations",
    test="tests/torch_internals/test_checkpoint_wrapper.py::test_activations_are_recomputed_under_the_same_names",
)


def recomputed(module: nn.Module) -> nn.Module:
    """The module in a wrapper that keeps the module's inputs only; names in state dicts stay those of the module."""
    if not CHECKPOINT_WRAPPER.is_on or is_recomputed(module):
        return module
    return wrappers.checkpoint_wrapper(module, checkpoint_impl=wrappers.CheckpointImpl.NO_REENTRANT)


def in_host_memory(module: nn.Module) -> nn.Module:
    """The module in a wrapper that keeps what its forward saves in host memory."""
    if CHECKPOINT_WRAPPER.is_on:
        return wrappers.offload_wrapper(module)
    return module


def is_recomputed(module: nn.Module) -> bool:
    """Whether `module` is such a wrapper."""
    return isinstance(module, wrappers.CheckpointWrapper)

# SPDX-License-Identifier: Apache-2.0
"""Copies of modules: unsharded ones of the user's class, to be initialized, and ones with other children."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..core.errors import PrepareError
from . import Internal

MODULE_COPIES = Internal(
    name="module_copies",
    what="the dictionaries of an nn.Module: _parameters, _buffers and _modules",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="FSDP2 of models that were built on the meta device, whose weights no rank has",
    without="a PrepareError: such models cannot be initialized",
    test="tests/torch_internals/test_fsdp.py::test_a_copy_has_its_own_tensors",
)


@torch.no_grad()
def unsharded_copy(module: nn.Module, device: torch.device, fill: bool = False) -> nn.Module:
    """An unsharded module of the same class and attributes; without `fill` only its children's tensors have values."""
    if not MODULE_COPIES.is_on:
        raise PrepareError(
            "ACCELERATE_TORCH_INTERNALS_OFF=module_copies: modules without values are not initialized"
        )
    kind: type[nn.Module] = type(module)
    if issubclass(kind, FSDPModule):
        # fully_shard made (FSDPModule, the module's class) of it, whose constructor runs on every copy.
        kind = kind.__bases__[1]
    # The class that a module had before layouts gave it theirs: initialisation may look at it.
    plain: type[nn.Module] = getattr(kind, "plain_class", kind)

    def unsharded(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if fill:
            made.copy_(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        return made

    copied = plain.__new__(plain)
    # Layers of peft append to a list when they merge.
    copied.__dict__ = {
        key: list(value) if type(value) is list else value for key, value in module.__dict__.items()
    }
    copied._parameters = {name: unsharded(tensor) for name, tensor in module._parameters.items()}  # type: ignore[misc]
    copied._buffers = {name: unsharded(tensor) for name, tensor in module._buffers.items()}
    copied._modules = {
        name: None if child is None else unsharded_copy(child, device, fill=True)
        for name, child in module._modules.items()
    }
    return copied


def with_children(module: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A copy of a module alone, which shares its parameters; its children are what `change` makes of them."""
    copied = type(module).__new__(type(module))
    for name, value in module.__dict__.items():
        # A replaced `forward`, as one with hooks, is bound to the copy.
        if isinstance(value, MethodType) and value.__self__ is module:
            value = MethodType(value.__func__, copied)
        elif isinstance(value, partial) and value.args[:1] == (module,):
            value = partial(value.func, copied, *value.args[1:], **value.keywords)
        copied.__dict__[name] = value
    copied._modules = {
        name: child if child is None else change(child) for name, child in module._modules.items()
    }
    return copied

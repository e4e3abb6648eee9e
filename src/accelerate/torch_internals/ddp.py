# SPDX-License-Identifier: Apache-2.0
"""When DistributedDataParallel reduces: whether the next backward does, and for a forward that ran under `no_sync`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from . import Internal

DDP_SYNC = Internal(
    name="ddp_sync",
    what="require_backward_grad_sync, require_forward_param_sync and reducer of DistributedDataParallel",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="Accelerator.trigger_sync_in_backward; the error for a second backward of one forward",
    without="the backward of a forward that ran under no_sync is never reduced",
    test="tests/torch_internals/test_ddp.py::test_a_backward_is_reduced_after_a_forward_under_no_sync",
)


def reduces(replica: DistributedDataParallel) -> bool:
    """Whether backwards reduce gradients: not within `no_sync`."""
    return not DDP_SYNC.is_on or replica.require_backward_grad_sync


def expect_backward(replica: DistributedDataParallel, outputs: Sequence[torch.Tensor] = ()) -> None:
    """Make the reducer expect gradients, as a forward outside `no_sync` does, of what `outputs` were computed with."""
    if DDP_SYNC.is_on:
        replica.reducer.prepare_for_backward(list(outputs))


@contextlib.contextmanager
def reducing(replica: DistributedDataParallel) -> Iterator[None]:
    """A block whose backward reduces gradients although the forward ran under `no_sync`."""
    if not DDP_SYNC.is_on:
        yield
        return
    before = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = replica.require_forward_param_sync = True
    expect_backward(replica)
    try:
        yield
    finally:
        replica.require_backward_grad_sync, replica.require_forward_param_sync = before

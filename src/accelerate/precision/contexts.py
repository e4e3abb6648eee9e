# SPDX-License-Identifier: Apache-2.0
"""The autocast context and the gradient scaler of this run, for code that has no Accelerator at hand."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ..core.devices import accelerator_type
from ..core.enums import DistributedType
from ..state import AcceleratorState

if TYPE_CHECKING:
    from ..config.precision import AutocastKwargs

# What a forward under autocast computes in. Under fp8 it is bfloat16 around the layers that know better.
AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Autocast in the precision of the run (AcceleratorState); a context that does nothing without `native_amp`."""
    if not native_amp:
        return contextlib.nullcontext()
    state = AcceleratorState()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    if state.mixed_precision in AUTOCAST_DTYPES:
        options.setdefault("dtype", AUTOCAST_DTYPES[state.mixed_precision])
    return torch.autocast(state.device.type, **options)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A gradient scaler for this machine's device; `kwargs` are those of `torch.amp.GradScaler`.

    For FullyShardedDataParallel, where a rank sees only its shard of a gradient, one whose ranks agree on overflows.
    """
    device = accelerator_type() or "cpu"
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)

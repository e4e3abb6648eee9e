# SPDX-License-Identifier: Apache-2.0
"""Communication hooks of DDP: gradients compressed for the reduction."""

# No postponed annotations here: DDP compares the hook's own with its classes.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ...core.enums import DDPCommunicationHookType as Hook

# torch refuses its own bf16 hook by name on any backend but NCCL; gloo reduces bfloat16 as well.
_COMPRESSED = {Hook.FP16: torch.float16, Hook.BF16: torch.bfloat16}


# Takes its state and a bucket.
Function = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def register(
    model: DistributedDataParallel, hook: Hook, wrapper: Hook, state_options: dict[str, Any]
) -> None:
    """Register `hook` (wrapped by `wrapper`) on a `DistributedDataParallel` model. Hook.NO registers nothing."""
    if hook is Hook.NO:
        return
    state: object = model.process_group
    if hook in _COMPRESSED:
        function = _cast_hook(_COMPRESSED[hook])
    else:
        state = powerSGD_hook.PowerSGDState(process_group=model.process_group, **state_options)
        if hook is Hook.POWER_SGD:
            function = powerSGD_hook.powerSGD_hook
        else:
            function = powerSGD_hook.batched_powerSGD_hook
    if wrapper is not Hook.NO:
        function = _cast_wrapper(function, _COMPRESSED[wrapper])
    model.register_comm_hook(state=state, hook=function)


def _cast_hook(dtype: torch.dtype) -> Function:
    def compress(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        compressed = buffer.to(dtype).div_(group.size())

        def decompress(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return buffer.copy_(future.value()[0])

        work = dist.all_reduce(compressed, group=group, async_op=True)
        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(decompress)
        return reduced

    return compress


def _cast_wrapper(hook: Function, dtype: torch.dtype) -> Function:
    """`hook` on a bucket cast to `dtype`; its result cast back into the bucket's own buffer."""

    def wrapped(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        original = bucket.buffer()
        bucket.set_buffer(original.to(dtype))

        def restore(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            value = future.value()
            original.copy_(value[0] if isinstance(value, list) else value)
            return original

        return hook(state, bucket).then(restore)

    return wrapped

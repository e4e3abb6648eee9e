# SPDX-License-Identifier: Apache-2.0
"""Averages of weights (EMA, SWA) of models with DTensors: torch's multi-tensor operation refuses mixed lists.

`torch.optim.swa_utils` gives `torch._foreach_lerp_` parameters and buffers of one dtype together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .materialize import local_shard


def support_mixed_lists() -> None:
    """Let `torch._foreach_lerp_` take lists of DTensors and plain tensors."""
    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    table[torch.ops.aten._foreach_lerp_.Scalar] = _lerp


def _lerp(_: object, args: tuple[Sequence[Any], Sequence[Any], Any], kwargs: Mapping[str, object]) -> None:
    averages, values, weight = args
    pairs = [_local(average, value) for average, value in zip(averages, values, strict=True)]
    torch._foreach_lerp_([average for average, _ in pairs], [value for _, value in pairs], weight)


def _local(average: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shards of a tensor and of the one it is averaged with, in the layout of the first."""
    if not isinstance(average, DTensor):
        return average, value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        return average.to_local(), local_shard(value, average)
    return average.to_local(), value.redistribute(average.device_mesh, average.placements).to_local()

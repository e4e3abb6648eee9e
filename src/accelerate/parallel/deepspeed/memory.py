# SPDX-License-Identifier: Apache-2.0
"""What a DeepSpeed engine holds on this rank: its partitions, fp32 weights and gradients, as ZeRO lays them out."""

from __future__ import annotations

from typing import Any

import torch

from ..report import memory

# Where ZeRO's optimizers keep the fp32 weights that they step: a rank's part of them, or all without ZeRO.
_MASTERS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)
# What offloaded gradients pass through on their way to the host.
_WAYS = (
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "param_buffer_of_bit16_for_cpu_offload_groups",
)


def engine_bytes(engine: Any) -> dict[str, int]:
    """Bytes by kind, without the optimizer's state."""
    parameters = list(engine.module.parameters())
    parts = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    masters = engine_masters(engine)
    return {
        memory.PARAMETERS: memory.allocated_bytes([*parameters, *parts]),
        memory.GRADIENTS: _gradients(engine, [p for p in parameters if p.requires_grad], masters),
        memory.MASTERS: memory.allocated_bytes(masters),
        memory.BUCKETS: _buckets(engine),
    }


def engine_masters(engine: Any) -> list[torch.Tensor]:
    """The fp32 weights that this rank steps; none where the model's own are stepped."""
    return next(
        (found for name in _MASTERS if (found := memory.tensors_in(getattr(engine.optimizer, name, None)))), []
    )


def _gradients(engine: Any, trained: list[Any], masters: list[torch.Tensor]) -> int:
    zero, stage = engine.optimizer, int(engine.zero_optimization_stage())
    if stage == 3:
        flat = getattr(zero, "grad_partitions_flat_buffer", None)
        # Offloaded, the host steps on an fp32 copy.
        copied = memory.allocated_bytes(masters) if getattr(zero, "offload_optimizer", False) else 0
        return (0 if flat is None else flat.untyped_storage().nbytes()) + copied
    whole = memory.local_bytes(trained)
    if hasattr(zero, "fp32_groups_gradients_flat"):
        # Summed in fp32, and each backward's in the weights' dtype.
        return whole + memory.allocated_bytes(zero.fp32_groups_gradients_flat)
    if stage == 0 or not hasattr(zero, "params_in_partition"):
        return whole
    width = zero.gradient_accumulation_dtype.itemsize
    if getattr(zero, "cpu_offload", False):
        kept = _own(zero) if engine.gradient_accumulation_steps() > 1 else 0
        return memory.allocated_bytes(masters) + kept * width
    # Stage 1 keeps what each backward gives until the window ends, stage 2 what this rank will step.
    if stage == 2:
        return _own(zero) * width
    summed = sum(p.numel() for p in trained) * width if zero.use_grad_accum_attribute else 0
    return whole + summed


def _own(zero: Any) -> int:
    """Elements of the parameters that reach into this rank's part: each of their gradients is kept as a whole."""
    return sum(parameter.numel() for group in zero.params_in_partition for parameter in group)


def _buckets(engine: Any) -> int:
    zero = engine.optimizer
    found = memory.allocated_bytes(memory.tensors_in([getattr(zero, name, None) for name in _WAYS]))
    if not getattr(zero, "contiguous_gradients", False):
        return found
    size = int(zero.reduce_bucket_size) * engine.communication_data_type.itemsize
    # ZeRO 3 keeps one; the others make theirs in each backward, two where messages overlap it.
    double = getattr(zero, "overlap_comm", False) and int(engine.zero_optimization_stage()) < 3
    return found + len(getattr(zero, "ipg_buckets", [0])) * size * (2 if double else 1)

# SPDX-License-Identifier: Apache-2.0
"""What a DeepSpeed engine sends in an optimizer step and the memory it uses on this rank, in bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..prepared import CommunicationVolume
from ..report import memory

# Where ZeRO's optimizers keep the fp32 weights that they step: this rank's partition, or all without ZeRO.
_MASTER_WEIGHTS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)
# The buffers through which offloaded gradients reach the host.
_OFFLOAD_BUFFERS = (
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "param_buffer_of_bit16_for_cpu_offload_groups",
)


def engine_volume(engine: Any, backwards: int) -> list[CommunicationVolume] | None:
    """Bytes of an accumulation window of so many backwards. How many messages carry them, DeepSpeed's buckets decide.

    None for options that compress messages or send them in groups of their own.
    """
    zero = engine._config.zero_config
    compresses = any(
        getattr(zero, name, None) for name in ("zero_quantized_weights", "zero_quantized_gradients", "zenflow")
    )
    if compresses or getattr(zero, "zero_hpz_partition_size", 1) > 1 or engine.has_moe_layers:
        return None
    stage, parameters = int(engine.zero_optimization_stage()), list(engine.module.parameters())
    width = engine.communication_data_type.itemsize
    if stage == 3:
        sizes = [(p, int(p.partition_numel()) * dist.get_world_size()) for p in parameters]
        sharded = sum(size * p.dtype.itemsize for p, size in sizes if not p.ds_persist)
        persistent = sum(size * p.dtype.itemsize for p, size in sizes if p.ds_persist)
        gradients = sum(size for p, size in sizes if p.requires_grad) * width
        found = [
            # At most: for the backward again only what `stage3_max_reuse_distance` has released after the forward.
            CommunicationVolume("all-gather of parameters", None, 2 * backwards * sharded, about=True),
            CommunicationVolume("all-gather of small parameters", None, persistent),
            CommunicationVolume("reduce-scatter of gradients", None, backwards * gradients),
        ]
        return [volume for volume in found if volume.sent]
    optimizer = engine.optimizer
    if sums := getattr(optimizer, "fp32_groups_gradients_flat", None):
        # bf16 weights whose gradients are summed in fp32: entire groups are reduced, once a window.
        reduced, stepped = sum(group.numel() for group in sums), optimizer.bf16_groups_flat
    else:
        # Stage 2 reduces in each backward, the others where a window ends.
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        reduced, stepped = trained * (backwards if stage == 2 else 1), optimizer.bit16_groups_flat if stage else []
    found = [
        CommunicationVolume("reduction of gradients", None, reduced * width),
        CommunicationVolume("all-gather of stepped parameters", None, sum(group.nbytes for group in stepped)),
    ]
    return [volume for volume in found if volume.sent]


def engine_bytes(engine: Any) -> dict[str, int]:
    """Bytes by kind, without the optimizer's state."""
    parameters = list(engine.module.parameters())
    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    master_weights = engine_master_weights(engine)
    return {
        memory.PARAMETERS: memory.allocated_bytes([*parameters, *shards]),
        memory.GRADIENTS: _gradients(engine, [p for p in parameters if p.requires_grad], master_weights),
        memory.MASTER_WEIGHTS: memory.allocated_bytes(master_weights),
        memory.BUCKETS: _buckets(engine),
    }


def engine_master_weights(engine: Any) -> list[torch.Tensor]:
    """The fp32 weights that this rank steps; none where the model's own are stepped."""
    return next(
        (found for name in _MASTER_WEIGHTS if (found := memory.tensors_in(getattr(engine.optimizer, name, None)))), []
    )


def _gradients(engine: Any, trained: list[Any], master_weights: list[torch.Tensor]) -> int:
    zero, stage = engine.optimizer, int(engine.zero_optimization_stage())
    if stage == 3:
        flat = getattr(zero, "grad_partitions_flat_buffer", None)
        # Offloaded, the host steps on an fp32 copy.
        copied = memory.allocated_bytes(master_weights) if getattr(zero, "offload_optimizer", False) else 0
        return copied + (0 if flat is None else int(flat.untyped_storage().nbytes()))
    unsharded = memory.local_bytes(trained)
    if hasattr(zero, "fp32_groups_gradients_flat"):
        # Summed in fp32, and each backward's in the weights' dtype.
        return unsharded + memory.allocated_bytes(zero.fp32_groups_gradients_flat)
    if stage == 0 or not hasattr(zero, "params_in_partition"):
        return unsharded
    width: int = zero.gradient_accumulation_dtype.itemsize
    if getattr(zero, "cpu_offload", False):
        kept = _own(zero) if engine.gradient_accumulation_steps() > 1 else 0
        return memory.allocated_bytes(master_weights) + kept * width
    # Stage 1 keeps what each backward gives until the window ends, stage 2 what this rank will step.
    if stage == 2:
        return _own(zero) * width
    summed = sum(p.numel() for p in trained) * width if zero.use_grad_accum_attribute else 0
    return unsharded + summed


def _own(zero: Any) -> int:
    """Elements of the parameters that overlap this rank's partition: each of their gradients is kept entirely."""
    elements: int = sum(parameter.numel() for group in zero.params_in_partition for parameter in group)
    return elements


def _buckets(engine: Any) -> int:
    zero = engine.optimizer
    found = memory.allocated_bytes(memory.tensors_in([getattr(zero, name, None) for name in _OFFLOAD_BUFFERS]))
    if not getattr(zero, "contiguous_gradients", False):
        return found
    size: int = int(zero.reduce_bucket_size) * engine.communication_data_type.itemsize
    # ZeRO 3 keeps one; the others make theirs in each backward, two where messages overlap it.
    double = getattr(zero, "overlap_comm", False) and int(engine.zero_optimization_stage()) < 3
    return found + len(getattr(zero, "ipg_buckets", [0])) * size * (2 if double else 1)

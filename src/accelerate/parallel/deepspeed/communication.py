# SPDX-License-Identifier: Apache-2.0
"""What a DeepSpeed engine sends in an optimizer step: bytes from how ZeRO lays parameters out, messages by buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..prepared import CommunicationVolume

# Elements of a message where an engine without ZeRO reduces gradients.
_WHOLE_BUCKET = 500_000_000


def engine_volume(engine: Any, backwards: int) -> list[CommunicationVolume] | None:
    """Messages of a window of so many backwards; None for options that compress, or send in groups of their own."""
    if _sends_otherwise(engine):
        return None
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        return _partitioned(engine, backwards)
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    width = engine.communication_data_type.itemsize
    sizes = [parameter.numel() for parameter in trained]
    if hasattr(engine.optimizer, "fp32_groups_gradients_flat"):
        # bf16 weights whose gradients are summed in fp32: whole groups are reduced, once a window.
        flat = engine.optimizer.bf16_groups_flat
        sizes = [group.numel() for group in engine.optimizer.fp32_groups_gradients_flat]
        return [_reduced(sizes, _WHOLE_BUCKET, width, 1), _updated(flat)]
    if stage == 0:
        return [_reduced(sizes, _WHOLE_BUCKET, width, 1)]
    # Stage 1 reduces where a window ends, stage 2 in each backward.
    times = backwards if stage == 2 else 1
    reduced = _reduced(sizes[::-1], engine.zero_reduce_bucket_size(), width, times, about=True)
    return [reduced, _updated(engine.optimizer.bit16_groups_flat)]


def _sends_otherwise(engine: Any) -> bool:
    zero = engine._config.zero_config
    names = ("zero_quantized_weights", "zero_quantized_gradients", "zenflow")
    compresses = any(getattr(zero, name, None) for name in names)
    return compresses or getattr(zero, "zero_hpz_partition_size", 1) > 1 or bool(engine.has_moe_layers)


def _buckets(sizes: Iterable[int], limit: int) -> int:
    """How many messages hold tensors of these sizes: one is sent when the next tensor would not fit."""
    messages, filled = 0, None
    for size in sizes:
        if filled is None or filled + size > limit:
            messages, filled = messages + 1, 0
        filled += size
    return messages


def _reduced(sizes: Sequence[int], limit: int, width: int, times: int, about: bool = False) -> CommunicationVolume:
    messages = _buckets(sizes, int(limit))
    return CommunicationVolume("reduction of gradients", times * messages, times * sum(sizes) * width, about=about)


def _updated(flat: Sequence[torch.Tensor]) -> CommunicationVolume:
    """The parameters that each rank has stepped, gathered: one message a group."""
    return CommunicationVolume("all-gather of stepped parameters", len(flat), sum(group.nbytes for group in flat))


def _partitioned(engine: Any, backwards: int) -> list[CommunicationVolume]:
    """ZeRO 3: parameters that are not kept are gathered as they are used, and reduced in each backward."""
    ranks = dist.get_world_size()
    # By module, in the order of definition, which is taken for that of the forward.
    uses = [[p for p in module.parameters(recurse=False) if not p.ds_persist] for module in engine.module.modules()]
    total = [sum(p.ds_numel for p in module.parameters(recurse=False)) for module in engine.module.modules()]
    limit = engine.zero_max_reuse_distance()
    gathers, gathered, later = 0, 0, sum(total)
    bucket = max(int(engine.zero_prefetch_bucket_size()), 1)
    again = []
    for used, size in zip(uses, total, strict=True):
        later -= size
        # What lies between a module's forward and its backward decides whether it is kept meanwhile.
        if 2 * later >= limit:
            again.append(used)
    for turn in (uses, again):
        gathers += _buckets((sum(p.ds_numel for p in used) for used in turn if used), bucket)
        gathered += sum(_padded(p, ranks) * p.dtype.itemsize for used in turn for p in used)
    parameters = list(engine.module.parameters())
    kept = [p for p in parameters if p.ds_persist]
    trained = [_padded(p, ranks) for p in parameters if p.requires_grad]
    width = engine.communication_data_type.itemsize
    scattered = _reduced(trained[::-1], engine.zero_reduce_bucket_size(), width, backwards, about=True)
    small = sum(_padded(p, ranks) * p.dtype.itemsize for p in kept)
    found = [
        CommunicationVolume("all-gather of parameters", backwards * gathers, backwards * gathered, about=True),
        CommunicationVolume("all-gather of small parameters", len(kept), small),
        CommunicationVolume("reduce-scatter of gradients", scattered.messages, scattered.sent, about=True),
    ]
    return [one for one in found if one.messages]


def _padded(parameter: Any, ranks: int) -> int:
    return int(parameter.partition_numel()) * ranks

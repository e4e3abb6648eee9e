# SPDX-License-Identifier: Apache-2.0
"""Which strategy runs a layout: sizes and plugins become a name of the registry, or an error with its reason."""

from __future__ import annotations

from typing import Any

from ..config.fsdp import FullyShardedDataParallelPlugin
from ..core.errors import ConfigurationError
from ..core.messages import warn
from ..parallelism_config import ParallelismConfig
from ..runtime.mesh import describe


def choose_strategy(
    world_size: int,
    parallelism: ParallelismConfig | None = None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
) -> tuple[str, dict[str, Any]]:
    """(name in the registry, its arguments) of the strategy for a layout of `world_size` processes.

    Raises:
        ConfigurationError: the sizes do not multiply to the number of processes, or the combination is not supported.
    """
    if fsdp_plugin is not None and fsdp_plugin.fsdp_version == 1:
        if parallelism is not None:
            parallelism.validate(world_size)
        return "fsdp1", {"plugin": fsdp_plugin, "parallelism": parallelism}
    if parallelism is None:
        if fsdp_plugin is not None:
            return "fsdp2", {"plugin": fsdp_plugin}
        return ("ddp" if world_size > 1 else "single"), {}
    parallelism.validate(world_size)
    if parallelism.pp_enabled:
        return _pipeline(parallelism, fsdp_plugin)
    # Ranks that share a sequence hold the same model: it is sharded over them.
    split = parallelism.cp_enabled or parallelism.sp_enabled
    sharded = fsdp_plugin is not None or parallelism.dp_shard_enabled or split
    if parallelism.tp_enabled and not sharded and not parallelism.dp_replicate_enabled:
        return "tensor", {"parallelism": parallelism}
    if sharded or parallelism.tp_enabled:
        # Replicas of a tensor-parallel model are FSDP2 with one rank in each shard group.
        plugin = fsdp_plugin or FullyShardedDataParallelPlugin(fsdp_version=2)
        sizes = parallelism.sizes
        shards = sizes["dp_shard"] * sizes["cp"] * sizes["sp"]
        size = plugin.reshard_after_forward
        if parallelism.tp_enabled and type(size) is int and size < shards:
            raise ConfigurationError(
                f"reshard_after_forward={size} with tp_size={sizes['tp']}: torch builds these "
                "groups only over all processes and would hang. Use True or False"
            )
        return "fsdp2", {"plugin": plugin, "parallelism": parallelism}
    return ("ddp" if world_size > 1 else "single"), {}


def check_deepspeed_layout(world_size: int, parallelism: ParallelismConfig) -> None:
    """Raise ConfigurationError for sizes other than those of data parallelism, all that DeepSpeed has here."""
    parallelism.validate(world_size)
    split = [
        f"{name}_size={parallelism.sizes[name]}"
        for name in ("tp", "cp", "sp", "pp")
        if parallelism.sizes[name] > 1
    ]
    if split:
        raise ConfigurationError(
            f"{', '.join(split)} with a deepspeed_plugin: DeepSpeed is only data parallel and "
            "shards by its ZeRO stage. Use an fsdp_plugin of version 2 with dp_shard_size "
            "instead of the deepspeed_plugin"
        )


def _pipeline(
    parallelism: ParallelismConfig, fsdp_plugin: FullyShardedDataParallelPlugin | None
) -> tuple[str, dict[str, Any]]:
    """Stages, each of them replicated, sharded or tensor parallel as well."""
    if parallelism.cp_enabled or parallelism.sp_enabled:
        raise ConfigurationError(
            f"{describe(parallelism)}: a pipeline divides batches, not sequences. Use pp_size with dp_shard_size, "
            "dp_replicate_size and tp_size, or cp_size and sp_size without pp_size."
        )
    if (
        fsdp_plugin is not None
        and fsdp_plugin.reshard_is_given
        and fsdp_plugin.reshard_after_forward is not False
    ):
        warn(
            f"reshard_after_forward={fsdp_plugin.reshard_after_forward} has no effect with "
            f"pp_size={parallelism.pp_size}: a pipeline keeps the parameters of its stages "
            "gathered for all micro-batches. Use False, or omit it"
        )
    if parallelism.dp_shard_enabled:
        fsdp_plugin = fsdp_plugin or FullyShardedDataParallelPlugin(fsdp_version=2)
    return "pipeline", {"parallelism": parallelism} | (
        {"plugin": fsdp_plugin} if fsdp_plugin else {}
    )

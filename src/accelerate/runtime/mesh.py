# SPDX-License-Identifier: Apache-2.0
"""From the sizes of a layout to one DeviceMesh, and to what each rank reads and shares with whom."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from ..parallelism_config import ParallelismConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def all_sharded(world_size: int) -> ParallelismConfig:
    """The layout of plain sharding: one copy of the model over all ranks."""
    return ParallelismConfig(
        dp_replicate_size=1, dp_shard_size=world_size, tp_size=1, cp_size=1, sp_size=1, pp_size=1
    )


def build_mesh(config: ParallelismConfig, world_size: int, device_type: str) -> DeviceMesh | None:
    """The mesh of a layout (kept in `config.device_mesh`), None where every dimension has one rank.

    Raises ConfigurationError where the sizes do not multiply to `world_size`.
    """
    config.validate(world_size)
    return config.get_device_mesh(device_type)


def coordinates(config: ParallelismConfig, rank: int) -> dict[str, int]:
    """Dimension -> this rank's place in it, for every dimension of the layout."""
    shape = config.mesh_shape
    places = dict.fromkeys(config.sizes, 0)
    for name in reversed(shape):
        rank, places[name] = divmod(rank, shape[name])
    return places


def data_shard(config: ParallelismConfig, rank: int) -> tuple[int, int]:
    """(index, count): which part of the data a rank reads. Ranks that differ in tp, cp, sp or pp only share one."""
    places = coordinates(config, rank)
    return places["dp_replicate"] * config.sizes["dp_shard"] + places[
        "dp_shard"
    ], config.data_parallel_size


def count_data_shards(config: ParallelismConfig | None, world_size: int) -> int:
    """The number of data shards of a run; without a layout each rank reads its own."""
    if config is None:
        return world_size
    return config.data_parallel_size


def group_of(mesh: DeviceMesh | None, name: str) -> ProcessGroup | None:
    """The process group of one (flattened) dimension, None where the layout does not have it."""
    dimension = _flattened(mesh, name)
    if dimension is None:
        return None
    return dimension.get_group()


def fsdp_mesh(
    config: ParallelismConfig, mesh: DeviceMesh | None, device: torch.device
) -> DeviceMesh:
    """What `fully_shard` is given: one dimension of shards, or two (copies, shards)."""
    if mesh is None:
        # One rank alone: torch wants a mesh (and a group) all the same.
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard_cp",))
    if config.cp_enabled or config.sp_enabled:
        shards = "dp_shard_cp"
    else:
        shards = "dp_shard"
    dimension = _flattened(mesh, shards)
    if dimension is None:
        raise ConfigurationError(
            f"{describe(config)}: FSDP has nothing to shard over. Give dp_shard_size, cp_size or sp_size above 1, or "
            "train with DDP."
        )
    if config.dp_replicate_enabled:
        return _slice(mesh, ("dp_replicate", shards))
    return dimension


def describe(config: ParallelismConfig) -> str:
    """The layout in words: `dp_shard=2 x tp=2`."""
    active = [f"{name}={size}" for name, size in config.sizes.items() if size > 1]
    return " x ".join(active) or "one rank"


def _flattened(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    if mesh is None:
        return None
    try:
        return _slice(mesh, (name,))
    except KeyError:
        return None


def _slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    with warnings.catch_warnings():
        # torch would rather have the flattened mesh handed around; the API's users slice it from the root.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[names]

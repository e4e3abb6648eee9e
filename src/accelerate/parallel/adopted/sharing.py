# SPDX-License-Identifier: Apache-2.0
"""What is read from sharded models: the ranks that share each parameter, and the gradients that are left to reduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...core.errors import PrepareError
from ...torch_internals.fsdp2 import group_parameters, module_parameter, shard_groups

# Global ranks of one dimension of a mesh, in ascending order.
Ranks = tuple[int, ...]

_REMEDY = "Build all meshes of the model as slices of one mesh over the processes that share it"


class Sharing(NamedTuple):
    """How one rank shares a parameter with others.

    Fields:
        averaged: the ranks of each mesh dimension over which FSDP averages the gradient.
        split: the ranks of each other mesh dimension of the parameter.
        divisor: FSDP's divisor of the summed gradient, if one was set.
    """

    averaged: tuple[Ranks, ...] = ()
    split: tuple[Ranks, ...] = ()
    divisor: float | None = None


@dataclass(frozen=True)
class Description:
    """What one rank knows of its models.

    Fields:
        sharings: the name of a first parameter, and how it and those like it are shared; in the same order on each
            rank.
        same_batch: further ranks that read the same samples as this one.
    """

    sharings: tuple[tuple[str, Sharing], ...]
    same_batch: tuple[Ranks, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The layout of a run.

    Fields:
        shards: the ranks that read each shard of the data.
        averages: for each sharing of the descriptions the groups of ranks that have to average gradients.
    """

    shards: tuple[Ranks, ...]
    averages: tuple[tuple[Ranks, ...], ...]


def derive(descriptions: Sequence[Description]) -> Layout:
    """The layout that follows from the description of each rank, without any message.

    Ranks over which FSDP averages read different samples. Those of another mesh dimension read the same ones, unless
    FSDP averages over them as well: experts, whose tokens come from several shards. What no mesh covers is replicated.

    Raises:
        PrepareError: the meshes contradict each other, or a gradient would not be an average.
    """
    world = range(len(descriptions))
    names = [[name for name, _ in description.sharings] for description in descriptions]
    if any(names_of_rank != names[0] for names_of_rank in names):
        raise PrepareError(
            "the ranks have different parameters (the first ones: "
            f"{[of_rank[:1] for of_rank in names]}): a model whose layers are already distributed "
            "over ranks (pipeline stages) is not supported. Pass the plain model to prepare, "
            "with ParallelismConfig(pp_size=...)"
        )
    sharings = [[sharing for _, sharing in description.sharings] for description in descriptions]
    averaged = [sharing.averaged for sharing in chain.from_iterable(sharings)]
    fsdp = _components(world, chain.from_iterable(averaged))
    same_batch: list[Ranks] = []
    for rank, description in enumerate(descriptions):
        same_batch += description.same_batch
        for sharing in sharings[rank]:
            same_batch += [r for r in sharing.split if fsdp[rank].intersection(r) == {rank}]
    readers = _components(world, same_batch)
    shards = tuple(sorted({tuple(sorted(ranks)) for ranks in readers}))
    columns = _columns(shards, fsdp)
    averages = []
    for name, *of_ranks in zip(names[0], *sharings, strict=True):
        averaged = [sharing.averaged for sharing in of_ranks]
        split = [sharing.split for sharing in of_ranks]
        reached = _components(world, chain.from_iterable(averaged + split))
        summed = _components(world, chain.from_iterable(averaged))
        groups: list[Ranks] = []
        for column in sorted(set(columns.values())):
            # The ranks that a backward has summed over already; the rest averages ranks at the same place of each.
            pieces: dict[frozenset[int], list[int]] = {}
            for rank in column:
                pieces.setdefault(reached[rank], []).append(rank)
            for rank in column:
                count = len(pieces[reached[rank]])
                divisor = of_ranks[rank].divisor or len(summed[rank])
                if divisor != count:
                    raise PrepareError(
                        f"the gradient of {name} would not be an average: it is a sum over {count} of the "
                        f"{len(column)} shards of the data, divided by {divisor:g}. Shard its module with "
                        f"fully_shard, and call module.set_gradient_divide_factor({count}) where the ranks of another "
                        "mesh dimension exchange tokens"
                    )
            groups += zip(*pieces.values(), strict=True)
        averages.append(tuple(groups))
    return Layout(shards, tuple(averages))


def _columns(shards: tuple[Ranks, ...], fsdp: Sequence[frozenset[int]]) -> dict[int, Ranks]:
    """For each rank the ones that read the other shards at its place."""
    if len({len(ranks) for ranks in shards}) > 1:
        raise PrepareError(
            f"the meshes of the model are unrelated: the ranks that would read the same samples are {list(shards)}, "
            f"which are not equally many. {_REMEDY}"
        )
    columns = {}
    for column in zip(*shards, strict=True):
        for rank in column:
            columns[rank] = column
            if not fsdp[rank].issubset(column) or list(column) != sorted(column):
                raise PrepareError(
                    f"the meshes of the model are unrelated: rank {rank} averages with {sorted(fsdp[rank])}, and "
                    f"the ranks that would read the same samples are {list(shards)}. {_REMEDY}"
                )
    return columns


def _components(world: Sequence[int], groups: Iterable[Ranks]) -> list[frozenset[int]]:
    """For each rank all ranks that groups connect with it."""
    parents = list(world)

    def root(rank: int) -> int:
        while parents[rank] != rank:
            rank = parents[rank]
        return rank

    for ranks in groups:
        first = root(ranks[0])
        for rank in ranks:
            parents[root(rank)] = first
    components: dict[int, set[int]] = {}
    for rank in world:
        component = components.setdefault(root(rank), set())
        component.add(rank)
    return [frozenset(components[root(rank)]) for rank in world]


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Sharing]]:
    """(name, parameter, how it is shared) of each parameter, while no FSDP2 unit is gathered."""
    managed: dict[int, tuple[tuple[Ranks, ...], float | None]] = {}
    for _, group, _ in shard_groups(model):
        info = group.mesh_info
        averaged: list[Ranks] = []
        for dimension in (info.replicate_mesh_dim, info.shard_mesh_dim):
            if dimension is None:
                continue
            ranks = ranks_of(info.mesh, dimension)
            if len(ranks) > 1:
                averaged.append(ranks)
        entry = (tuple(averaged), group.gradient_divide_factor)
        for parameter in group_parameters(group):
            managed[id(module_parameter(parameter))] = entry
    for name, model_parameter in model.named_parameters():
        averaged_over, divisor = managed.get(id(model_parameter), ((), None))
        split = tuple(_split(model_parameter, averaged_over))
        yield name, model_parameter, Sharing(averaged_over, split, divisor)


def tensor_parallel_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which transformers splits the layers of a model; None where it does not."""
    mesh: DeviceMesh | None = getattr(model, "_device_mesh", None)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        return mesh["tp"]
    return None


def ranks_of(mesh: DeviceMesh, dimension: int) -> Ranks:
    """The ranks of this process's group of one dimension."""
    return tuple(sorted(dist.get_process_group_ranks(mesh.get_group(dimension))))


def _split(parameter: torch.Tensor, averaged: Sequence[Ranks]) -> Iterator[Ranks]:
    """The ranks of each dimension of a parameter's mesh over which FSDP does not average."""
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    for dimension in range(mesh.ndim):
        ranks = ranks_of(mesh, dimension)
        if len(ranks) > 1 and ranks not in averaged:
            yield ranks


def declared(model: nn.Module, name: str) -> int | None:
    """A size of the `DistributedConfig` with which transformers loaded the model."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    sharded = getattr(model, "_device_mesh", None) is not None
    if sharded and hasattr(config, name):
        return int(getattr(config, name))
    return None

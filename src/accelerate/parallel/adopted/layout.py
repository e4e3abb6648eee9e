# SPDX-License-Identifier: Apache-2.0
"""The layout of models that are sharded already, and what reduces the gradients that their backward leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from ...core.errors import PrepareError
from ...core.modules import class_name
from ..gradients import GradientReducer, UnreducedGradients
from ..materialize import from_all
from ..sharded import reshard
from ..tensor.strategy import PartialSums
from . import requirements
from .sharing import (
    Description,
    Layout,
    Ranks,
    Sharing,
    declared,
    derive,
    parameters_of,
    ranks_of,
    tensor_parallel_mesh,
)

# For each way in which a parameter is shared the groups of ranks that average its gradient.
Averages = dict[Sharing, tuple[Ranks, ...]]


def find_layout(
    models: Sequence[nn.Module],
    same_batch: Ranks = (),
    gather: Callable[[Description], list[Description]] = from_all,
) -> tuple[Layout, Averages]:
    """The layout of models, of which some are sharded. Every rank calls it.

    Args:
        models: the models.
        same_batch: ranks that are known to read the same samples as this one.
        gather: returns the description of each rank.

    Raises:
        PrepareError: a model cannot be taken as it is.
    """
    reshard(models)
    requirements.check(models)
    first: dict[Sharing, str] = {}
    for model in models:
        for name, _, sharing in parameters_of(model):
            first.setdefault(sharing, name)
    readers = [same_batch] if same_batch else []
    for model in models:
        mesh = tensor_parallel_mesh(model)
        if mesh is not None and mesh.size() > 1:
            # transformers gives these ranks one batch, although it may have split nothing over them.
            readers.append(ranks_of(mesh, 0))
    description = Description(
        tuple((name, sharing) for sharing, name in first.items()), tuple(readers)
    )
    layout = derive(gather(description))
    for model in models:
        size = declared(model, "dp_size")
        if size is not None and size != len(layout.shards):
            raise PrepareError(
                f"{class_name(model)} was loaded for {size} data-parallel ranks "
                f"(DistributedConfig), but its parameters are laid out for {len(layout.shards)}: "
                "load it again with sizes whose product is the number of processes"
            )
    return layout, dict(zip(first, layout.averages, strict=True))


def reducers_of(
    model: nn.Module, averages: Averages, data_group: dist.ProcessGroup | None
) -> list[GradientReducer]:
    """What reduces the gradients that the model's own backward leaves. Every rank calls it.

    Args:
        model: the model.
        averages: from `find_layout`.
        data_group: the ranks that read the other shards of the data; None for all.
    """
    by_groups: dict[tuple[Ranks, ...], list[nn.Parameter]] = {}
    outside_fsdp = []
    for _, parameter, sharing in parameters_of(model):
        by_groups.setdefault(averages[sharing], []).append(parameter)
        if not sharing.averaged:
            outside_fsdp.append(parameter)
    reducers: list[GradientReducer] = [PartialSums(outside_fsdp)]
    for groups, parameters in by_groups.items():
        members = next(ranks for ranks in groups if dist.get_rank() in ranks)
        if len(members) == 1:
            continue
        group = data_group
        if len(members) != dist.get_world_size(data_group):
            group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
        reducers.append(UnreducedGradients(group, parameters))
    return reducers

# SPDX-License-Identifier: Apache-2.0
"""The parameters of a pipeline: which ranks share one, and how those of a stage are sharded or initialised."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import nn

from ...core.errors import PrepareError
from ...runtime import mesh
from .. import materialize
from ..fsdp.strategy import shard_model
from ..fsdp.units import find_modules
from ..sharded_optimizer import ParameterPlaces
from .model import TiedParameters
from .p2p import P2PChannel
from .stage import Stage, present_buffers
from .stage_plan import StagePlan

if TYPE_CHECKING:
    from .strategy import PipelineParallel


class Sharing(NamedTuple):
    """The ranks that have a parameter, its number, and whether perhaps no stage uses it."""

    ranks: tuple[int, ...]
    number: int
    maybe_unused: bool


@dataclass
class ModelParts:
    """What one rank has of a model that is not cut yet. Names are plain.

    Fields:
        shapes: of the parameters of the complete model, in its order.
        template: a module whose state has the names and shapes of the complete model's.
        stages: the numbers of the rank's stages.
        tensors: ids of the rank's parameters and buffers. names: all names of its parameters.
        sharing: by all names, who has the parameters that several ranks have.
        unsharded: names of parameters that FSDP2 leaves unsharded. They are read on several stages, or tied between
            two stages of one rank, which FSDP2 shards separately.
    """

    shapes: dict[str, list[int]]
    template: nn.Module
    stages: list[int]
    tensors: set[int]
    names: set[str] = field(default_factory=set)
    sharing: dict[str, Sharing] = field(default_factory=dict)
    unsharded: set[str] = field(default_factory=set)


def parts_of_rank(model: nn.Module, plan: StagePlan, ranks: Sequence[int], rank: int) -> ModelParts:
    """What a rank has of a model. `ranks`: by stage, the rank that has it."""
    cut, locations = plan.cut, plan.locations(model)
    named = dict(materialize.named_parameters(model))
    complete = materialize.without_storage(model.state_dict(keep_vars=True))
    stages = [stage for stage, owner in enumerate(ranks) if owner == rank]
    own_units = {cut.units[number] for number in cut.units_of(stages)}
    foreign = [model.get_submodule(unit) for unit in cut.units if unit not in own_units]
    parts = ModelParts(
        shapes={name: list(parameter.shape) for name, parameter in named.items()},
        template=materialize.skeleton(type(model).__name__, complete),
        stages=stages,
        tensors=set(map(id, present_buffers(model, foreign))),
        unsharded=set(plan.reads),
    )
    inside: set[int] = set()
    for unit in cut.units:
        inside.update(map(id, model.get_submodule(unit).parameters()))
    numbers = {id(parameter): number for number, parameter in enumerate(named.values())}
    for name, parameter in materialize.named_parameters(model, remove_duplicate=False):
        key = id(parameter)
        owners = [ranks[stage] for stage in sorted(locations[key])]
        if rank in owners:
            parts.tensors.add(key)
            parts.names.add(name)
        if len(set(owners)) > 1:
            sharing = Sharing(tuple(sorted(set(owners))), numbers[key], key not in inside)
            parts.sharing[name] = sharing
        if len(set(owners)) < len(owners):
            parts.unsharded.add(name)
    return parts


def tied_parameters(
    model: nn.Module, sharing: Mapping[str, Sharing], channel: P2PChannel
) -> TiedParameters:
    """The parameters of this rank that other ranks have too, in the same order on all of them."""
    places: dict[int, tuple[nn.Module, str, Sharing]] = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full_name = ".".join(filter(None, (prefix, name)))
            shared = sharing.get(materialize.canonical_name(full_name))
            if shared is not None:
                places.setdefault(shared.number, (module, name, shared))
    tied = TiedParameters(channel)
    for number in sorted(places):
        module, name, shared = places[number]
        tied.add(module, name, shared.ranks, shared.maybe_unused)
    return tied


def fill_or_shard(
    strategy: PipelineParallel,
    model: nn.Module,
    stages: dict[int, Stage],
    has_weights: bool,
    unsharded: set[str],
) -> None:
    """Shard the stages, or initialise those without weights."""
    places = ParameterPlaces(model).shared()
    for stage in stages.values():
        # The complete model's function initialises modules.
        vars(stage)["_init_weights"] = getattr(model, "_init_weights", None)
    if has_weights:
        ranks = strategy.gradient_group
    else:
        ranks = _same_stages(strategy.channel)
    if strategy.plugin is not None:
        _shard(strategy, model, stages, ranks, unsharded)
    elif not has_weights:
        # Identically on all ranks with the same stages.
        for stage in stages.values():
            if materialize.where_meta(stage) is not None:
                materialize.allocate(stage, strategy.device)
                materialize.initialise(stage, strategy.device, ranks)
    inside: set[int] = set()
    for stage in stages.values():
        inside.update(map(id, stage.modules()))
    for owners in places:
        # A tied parameter was replaced where a stage uses it: its other places follow.
        present = {id(getattr(module, name)) for module, name in owners}
        chosen = next(
            (getattr(module, name) for module, name in owners if id(module) in inside), None
        )
        for module, name in owners if len(present) > 1 else ():
            setattr(module, name, chosen)
    left = materialize.where_meta(model)
    if left:
        raise PrepareError(
            f"{left} is outside of the units that stages consist of and has no weights: build the model with "
            "weights on rank 0"
        )


def _same_stages(channel: P2PChannel) -> dist.ProcessGroup:
    """The ranks that have the same stages. All ranks make the groups."""
    count = dist.get_world_size() // channel.size
    groups: list[dist.ProcessGroup] = [
        dist.new_group(list(range(rank * count, (rank + 1) * count)))
        for rank in range(channel.size)
    ]
    return groups[channel.rank]


def _shard(
    strategy: PipelineParallel,
    model: nn.Module,
    stages: dict[int, Stage],
    ranks: dist.ProcessGroup | None,
    unsharded: set[str],
) -> None:
    plugin = copy.copy(strategy.plugin)
    assert plugin is not None
    plugin.set_auto_wrap_policy(model)
    # Parameters stay gathered from one micro-batch to the next.
    plugin.reshard_after_forward = False
    shards = mesh.fsdp_mesh(strategy.layout, strategy.mesh, strategy.device)
    ignored = find_modules(model, plugin.ignored_modules)
    shared = {
        parameter for name, parameter in materialize.named_parameters(model) if name in unsharded
    }
    for number, stage in stages.items():
        inside = {id(module) for module in stage.modules()}
        plugin.ignored_modules = [module for module in ignored if id(module) in inside] or None
        # What the model returns is fp32, as under any layout; what stages send is not.
        full = strategy.precision.native_amp and number == len(strategy.ranks) - 1
        shard_model(
            stage, plugin, shards, strategy.device, ranks=ranks, full_outputs=full, unsharded=shared
        )

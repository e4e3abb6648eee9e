# SPDX-License-Identifier: Apache-2.0
"""The parameters of a pipeline: which ranks have one, its values, and its gradient where several ranks have it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import PrepareError
from ...core.modules import direct_parameters
from ...runtime import mesh
from .. import materialize
from ..fsdp.strategy import shard_model
from ..fsdp.units import find_modules
from ..gradients import local
from ..sharded_optimizer import ParameterPlaces
from .p2p import P2PChannel
from .split import StagePlan
from .stage import Stage, present_buffers

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
    units = {unit: model.get_submodule(unit) for unit in cut.units}
    in_units: set[nn.Parameter] = set()
    for unit in units.values():
        in_units.update(unit.parameters())
    for number in cut.units_of(stages):
        del units[cut.units[number]]
    parts = ModelParts(
        shapes={name: list(parameter.shape) for name, parameter in named.items()},
        template=materialize.skeleton(type(model).__name__, complete),
        stages=stages,
        tensors=set(map(id, present_buffers(model, units.values()))),
        unsharded=set(plan.reads),
    )
    numbers = {parameter: number for number, parameter in enumerate(named.values())}
    for name, parameter in materialize.named_parameters(model, remove_duplicate=False):
        stages_with_it = locations[id(parameter)]
        owners = {ranks[stage] for stage in stages_with_it}
        if rank in owners:
            parts.tensors.add(id(parameter))
            parts.names.add(name)
        if len(owners) > 1:
            maybe_unused = parameter not in in_units
            ordered = tuple(sorted(owners))
            parts.sharing[name] = Sharing(ordered, numbers[parameter], maybe_unused)
        if len(owners) < len(stages_with_it):
            parts.unsharded.add(name)
    return parts


@torch.no_grad()
def distribute(model: nn.Module, present: Collection[int], channel: P2PChannel) -> bool:
    """Give the parameters and buffers with ids in `present` rank 0's values.

    They are moved to the channel's device; all other tensors lose their memory. Every rank calls it with a model of
    the same structure.

    Returns:
        Whether rank 0 has weights. If not (they are on meta), those of the rank's stages are yet to be initialized.
    """
    named = dict(materialize.named_tensors(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    is_meta = any(tensor.is_meta for tensor in named.values())
    shapes_of_first, is_meta = channel.from_first((shapes, is_meta))
    if list(shapes_of_first.items()) != list(shapes.items()):
        different = [
            name
            for name in {**shapes_of_first, **shapes}
            if shapes.get(name) != shapes_of_first.get(name)
        ]
        raise PrepareError(
            "this rank's model differs from rank 0's "
            f"({', '.join(different[:3]) or 'the order of its tensors'}): build the same model on "
            "all ranks, and do not share a layer with another model"
        )
    values: dict[int, torch.Tensor] = {}
    for tensor in named.values():
        if not is_meta:
            value = materialize.broadcast_tensor(tensor, tensor.shape, tensor.dtype, channel.device)
            if id(tensor) in present:
                values[id(tensor)] = value

    def replacement(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in present:
            return tensor.data.to("meta")
        value = values.get(id(tensor), tensor)
        if value is not tensor and tensor.device.type == value.device.type:
            # The object stays: an optimizer may have it.
            tensor.data = value
            return tensor
        return value

    materialize.replace_tensors(model, replacement)
    return not is_meta


def fill_or_shard(
    strategy: PipelineParallel,
    model: nn.Module,
    stages: dict[int, Stage],
    has_weights: bool,
    unsharded: set[str],
) -> None:
    """Shard the stages, or initialize those without weights."""
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
    modules: set[nn.Module] = set()
    for stage in stages.values():
        modules.update(stage.modules())
    for owners in places:
        # A tied parameter was replaced where a stage uses it: its other places follow.
        replaced = [getattr(module, name) for module, name in owners if module in modules]
        for module, name in owners:
            if replaced:
                setattr(module, name, replaced[0])
    left = materialize.where_meta(model)
    if left:
        raise PrepareError(
            f"{left} is outside the units that make up the stages and does not have weights: "
            "build the model with weights on rank 0"
        )


def _same_stages(channel: P2PChannel) -> dist.ProcessGroup:
    """The ranks that have the same stages. All ranks make the groups."""
    count = dist.get_world_size() // channel.size
    groups: list[dist.ProcessGroup] = []
    for first in range(0, dist.get_world_size(), count):
        groups.append(dist.new_group(list(range(first, first + count))))
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
        inside = set(stage.modules())
        plugin.ignored_modules = [module for module in ignored if module in inside] or None
        # What the model returns is fp32, as under any layout; what stages send is not.
        full = strategy.precision.native_amp and number == len(strategy.ranks) - 1
        shard_model(
            stage, plugin, shards, strategy.device, ranks=ranks, full_outputs=full, unsharded=shared
        )


@dataclass
class _TiedParameter:
    """A parameter at `owner.name` on several ranks, now and where it is replaced."""

    owner: nn.Module
    name: str
    sharing: Sharing
    summed: torch.Tensor | None = None  # the gradient that has the sum over the ranks

    @property
    def parameter(self) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self.owner, self.name)
        return parameter


class TiedParameters:
    """Parameters on stages of several ranks, each gradient the sum over them. The first rank counts it in norms.

    Args:
        model: this rank's, as it is laid out.
        sharing: by all names, who has the parameters that several ranks have.
        channel: of the pipeline.
    """

    def __init__(
        self, model: nn.Module, sharing: Mapping[str, Sharing], channel: P2PChannel
    ) -> None:
        self.channel = channel
        places: dict[int, _TiedParameter] = {}
        for prefix, module in model.named_modules():
            for name in direct_parameters(module):
                full_name = f"{prefix}.{name}".removeprefix(".")
                shared = sharing.get(materialize.canonical_name(full_name))
                if shared is not None:
                    places.setdefault(shared.number, _TiedParameter(module, name, shared))
        # In the same order on all ranks.
        self._tied: list[_TiedParameter] = [places[number] for number in sorted(places)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the tied parameters of this rank."""
        return [tied.parameter for tied in self._tied]

    def _is_first(self, tied: _TiedParameter) -> bool:
        return tied.sharing.ranks[0] == self.channel.rank

    def counted_elsewhere(self) -> set[int]:
        """Return the ids of the parameters that another rank counts."""
        return {id(tied.parameter) for tied in self._tied if not self._is_first(tied)}

    def before_backward(self) -> None:
        """Only the first rank keeps a sum to accumulate on; the others start from zero."""
        for tied in self._tied:
            gradient = tied.parameter.grad
            if gradient is not None and gradient is tied.summed and not self._is_first(tied):
                local(gradient).zero_()
            tied.summed = None

    def sum(self) -> None:
        """Sum the gradients of each tied parameter over its ranks."""
        for tied in self._tied:
            parameter, ranks = tied.parameter, tied.sharing.ranks
            if not parameter.requires_grad:
                continue
            if tied.sharing.maybe_unused and self.channel.has_values:
                # A parameter without a gradient on any rank gets none, as in a plain model.
                has_gradient = torch.tensor([parameter.grad is not None], dtype=torch.uint8)
                used = has_gradient.to(self.channel.device)
                self._sum(used, ranks)
                if not used.item():
                    continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._sum(local(parameter.grad), ranks)
            tied.summed = parameter.grad

    def _sum(self, gradient: torch.Tensor, ranks: tuple[int, ...]) -> None:
        group, (first, *others) = self.channel.group, ranks
        arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        if self.channel.rank != first:
            dist.send(gradient.contiguous(), group=group, group_dst=first)
            dist.recv(arrived, group=group, group_src=first)
            gradient.copy_(arrived)
            return
        for other in others:
            dist.recv(arrived, group=group, group_src=other)
            gradient.add_(arrived)
        total = gradient.contiguous()
        for other in others:
            dist.send(total, group=group, group_dst=other)

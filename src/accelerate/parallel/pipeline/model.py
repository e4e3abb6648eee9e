# SPDX-License-Identifier: Apache-2.0
"""A prepared pipelined model: its gradients, random streams and state."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.errors import CheckpointError
from ...precision.base import Precision
from ..accumulated import AccumulatedGradients
from ..context.region import ContextParallel
from ..gradients import GradientReducer, all_reduce, deferred, gradients_of, local
from ..prepared import GroupShapes
from ..sharded import ShardedModel
from . import state
from .p2p import P2PChannel
from .schedules import ScheduleRunner
from .stage import Stage


@dataclass
class Stages(GradientReducer):
    """What one pipelined model consists of on this rank.

    Fields:
        schedules: runs its stages. tied: parameters on stages of several ranks. random: its random streams.
        shapes: the parameters of the complete model in its order, name -> shape. template: a module whose state has
            the names and shapes of the complete model's.
        replica_group: the ranks that have the same stages; None where only this one has them.
        is_sharded: whether FSDP2 shards the stages.
        unsharded: trainable parameters that FSDP2 does not shard, whose gradients are averaged over the replicas.
        reductions: of the stages that FSDP2 shards, by which it reduces their gradients.
        names: the name of each parameter, as the user's object and as its replacement.
        groups: by optimizer, the names in each of its groups on all stages.
        shared: optimizers that step parameters of other models, too.
    """

    schedules: ScheduleRunner
    tied: TiedParameters
    random: StageRandom
    shapes: dict[str, list[int]]
    template: nn.Module
    replica_group: dist.ProcessGroup | None
    is_sharded: bool
    unsharded: list[nn.Parameter]
    reductions: list[Callable[[int], None]] = field(default_factory=list)
    names: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[list[str]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    shared: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)

    @property
    def modules(self) -> Mapping[int, Stage]:
        """The stages of this rank by their number."""
        return self.schedules.runner.stages

    def finish(self) -> None:
        """Reduce gradients over ranks, after the last backward of a window."""
        for reduce in self.reductions:
            reduce(1)
        self.defer_reduction()
        self.tied.sum()
        if self.replica_group is not None:
            all_reduce(map(local, gradients_of(self.unsharded)), self.replica_group, average=True)

    def defer_reduction(self) -> None:
        """Have FSDP2 keep parameters and gradients of the stages unsharded from one micro-batch to the next."""
        for stage in self.modules.values():
            if isinstance(stage, FSDPModule):
                stage.set_is_last_backward(False)
                stage.set_reshard_after_backward(False)
                stage.set_requires_gradient_sync(False)

    def names_in(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of this model's parameters in each group of an optimizer on this rank."""
        return [
            [self.names[parameter] for parameter in group["params"] if parameter in self.names]
            for group in optimizer.param_groups
        ]

    def merge_names(self, of_ranks: Sequence[list[list[str]]]) -> list[list[str]]:
        """The names in each group of an optimizer on all stages, from what `names_in` returned on each rank.

        An optimizer that was made before the model was cut has all of them on every rank, in the user's order.
        """
        if all(groups == of_ranks[0] for groups in of_ranks):
            return of_ranks[0]
        found = [set().union(*groups) for groups in zip(*of_ranks, strict=True)]
        return [[name for name in self.shapes if name in names] for names in found]


class PipelinedModel(ShardedModel):
    """A model of which this rank has some blocks, the `stages`."""

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        device: torch.device,
        sequence: ContextParallel | None,
        saves_shards: bool,
        stages: Stages,
    ) -> None:
        super().__init__(module, precision, device, sequence, saves_shards)
        self.stages = stages

    @property
    def template(self) -> nn.Module:
        """A module without storage with the full model's names and shapes."""
        return self.stages.template

    def units(self) -> Iterable[nn.Module]:
        """Return the modules of this rank's stages."""
        return self.stages.modules.values()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without communicating them between replicas."""
        return deferred([self.stages])

    def trained_names(self) -> set[str]:
        """The names of the parameters of all stages, also of frozen ones."""
        return set(self.stages.shapes)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return the full state, collected on rank 0."""
        return state.full_model_state(self.inner, self.stages.schedules.runner.channel)

    def load_state_dict(self, state_: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state into this rank's stages."""
        state.load_full_model_state(self.inner, dict(state_), self.device, strict)

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Also where this rank's stages have none of the optimizer's parameters."""
        return optimizer in self.stages.groups or super().trains_with(optimizer)

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names in each group of an optimizer, of all stages."""
        stages = self.stages
        if optimizer in stages.shared:
            raise CheckpointError(
                f"{type(optimizer).__name__} steps parameters of {type(self.inner).__name__} and of another pipelined "
                "model: its state cannot be collected from their stages. Make an optimizer for each model"
            )
        return stages.groups[optimizer]

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state, collected on rank 0."""
        channel = self.stages.schedules.runner.channel
        return state.full_optimizer_state(self.inner, optimizer, self._names_of(optimizer), channel)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_: Mapping[str, object]
    ) -> None:
        """Load an optimizer's full state."""
        state.load_full_optimizer_state(
            self.inner, optimizer, dict(state_), self._names_of(optimizer), self.device
        )

    def optimizer_group_shapes(self, optimizer: torch.optim.Optimizer) -> GroupShapes:
        """Return the shape of each parameter of the full model, for each group of the optimizer."""
        shapes = self.stages.shapes
        return [{name: shapes[name] for name in group} for group in self._names_of(optimizer)]

    def accumulated_gradients(self) -> AccumulatedGradients:
        """Return the gradients of an unfinished accumulation window."""
        return self.stages.schedules.accumulated

    def rank_state(self) -> dict[str, object]:
        """The place in the model's random stream."""
        return {"calls": self.stages.random.calls}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `rank_state` returned."""
        self.stages.random.calls = state["calls"]


@dataclass
class _TiedParameter:
    """A parameter at `owner.name` on several ranks. `maybe_unused`: then it gets no gradient, as in a plain model."""

    owner: nn.Module
    name: str
    ranks: tuple[int, ...]
    maybe_unused: bool
    summed: torch.Tensor | None = None  # the gradient that has the sum over the ranks

    @property
    def parameter(self) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self.owner, self.name)
        return parameter


class TiedParameters:
    """Parameters on stages of several ranks, each gradient the sum over them. The first rank counts it in norms."""

    def __init__(self, channel: P2PChannel) -> None:
        self.group: dist.ProcessGroup = channel.group
        self.rank: int = channel.rank
        self.has_values: bool = channel.has_values
        self._tied: list[_TiedParameter] = []

    def add(
        self, owner: nn.Module, name: str, ranks: Iterable[int], maybe_unused: bool = False
    ) -> None:
        """The parameter at `owner.name`, now or later, is on these ranks of the group."""
        self._tied.append(_TiedParameter(owner, name, tuple(sorted(ranks)), maybe_unused))

    def parameters(self) -> list[nn.Parameter]:
        """Return the tied parameters of this rank."""
        return [tied.parameter for tied in self._tied]

    def counted_elsewhere(self) -> set[int]:
        """Return the ids of the parameters that another rank counts."""
        return {id(tied.parameter) for tied in self._tied if tied.ranks[0] != self.rank}

    def before_backward(self) -> None:
        """Only the first rank keeps a sum to accumulate on; the others start from zero."""
        for tied in self._tied:
            gradient = tied.parameter.grad
            if gradient is not None and gradient is tied.summed and tied.ranks[0] != self.rank:
                local(gradient).zero_()
            tied.summed = None

    def sum(self) -> None:
        """Sum the gradients of each tied parameter over its ranks."""
        for tied in self._tied:
            parameter = tied.parameter
            if not parameter.requires_grad:
                continue
            asks = tied.maybe_unused and self.has_values
            if asks and not self._any_used(parameter, tied.ranks):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._sum(local(parameter.grad), tied.ranks)
            tied.summed = parameter.grad

    def _any_used(self, parameter: nn.Parameter, ranks: tuple[int, ...]) -> bool:
        """Whether the parameter has a gradient on one of the ranks."""
        flag = torch.tensor(
            [parameter.grad is not None], dtype=torch.uint8, device=local(parameter).device
        )
        self._sum(flag, ranks)
        return bool(flag.item())

    def _sum(self, gradient: torch.Tensor, ranks: tuple[int, ...]) -> None:
        first = ranks[0]
        if self.rank != first:
            dist.send(gradient.contiguous(), group=self.group, group_dst=first)
            arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            dist.recv(arrived, group=self.group, group_src=first)
            gradient.copy_(arrived)
            return
        arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        for other in ranks[1:]:
            dist.recv(arrived, group=self.group, group_src=other)
            gradient.add_(arrived)
        total = gradient.contiguous()
        for other in ranks[1:]:
            dist.send(total, group=self.group, group_dst=other)


_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


class StageRandom:
    """The stream of one stage: a seed for each call from the run's seed, the model, the stage and the data shard.

    All ranks of a pipeline read the same samples: the generators that samplers draw from must stay equal although one
    stage draws more than another.

    `calls` is how often the model was called for training. The caller counts.
    """

    def __init__(self, channel: P2PChannel, model: int, shard: int) -> None:
        self.device: torch.device = channel.device
        self.has_values: bool = channel.has_values
        self.offset: int = model * _MIX[3] + channel.rank * _MIX[1] + shard * _MIX[2]
        self.calls = 0

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """A block that draws from the stream of this call."""
        if not self.has_values:
            yield
            return
        generator, kind = torch.default_generator, self.device.type
        seed = (generator.initial_seed() + self.offset + self.calls * _MIX[0]) % (1 << 63)
        # Without a list of devices those of all kinds would be initialised.
        devices = [] if kind == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind):
            generator.manual_seed(seed)
            if devices:
                torch.get_device_module(self.device).manual_seed(seed)
            yield

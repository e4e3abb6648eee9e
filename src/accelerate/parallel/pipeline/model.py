# SPDX-License-Identifier: Apache-2.0
"""A prepared pipelined model: its gradients, random streams and state."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...core import trees
from ...core.errors import CheckpointError
from ...precision.base import Precision
from .. import materialize
from ..accumulated import AccumulatedGradients
from ..context.region import ContextParallel
from ..fsdp.state import broadcast_state, full_on_host
from ..gradients import GradientReducer, all_reduce, deferred, gradients_of, local
from ..matrices import laid_out
from ..prepared import GroupShapes, PreparedOptimizer
from ..sharded import ShardedModel, ShardedOptimizer
from ..sharded_optimizer import lay_out_state
from .layout import TiedParameters
from .p2p import P2PChannel
from .schedules import ScheduledRunner
from .stage import Stage


@dataclass
class Stages(GradientReducer):
    """What one pipelined model consists of on this rank.

    Fields:
        runner: runs its stages. tied: parameters on stages of several ranks. random: its random streams.
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

    runner: ScheduledRunner
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
        return self.runner.stages

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
        merged = []
        for names_of_ranks in zip(*of_ranks, strict=True):
            names = set().union(*names_of_ranks)
            merged.append([name for name in self.shapes if name in names])
        return merged


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

    def collected(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The entries of all stages on rank 0, one message for each; nothing on other ranks."""
        channel = self.stages.runner.channel
        if dist.get_global_rank(channel.group, 0) != 0:
            return {}
        if channel.rank != 0:
            for entry in (*entries.items(), None):
                channel.send_object(entry, 0)
            return {}
        for peer in range(1, channel.size):
            for name, value in iter(functools.partial(channel.receive_object, peer), None):
                entries.setdefault(name, value)
        return entries

    def state_dict(self) -> dict[str, Any]:
        """Return the full state under plain names, in the host memory of rank 0; empty on other ranks."""
        state: dict[str, Any] = {}
        copied: dict[int, torch.Tensor] = {}
        for name, value in self.inner.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                # Tied tensors share their memory in a state, too.
                if id(value) not in copied:
                    copied[id(value)] = full_on_host(value)
                value = copied[id(value)]
            state[materialize.canonical_name(name)] = value
        return self.collected(state)

    @torch.no_grad()
    def load_state_dict(self, state_: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which only rank 0 needs to have, one tensor at a time.

        Raises:
            CheckpointError: on every rank, for shapes, or with `strict` names, that do not fit.
        """
        shapes = {
            name: value.shape
            for name, value in self.template.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        saved = {name: (value.shape, value.dtype) for name, value in state_.items()}
        saved = materialize.from_first(saved, self.device)
        missing = [name for name in shapes if name not in saved]
        unknown = [name for name in saved if name not in shapes]
        other = [name for name in saved if name in shapes and saved[name][0] != shapes[name]]
        if other or (strict and (missing or unknown)):
            raise CheckpointError(
                f"the state does not fit the model: missing {missing[:5]}; unknown {unknown[:5]}; "
                f"with a different shape {other[:5]}"
            )
        targets = {}
        for name, value in self.inner.state_dict(keep_vars=True).items():
            targets[materialize.canonical_name(name)] = value
        for name, (shape, dtype) in saved.items():
            if name not in shapes:
                continue
            value = materialize.broadcast_tensor(state_.get(name), shape, dtype, self.device)
            target = targets.get(name)
            if isinstance(target, DTensor):
                target.to_local().copy_(materialize.local_shard(value, target))
            elif target is not None:
                target.copy_(value)

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Also where this rank's stages have none of the optimizer's parameters."""
        return optimizer in self.stages.groups or super().trains_with(optimizer)

    def accumulated_gradients(self) -> AccumulatedGradients:
        """Return the gradients of an unfinished accumulation window."""
        return self.stages.runner.accumulated

    @property
    def rank_state(self) -> StageRandom:
        """The place in the model's random stream."""
        return self.stages.random

    def prepared_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        """An optimizer that steps the parameters of this rank's stages."""
        return PipelinedOptimizer(optimizer, self)


class PipelinedOptimizer(ShardedOptimizer):
    """An optimizer of a `PipelinedModel`."""

    model: PipelinedModel

    def _names(self) -> list[list[str]]:
        """The names in each group, of all stages."""
        optimizer, stages = self.inner, self.model.stages
        if optimizer in stages.shared:
            raise CheckpointError(
                f"{type(optimizer).__name__} steps parameters of "
                f"{type(self.model.inner).__name__} and of another pipelined model: its state "
                "cannot be collected from their stages. Create an optimizer for each model"
            )
        return stages.groups[optimizer]

    def state_dict(self) -> dict[str, Any]:
        """Return the full state in the form of a single process's optimizer, on rank 0; empty on other ranks."""
        optimizer, groups = self.inner, self._names()
        entries: dict[str, Any] = {}
        with laid_out(optimizer):
            for name, parameter in materialize.named_parameters(self.model.inner):
                if parameter in optimizer.state:
                    entry = dict(optimizer.state[parameter])
                    entries[name] = trees.map_leaves(full_on_host, entry)
        entries = self.model.collected(entries)
        if dist.get_rank() != 0:
            return {}
        state = {}
        for position, name in enumerate(itertools.chain(*groups)):
            if name in entries:
                state[position] = entries[name]
        param_groups = []
        count = 0
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            options["params"] = list(range(count, count + len(names)))
            count += len(names)
            param_groups.append(options)
        return {"state": state, "param_groups": param_groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer state of a single process, which only rank 0 needs to have."""
        optimizer, groups = self.inner, self._names()
        other_entries, states = broadcast_state(state, groups, self.model.device)
        saved_groups = other_entries["param_groups"]
        saved_positions = itertools.chain(*(group["params"] for group in saved_groups))
        saved_names = dict(zip(saved_positions, itertools.chain(*groups), strict=True))
        names = {
            parameter: name for name, parameter in materialize.named_parameters(self.model.inner)
        }
        # The optimizer itself knows how its state is kept: it counts its own parameters.
        owned: dict[str | None, tuple[int, nn.Parameter]] = {}
        param_groups = []
        count = 0
        for group, options in zip(optimizer.param_groups, saved_groups, strict=True):
            positions = range(count, count + len(group["params"]))
            count = positions.stop
            param_groups.append({**options, "params": list(positions)})
            for position, parameter in zip(positions, group["params"], strict=True):
                owned[names.get(parameter)] = (position, parameter)
        by_position: dict[int, object] = {}
        for saved_position, entry in states:
            name = saved_names[saved_position]
            if name in owned:
                position, parameter = owned[name]
                by_position[position] = lay_out_state(dict(entry), parameter, parameter)
        optimizer.load_state_dict({"state": by_position, "param_groups": param_groups})

    def group_shapes(self) -> GroupShapes:
        """Return the shape of each parameter of the full model, for each group of the optimizer."""
        shapes = self.model.stages.shapes
        return [{name: shapes[name] for name in group} for group in self._names()]


class StageRandom:
    """The stream of one stage: a seed for each call from the run's seed, the model, the stage and the data shard.

    All ranks of a pipeline read the same samples: the generators that samplers draw from must stay equal although one
    stage draws more than another.

    `calls` is how often the model was called for training. The caller counts.
    """

    def __init__(self, channel: P2PChannel, model: int, shard: int) -> None:
        self.device: torch.device = channel.device
        self.has_values: bool = channel.has_values
        self.stream: tuple[int, ...] = (model, channel.rank, shard)
        self.calls: int = 0

    def state_dict(self) -> dict[str, object]:
        """The place in the stream."""
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the place of a `state_dict`."""
        self.calls = state["calls"]

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """A block that draws from the stream of this call."""
        if not self.has_values:
            yield
            return
        generator, kind = torch.default_generator, self.device.type
        # The hash of integers is the same in every process.
        seed = hash((generator.initial_seed(), *self.stream, self.calls)) % (1 << 63)
        # Without a list of devices those of all kinds would be initialised.
        devices = [] if kind == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind):
            generator.manual_seed(seed)
            if devices:
                torch.get_device_module(self.device).manual_seed(seed)
            yield

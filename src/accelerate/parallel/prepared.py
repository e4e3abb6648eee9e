# SPDX-License-Identifier: Apache-2.0
"""What `prepare` returns for one model and one optimizer: objects that know how their state is laid out.

The base classes are those of a single process. A layout derives from `PreparedModel` and keeps there what it builds
for one model. Nothing is looked up by a model's identity, and everything is freed with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from ..core.errors import PrepareError
from ..core.objects import NullContext
from ..optimizer import plain_optimizer
from ..precision.base import Precision
from .gradients import GradientReducer
from .matrices import shared_step_of
from .unwrap import canonical_name, extract_model_from_parallel

# {parameter name of the user's model: shape} of each group of an optimizer.
GroupShapes = list[dict[str, list[int]]]


class WindowGradients(Protocol):
    """The gradients of an unfinished accumulation window."""

    def state_dict(self) -> Mapping[str, object]:
        """This rank's gradients."""

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for gradients that do not fit this rank's parameters."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all gradients by those of `state_dict`."""


class RankState(Protocol):
    """State of one rank, as plain data, which the same rank of a run of the same layout loads."""

    def state_dict(self) -> dict[str, object]:
        """This rank's state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by that of `state_dict`."""


class PreparedModel:
    """A model whose parameters are all on this process.

    Args:
        module: what `prepare` returned to the user.
        precision: what the model computes in.
    """

    # Whether this process has only some of the parameters, or shards of them. Every rank then takes part in saving and
    # loading a full state; otherwise a state is loaded into the tensors of the user's model in place.
    is_partial = False
    # Whether a checkpoint stores this model's state as shards, written by each rank.
    saves_shards = False
    # What reduces gradients after a backward.
    reducers: Sequence[GradientReducer] = ()

    def __init__(self, module: nn.Module, precision: Precision | None = None) -> None:
        self.module = module
        self.precision: Precision = precision or Precision()

    # -- the module

    @property
    def inner(self) -> nn.Module:
        """The module inside the wrappers of this layout; it has the parameters that train."""
        return self.module

    @property
    def hooked(self) -> nn.Module:
        """The model that hooks of `save_state` and `load_state` get: the user's own where a wrapper has it inside."""
        return self.module

    @property
    def template(self) -> nn.Module | None:
        """A module without storage whose `state_dict()` has the user's names and shapes; None if `inner` has them."""
        return None

    @property
    def is_outgrown(self) -> bool:
        """Whether other parameters train than when the model was prepared, so that it must be prepared again."""
        return False

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters, by name, that were added since `prepare` and that the layout does not train."""
        return {}

    # -- the step

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backwards accumulate gradients without communicating."""
        return NullContext()

    def trained_parameters(self) -> Iterator[torch.Tensor]:
        """The parameters that an optimizer has, also while the module shows unsharded ones."""
        return self.module.parameters()

    def trained_names(self) -> set[str]:
        """The plain names of the parameters that train, on all ranks."""
        return {
            canonical_name(name) for name, p in self.inner.named_parameters() if p.requires_grad
        }

    def reshard(self) -> None:
        """Keep only this rank's shards of the parameters, as between two steps."""

    def swappable(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model's parameters may be replaced by other tensors (master weights)."""
        return contextlib.nullcontext()

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The full state under the user's names; where `is_partial` it may be empty on ranks other than 0."""
        state: dict[str, Any] = self.inner.state_dict()
        for name in list(state):
            # In its order, and with the versions of modules that torch keeps in it.
            state[canonical_name(name)] = state.pop(name)
        return state

    def checkpoint_state_dict(self) -> dict[str, Any]:
        """The full state that a checkpoint stores; every rank calls it, rank 0 writes it."""
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take a full state; every rank calls it."""
        model = extract_model_from_parallel(self.module, keep_torch_compile=False)
        names = {canonical_name(name): name for name in model.state_dict()}
        named = {names.get(name, name): value for name, value in state.items()}
        model.load_state_dict(named, strict=strict)

    def accumulated_gradients(self) -> WindowGradients | None:
        """The gradients of an unfinished accumulation window.

        None if they are unsharded, in `.grad` of the parameters, or (if `is_partial`) if they are not accessible.
        """
        return None

    def drop_waiting_gradients(self, optimizer: Any) -> None:
        """Clear what backwards in `no_sync` have left to a later one and an optimizer cannot clear."""

    @property
    def rank_state(self) -> RankState | None:
        """State that differs on each rank beyond the parameters; None where there is none."""
        return None

    # -- its optimizer

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` (not the prepared one around it) steps parameters of this model."""
        stepped = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return not set(map(id, stepped)).isdisjoint(map(id, self.module.parameters()))

    def prepared_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        """An optimizer of this model, which may be the prepared one: it knows how the state is laid out."""
        return PreparedOptimizer(optimizer, self)

    def release(self) -> None:
        """Free what other libraries keep for this model."""


def added_parameter(prepared: PreparedModel, name: str) -> PrepareError:
    """The error for a parameter of `new_parameters`."""
    if prepared.is_partial:
        remedy = "build the model again, load its state (get_state_dict) and prepare that"
    else:
        remedy = "prepare model and optimizer again"
    return PrepareError(
        f"{name} was added or replaced after {type(prepared.hooked).__name__} was prepared, and its layout does not "
        f"train it. Add adapters and replace layers before prepare, or {remedy}"
    )


class PreparedOptimizer:
    """An optimizer whose state is all on this process, with the prepared model whose parameters it steps.

    Args:
        optimizer: the plain optimizer or the prepared one around it.
        model: None where this process holds all of its state and the model does not matter.
    """

    def __init__(self, optimizer: Any, model: PreparedModel | None = None) -> None:
        self.optimizer = optimizer
        self.model = model

    @property
    def inner(self) -> Any:
        """The optimizer without the wrapper that `prepare` put around it."""
        return plain_optimizer(self.optimizer)

    @property
    def is_partial(self) -> bool:
        """Whether this process has only a shard of the state."""
        if shared_step_of(self.inner) is not None:
            return True
        return self.model is not None and self.model.is_partial

    @property
    def saves_shards(self) -> bool:
        """Whether a checkpoint stores the state as shards, written by each rank."""
        return self.model is not None and self.model.saves_shards

    def state_dict(self) -> dict[str, Any]:
        """The full state, as that of a single process; every rank calls it."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a full state; every rank calls it."""
        self.optimizer.load_state_dict(state)

    def group_shapes(self) -> GroupShapes | None:
        """Names and shapes in each group; None where the optimizer's own parameters have these shapes."""
        return None

    def describe(self) -> dict[str, Any]:
        """Class, options and shapes by group, which must equal those of the optimizer that loads the state."""
        groups = getattr(self.inner, "param_groups", [])
        named = self.group_shapes()
        if named is None:
            shapes = [[list(parameter.shape) for parameter in group["params"]] for group in groups]
        else:
            shapes = [list(group.values()) for group in named]
        options = set(chain.from_iterable(groups)) - {"params", "initial_lr"}
        return {
            "class": type(self.inner).__qualname__,
            "options": sorted(options),
            "shapes": shapes,
        }

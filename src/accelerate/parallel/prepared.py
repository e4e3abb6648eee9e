# SPDX-License-Identifier: Apache-2.0
"""What `prepare` returns for one model and one optimizer: objects that know how their state is laid out.

The base classes are those of a single process. A layout derives from `PreparedModel` and keeps there what it builds
for one model. Nothing is looked up by a model's identity, and everything is freed with it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..core.errors import PrepareError
from ..precision.base import Precision
from .gradients import GradientReducer
from .report import memory
from .unwrap import extract_model_from_parallel

# {parameter name of the user's model: shape} of each group of an optimizer.
GroupShapes = list[dict[str, list[int]]]


@dataclass(frozen=True)
class CommunicationVolume:
    """Messages of one kind that a rank sends in an optimizer step.

    Fields:
        what: the collective and what it carries.
        messages: how many; None where another library decides that.
        sent: their total bytes.
        unit: what `sent` is counted per, for example " a token".
        about: an upper bound where `messages` is None; otherwise the number of messages is an estimate.
    """

    what: str
    messages: int | None
    sent: float
    unit: str = ""
    about: bool = False


@dataclass(frozen=True)
class Change:
    """What is different in a traced step.

    Fields:
        checkpointing: blocks recompute their activations in the backward.
        reshard: units are resharded after their forward.
        reduce: each backward of a window reduces gradients.
        offload: shards are in host memory between their uses.
        scheduled: a pipeline has the order of 1f1b.
        microbatches: a pipeline has twice as many micro-batches.
    """

    checkpointing: bool = False
    reshard: bool = False
    reduce: bool = False
    offload: bool = False
    scheduled: bool = False
    microbatches: bool = False


class VolumeCounter:
    """Adds up messages by kind. Those of one kind have one unit."""

    def __init__(self, unit: str = "") -> None:
        self.unit = unit
        self._counts: dict[str, tuple[int, float]] = {}

    def add(self, what: str, sent: float, messages: int = 1) -> None:
        """Count messages of a kind that have so many bytes in all."""
        before = self._counts.get(what, (0, 0))
        self._counts[what] = (before[0] + messages, before[1] + sent)

    def volumes(self, about: str | None = None) -> list[CommunicationVolume]:
        """The messages by kind. The number of those of the kind `about` is an estimate."""
        return [
            CommunicationVolume(what, messages, sent, self.unit, what == about)
            for what, (messages, sent) in self._counts.items()
        ]


class WindowGradients(Protocol):
    """The gradients of an unfinished accumulation window."""

    def state_dict(self) -> Mapping[str, object]:
        """This rank's gradients."""

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for gradients that do not fit this rank's parameters."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all gradients by those of `state_dict`."""


class PreparedModel:
    """A model of which this process has all parameters.

    Args:
        module: what `prepare` returned to the user.
        precision: what the model computes in.
    """

    # Whether this process has only some of the parameters, or shards of them. Every rank then takes part in saving and
    # loading a full state; otherwise a state is loaded into the tensors of `state_template` in place.
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
    def uncompiled(self) -> nn.Module:
        """The module inside `torch.compile`'s wrapper; `module` where it has none."""
        inner = getattr(self.module, "_orig_mod", self.module)
        return inner if isinstance(inner, nn.Module) else self.module

    @property
    def inner(self) -> nn.Module:
        """The module inside the wrappers of this layout; it has the parameters that train."""
        return self.module

    @property
    def template(self) -> nn.Module | None:
        """A module without storage whose `state_dict()` has the user's names and shapes; None if `inner` has them."""
        return None

    @property
    def state_template(self) -> nn.Module:
        """A module whose `state_dict()` has the names and shapes of the user's model; it need not have storage."""
        return self.template or extract_model_from_parallel(self.module, keep_torch_compile=False)

    @property
    def is_outgrown(self) -> bool:
        """Whether other parameters train than when the model was prepared, so that it must be prepared again."""
        return False

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters, by name, that were added since `prepare` and that the layout does not train."""
        return {}

    def added_parameter(self, name: str) -> PrepareError:
        """The error for a parameter of `new_parameters`."""
        return PrepareError(f"{name} was added or replaced after {type(self.inner).__name__} was prepared")

    def is_of(self, module: nn.Module) -> bool:
        """Whether `module` is this model, with or without its wrappers."""
        return module is self.module or module is self.inner

    # -- the step

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backwards accumulate gradients without communicating."""
        return contextlib.nullcontext()

    def trained_parameters(self) -> Iterator[torch.Tensor]:
        """The parameters that an optimizer has, also while the module shows unsharded ones."""
        return self.module.parameters()

    def reshard(self) -> None:
        """Keep only this rank's shards of the parameters, as between two steps."""

    # -- a traced step

    def blocks(self) -> list[nn.Module]:
        """The modules whose activations may be recomputed; none if some are already."""
        recomputes = any(
            type(module).__name__ == "CheckpointWrapper" or vars(module).get("gradient_checkpointing")
            for module in self.inner.modules()
        )
        return [] if recomputes else self._named_blocks()

    def _named_blocks(self) -> list[nn.Module]:
        """The modules that the model names."""
        names = set(getattr(self.inner, "_no_split_modules", None) or ())
        return [module for module in self.inner.modules() if type(module).__name__ in names]

    def traceable_changes(self) -> dict[Change, str]:
        """The changes that `traced_copy` can make, with what they are called."""
        count = len(self.blocks())
        text = f"recompute the activations of {count} blocks (activation_checkpointing)"
        return {Change(checkpointing=True): text} if count else {}

    def traced_copy(self, change: Change) -> nn.Module:
        """A copy of the module on fake tensors on the CPU, with a change; call it in a fake mode.

        The module may be in the middle of a step, and no other rank takes part.

        Raises:
            PrepareError: one rank cannot trace a step of this layout.
        """
        from .activation import checkpoint_activations
        from .report.ledger import fake_copy

        if self.is_partial:
            raise PrepareError("one rank has a part of the model, and the others would have to take part")
        memo: dict[int, Any] = {}
        copied = fake_copy(self.inner, memo)
        if change.checkpointing:
            checkpoint_activations(copied, [memo[id(block)] for block in self.blocks()], torch.device("cpu"))
        return copied

    def traced_backwards(self, change: Change) -> int:
        """The backwards after which a traced step has its peak; in an accumulation window there are two."""
        return 1

    def switch_reduction(self, copied: nn.Module, on: bool) -> None:
        """Set whether the next backward of a `traced_copy` reduces gradients, where it does so itself."""

    def traced_input(self, given: torch.Tensor) -> torch.Tensor:
        """What this process computes of an input without values, in the context `tracing`."""
        return given

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """A context for the step of a `traced_copy`."""
        return contextlib.nullcontext()

    def offloads(self) -> bool:
        """Whether parameters, gradients and the optimizer's state are in host memory between their uses."""
        return False

    def less_memory(self) -> str:
        """What reduces the memory of a step of this layout, for a model of which this process has a part."""
        return "Less memory: smaller batches with more gradient_accumulation_steps, recomputed activations"

    def swappable(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model's parameters may be replaced by other tensors (master weights)."""
        return contextlib.nullcontext()

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The full state under the user's names; where `is_partial` it may be empty on ranks other than 0."""
        return self.inner.state_dict()

    def checkpoint_state_dict(self) -> dict[str, Any]:
        """The full state that a checkpoint stores; every rank calls it, rank 0 writes it."""
        return self.state_dict() if self.is_partial else self.state_template.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take a full state; every rank calls it."""
        self.state_template.load_state_dict(state, strict=strict)

    def accumulated_gradients(self) -> WindowGradients | None:
        """The gradients of an unfinished accumulation window.

        None if they are unsharded, in `.grad` of the parameters, or (if `is_partial`) if they are not accessible.
        """
        return None

    def rank_state(self) -> dict[str, object] | None:
        """State that differs on each rank beyond the parameters, as plain data; None where there is none."""
        return None

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Take what `rank_state` gave on this rank of a run of the same layout."""

    # -- its optimizer

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` (not the prepared one around it) steps parameters of this model."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in own for parameter in self.module.parameters())

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's full state, as `optimizer.state_dict()` of a single process; every rank calls it."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take a full optimizer state; every rank calls it."""
        optimizer.load_state_dict(dict(state))

    def optimizer_group_shapes(self, optimizer: torch.optim.Optimizer) -> GroupShapes | None:
        """Names and shapes in each group; None where the optimizer's own parameters have these shapes."""
        return None

    # -- the report

    def communication_volume(self, backwards: int) -> list[CommunicationVolume] | None:
        """What this rank sends in an optimizer step of so many backwards; None if that is not known."""
        return None

    def memory_usage(self, windows: bool, seen: set[int] | None = None) -> dict[str, int]:
        """Bytes on this rank by the kinds of `report.memory`, without the optimizer's state.

        Args:
            windows: gradients accumulate over several backwards and are averaged in the last one only.
            seen: ids of tensors that were counted for another model; extended.
        """
        seen = set() if seen is None else seen
        parameters = list(memory.unseen(self.kept_parameters(), seen))
        gradients = self.window_gradients() if windows else None
        if gradients is None:
            gradients = memory.local_bytes(p for p in parameters if p.requires_grad)
        return {
            memory.PARAMETERS: memory.local_bytes(parameters),
            memory.GRADIENTS: gradients,
            memory.MASTER_WEIGHTS: memory.local_bytes(memory.unseen(self.master_weights(), seen)),
        }

    def kept_parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that this process keeps between two steps, also while it has others for a computation."""
        return self.module.parameters()

    def window_gradients(self) -> int | None:
        """Bytes of the unsharded gradients that this rank keeps until a window's last backward, with all others.

        None where gradients have the layout of the parameters.
        """
        return None

    def master_weights(self) -> Iterable[torch.Tensor]:
        """The fp32 weights that the optimizer steps instead of lower-precision parameters."""
        return self.precision.master_weights(self.module)

    def dtypes(self) -> tuple[str, str]:
        """(dtype of the computation, dtype in which gradients are averaged), as text for the report."""
        return self.precision.computes_in, "the parameters' dtype"

    def release(self) -> None:
        """Free what other libraries keep for this model."""


class PreparedModels:
    """The prepared models that are still in use, in the order of preparation, which is the same on all ranks.

    References are weak: the caller of `prepare` owns the models.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[PreparedModel]] = []

    def __iter__(self) -> Iterator[PreparedModel]:
        for reference in self._references:
            if (prepared := reference()) is not None:
                yield prepared

    def add(self, models: Iterable[PreparedModel]) -> None:
        """Add models. A model that is gone is dropped."""
        self._references = [weakref.ref(prepared) for prepared in (*self, *models)]

    def clear(self) -> None:
        """Forget all models."""
        self._references.clear()


class PreparedOptimizer:
    """An optimizer of a run and the prepared model whose parameters it steps.

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
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def is_partial(self) -> bool:
        """Whether this process has only a shard of the state."""
        return self.model is not None and self.model.is_partial

    @property
    def saves_shards(self) -> bool:
        """Whether a checkpoint stores the state as shards, written by each rank."""
        return self.model is not None and self.model.saves_shards

    def state_dict(self) -> dict[str, Any]:
        """The full state, as that of a single process; every rank calls it."""
        if self.model is None or not self.model.is_partial:
            state: dict[str, Any] = self.optimizer.state_dict()
            return state
        return self.model.optimizer_state_dict(self.inner)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a full state; every rank calls it."""
        if self.model is None or not self.model.is_partial:
            self.optimizer.load_state_dict(state)
        else:
            self.model.load_optimizer_state_dict(self.inner, state)

    def group_shapes(self) -> GroupShapes | None:
        """Names and shapes in each group; None where the optimizer's own parameters have these shapes."""
        return self.model.optimizer_group_shapes(self.inner) if self.model is not None and self.is_partial else None

    def describe(self) -> dict[str, Any]:
        """Class, options and shapes by group, which must equal those of the optimizer that loads the state."""
        groups = getattr(self.inner, "param_groups", [])
        named = self.group_shapes()
        shapes = (
            [[list(parameter.shape) for parameter in group["params"]] for group in groups]
            if named is None
            else [list(group.values()) for group in named]
        )
        return {
            "class": type(self.inner).__qualname__,
            "options": sorted({key for group in groups for key in group if key != "params"} - {"initial_lr"}),
            "shapes": shapes,
        }

# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint consists of: references to the objects of a run, and the state of a single rank.

That is its random number generators, an unfinished accumulation window, and what its layout keeps.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..core.devices import accelerator_type, module_of
from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from ..parallel import prepared
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..parallel.unwrap import extract_model_from_parallel

if TYPE_CHECKING:
    from .sharded import ShardedState  # slow to import, and not needed for an unsharded run

# What `state_dict()` returns: an object decides itself what is in it.
StateDict = dict[str, Any]
# As in the API: a save hook is called with (models, weights, folder), a load hook with (models, folder).
SaveHook = Callable[[list[torch.nn.Module], list[StateDict], str], object]
LoadHook = Callable[[list[torch.nn.Module], str], object]
StateOf = Callable[[torch.nn.Module], StateDict]


class HasState(Protocol):
    """Anything whose state goes into a checkpoint. `load_state_dict` may return a list of notes for the report."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Load a state."""


@dataclass
class RunState:
    """All contents of a checkpoint, as references: nothing is copied until it is saved.

    Fields:
        models, optimizers, schedulers, dataloaders, scaler, custom, averages: in the order in which they were prepared
            or registered; the order ties them to their files.
        progress: plain data about where the run is (step, epoch, iteration, accumulation, tracker run ids, ...);
            it comes back in the report of a load.
        rank_state: state that differs on every rank (unfinished gradients, for example), or None.
        save_hooks, load_hooks: the user's, called on every rank as the API calls them.
        sharded: writes and reads the models and optimizers that save shards.
        mesh: {dimension: size} of the layout that saves, for the manifest.
        state_of: gives the state of each model that is not saved as shards; None: the models themselves do.
        entire: the same run with entire models, where `models` has adapters of some; else None.
    """

    models: Sequence[PreparedModel] = ()
    optimizers: Sequence[PreparedOptimizer] = ()
    schedulers: Sequence[HasState] = ()
    dataloaders: Sequence[object] = ()
    scaler: HasState | None = None
    custom: Sequence[HasState] = ()
    averages: Sequence[HasState] = ()
    progress: JSONObject = field(default_factory=dict)
    rank_state: HasState | None = None
    save_hooks: Sequence[SaveHook] = ()
    load_hooks: Sequence[LoadHook] = ()
    sharded: ShardedState | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    state_of: StateOf | None = None
    entire: RunState | None = None


def check_custom(objects: Sequence[object]) -> None:
    """Raise ValueError, naming the classes, unless each object has `state_dict` and `load_state_dict`."""
    bad = [
        f"{type(item).__module__}.{type(item).__qualname__}"
        for item in objects
        if not (
            callable(getattr(item, "state_dict", None))
            and callable(getattr(item, "load_state_dict", None))
        )
    ]
    if bad:
        raise ValueError(
            "register_for_checkpointing takes objects that have both `state_dict` and "
            f"`load_state_dict`; these do not: {', '.join(bad)}"
        )


# --- the state of a single rank ------------------------------------------------------------------------------------


_HOST = ("python", "numpy", "torch")


def host_generators() -> StateDict:
    """The states of Python's and NumPy's generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def torch_generators() -> StateDict:
    """The states of torch's generators."""
    state: StateDict = {"torch": torch.get_rng_state()}
    kind = accelerator_type()
    if kind is not None:
        module = module_of(kind)
        if hasattr(module, "get_rng_state_all"):
            state[kind] = list(module.get_rng_state_all())
        elif hasattr(module, "get_rng_state"):
            state[kind] = [module.get_rng_state()]
    return state


class GlobalGenerators:
    """The generators of this process, as an object with a state."""

    def state_dict(self) -> StateDict:
        """Return the states by generator; a list with one state per device for an accelerator."""
        return {**host_generators(), **torch_generators()}

    def load_state_dict(self, state: StateDict) -> list[str]:
        """Restore the generators. Returns a note for each kind of generator that this machine does not have."""
        if "seed" in state:
            random.seed(state["seed"])
            np.random.seed(state["seed"])
            torch.manual_seed(state["seed"])  # on all devices
            return []
        random.setstate(_python_state(state["python"]))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        kind = accelerator_type()
        notes = []
        for name in accelerators(state):
            if name != kind:
                notes.append(
                    f"the state of the {name} generators was not used: this machine does not have "
                    f"a {name} device"
                )
                continue
            module = module_of(name)
            if hasattr(module, "set_rng_state_all"):
                # As many as are here: the saving process may have seen more devices than this one.
                present = int(torch.accelerator.device_count())
                module.set_rng_state_all(state[name][:present])
            else:
                module.set_rng_state(state[name][0])
        return notes


def seeded(state: StateDict, rank: int) -> StateDict:
    """A state for a rank whose own was not saved: a seed made from the number of the rank and from that of rank 0."""
    of_rank_0 = state["torch"].cpu().numpy().tobytes()
    content = of_rank_0 + rank.to_bytes(4, "little")
    digest = hashlib.blake2b(content, digest_size=4).digest()
    return {"seed": int.from_bytes(digest, "little")}


def accelerators(state: Mapping[str, object]) -> list[str]:
    """The device types whose generators are in a state."""
    return [name for name in state if name not in _HOST]


def check_generators(state: StateDict) -> None:
    """Try the saved states on new generators, and raise their errors. The generators of the process are unchanged."""
    random.Random().setstate(_python_state(state["python"]))
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"].cpu())
    for name in accelerators(state):
        if not isinstance(state[name], list) or not all(
            isinstance(one, torch.Tensor) for one in state[name]
        ):
            raise ValueError(f"rng.{name} is not a list of tensors")


def _python_state(state: Sequence[Iterable[object]]) -> tuple[object, ...]:
    return (state[0], tuple(state[1]), state[2])


def state_template(part: PreparedModel) -> torch.nn.Module:
    """A module whose `state_dict()` has the names and shapes of the user's model; it need not have storage."""
    return part.template or extract_model_from_parallel(part.module, keep_torch_compile=False)


class ModelGradients(HasState, Protocol):
    """The gradients of a model as a state."""

    def check_state_dict(self, state: StateDict, /) -> None:
        """Raise CheckpointError for gradients of other shapes."""


class RankState:
    """The `rank_state` of a `RunState`: an unfinished window, and what prepared models keep on each process.

    `gradients` and `items` are the gradients of the window and its count of items; without gradients there is none.

    It is loaded in the layout that saved it; in another one of as many processes it has no place, and is dropped.
    """

    def __init__(
        self,
        layout: dict[str, str | int],
        models: Sequence[PreparedModel],
        gradients: PendingGradients | None,
        items: HasState,
    ) -> None:
        self.models: list[PreparedModel] = list(models)
        self.gradients = gradients
        self.items = items
        self.layout = layout

    def state_dict(self) -> StateDict:
        """Return the state of this rank as plain data."""
        states = [part.state_dict() for part in self._parts()]
        window = None
        if self.gradients is not None:
            window = {"gradients": self.gradients.state_dict(), "items": self.items.state_dict()}
        return {
            "layout": self.layout,
            "window": window,
            "strategy": {"models": states} if states else {},
        }

    def _parts(self) -> list[prepared.RankState]:
        """What prepared models keep on this process."""
        states = [model.rank_state for model in self.models]
        return [state for state in states if state is not None]

    def check_state_dict(self, state: StateDict) -> None:
        """Raise CheckpointError for a state that `load_state_dict` cannot take. Every rank calls it."""
        if state["layout"] != self.layout:
            return
        window = state["window"]
        if window is not None and self.gradients is not None:
            self.gradients.check_state_dict(window["gradients"])
        saved, present = state["strategy"].get("models", ()), self._parts()
        if len(present) != len(saved):
            raise CheckpointError(
                f"{len(saved)} models with one state for each rank were saved, but {len(present)} "
                "are here"
            )

    def load_state_dict(self, state: StateDict) -> list[str]:
        """Restore the state. Returns notes on what could not be restored."""
        window = state["window"]
        if state["layout"] != self.layout:
            lost = ""
            if window is not None and window["gradients"]:
                lost = "unfinished gradients, "
            return [
                f"saved under {_layout_text(state['layout'])}, loaded under "
                f"{_layout_text(self.layout)}: {lost}the positions in the random streams of "
                "single processes are dropped"
            ]
        if window is not None and self.gradients is not None:
            self.gradients.load_state_dict(window["gradients"])
            self.items.load_state_dict(window["items"])
        saved_states = state["strategy"].get("models", ())
        for part, saved in zip(self._parts(), saved_states, strict=True):
            part.load_state_dict(saved)
        return []


def is_empty(state: StateDict) -> bool:
    """Whether a state of a `RankState` has neither gradients nor states of models."""
    window = state.get("window")
    return "layout" in state and not state["strategy"] and not (window and window["gradients"])


def _layout_text(layout: Mapping[str, str | int]) -> str:
    sizes = ", ".join(
        f"{name}={size}" for name, size in layout.items() if name != "strategy" and size != 1
    )
    if sizes:
        return f"{layout['strategy']} ({sizes})"
    return str(layout["strategy"])


class PendingGradients:
    """The gradients of models in the middle of a window.

    `pending` returns whether such a window is open; otherwise nothing is saved. `models` are plain modules,
    with the gradients at their parameters, or whatever else has the gradients of one as its state.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module | ModelGradients], pending: Callable[[], bool]
    ) -> None:
        self.models: list[ModelGradients] = [
            PlainGradients(model) if isinstance(model, torch.nn.Module) else model
            for model in models
        ]
        self.pending = pending

    def state_dict(self) -> StateDict:
        """Return the gradients by model and parameter; empty at the end of a window."""
        if not self.pending():
            return {}
        gradients: StateDict = {}
        for index, model in enumerate(self.models):
            for name, gradient in model.state_dict().items():
                gradients[f"{index}.{name}"] = gradient
        return gradients

    def check_state_dict(self, state: StateDict) -> None:
        """Raise CheckpointError for gradients of other shapes."""
        for model, gradients in self._by_model(state):
            model.check_state_dict(gradients)

    def load_state_dict(self, state: StateDict) -> None:
        """Put the gradients back; parameters that had none lose theirs. Raises CheckpointError for other shapes."""
        for model, gradients in self._by_model(state):
            model.load_state_dict(gradients)

    def _by_model(self, state: StateDict) -> Iterator[tuple[ModelGradients, StateDict]]:
        for index, model in enumerate(self.models):
            gradients = {}
            for name, value in state.items():
                number, _, parameter = name.partition(".")
                if number == str(index):
                    gradients[parameter] = value
            yield model, gradients


class PlainGradients:
    """The gradients of a plain module as a state."""

    def __init__(self, model: torch.nn.Module) -> None:
        # The current ones: while a state is taken, the model may have master weights instead.
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each parameter that has one."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def check_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise CheckpointError where a saved gradient has another shape than its parameter."""
        for name, parameter in self.parameters.items():
            saved = state.get(name)
            if saved is not None and saved.shape != parameter.shape:
                raise CheckpointError(
                    f"the saved gradient of {name} has shape {list(saved.shape)}, the parameter "
                    f"{list(parameter.shape)}"
                )

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the gradients.

        Raises:
            CheckpointError: a saved gradient has another shape than its parameter.
        """
        self.check_state_dict(state)
        for name, parameter in self.parameters.items():
            saved = state.get(name)
            if saved is None:
                parameter.grad = None
            else:
                parameter.grad = saved.to(parameter.device, parameter.dtype)

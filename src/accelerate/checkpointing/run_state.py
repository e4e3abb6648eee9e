# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint consists of: references to the objects of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..core.json_text import JSONObject
from ..parallel.prepared import PreparedModel, PreparedOptimizer

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
    """All that a checkpoint holds, as references: nothing is copied until it is saved.

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
            "register_for_checkpointing takes objects that have both `state_dict` and `load_state_dict`; these have "
            f"not: {', '.join(bad)}"
        )

# SPDX-License-Identifier: Apache-2.0
"""Does a checkpoint fit the run that loads it? Every difference is found before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from ..parallel.prepared import PreparedOptimizer
from .files import memory_of
from .run_state import HasState

_SHOWN = 20  # entries of a list in a message


class CheckpointMismatch(CheckpointError):
    """A valid checkpoint of another model, optimizer or set of objects. The message lists the differences."""


@dataclass
class Differences:
    """How the entries of a file differ from those of a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines.append(f"missing in the checkpoint: {_shown(self.missing)}")
        if self.unexpected:
            lines.append(f"not in the model: {_shown(self.unexpected)}")
        if self.shapes:
            rows = [
                f"{name} (saved {list(saved)}, here {list(here)})"
                for name, (saved, here) in self.shapes.items()
            ]
            lines.append(f"of another shape: {_shown(rows)}")
        return "; ".join(lines)


def _shown(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(name[:300] for name in names[:_SHOWN]) + (
        f", and {rest} more" if rest > 0 else ""
    )


def compare_names(
    saved: Mapping[str, tuple[int, ...] | None], state: Mapping[str, object]
) -> Differences:
    """How saved entries ({name: shape}, None for an entry that is no tensor) differ from those of a model's state.

    An entry that the file lacks is no difference when the model ties it to one that the file has.
    """
    differences = Differences()
    present = {
        memory_of(value)
        for name, value in state.items()
        if name in saved and isinstance(value, torch.Tensor)
    }
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            if name not in saved:
                differences.missing.append(name)
        elif name not in saved:
            if memory_of(value) not in present:
                differences.missing.append(name)
        elif saved[name] is not None and tuple(value.shape) != saved[name]:
            differences.shapes[name] = (saved[name] or (), tuple(value.shape))
    differences.unexpected = [name for name in saved if name not in state]
    return differences


# What DeepSpeed's Adam has as an option, and other ones always do.
_IMPLIED = {"bias_correction"}


def check_optimizer(
    index: int,
    part: PreparedOptimizer,
    read: Callable[[], object],
    about: JSONObject | None,
    folder: Path,
) -> None:
    """Raise CheckpointMismatch when an optimizer's state belongs to other parameters or another kind of optimizer."""
    here = part.describe()
    rows: list[str] = []
    if about is not None:
        rows = list(_group_differences(about["shapes"], here["shapes"]))
        lacking = sorted(set(here["options"]) - set(about["options"]) - _IMPLIED)
        if about["class"] != here["class"] and lacking:
            rows.append(
                f"saved by {about['class']}, which has no {', '.join(lacking)}; this is {here['class']}"
            )
    else:
        state = read()
        if isinstance(state, Mapping):
            groups = state.get("param_groups", [])
        else:
            groups = []
        saved = [len(group["params"]) for group in groups]
        counts = [len(group) for group in here["shapes"]]
        if saved and counts and saved != counts:
            rows.append(f"parameters in each group: {saved} saved, {counts} here")
    if rows:
        raise CheckpointMismatch(
            f"{folder} does not fit optimizer {index} ({here['class']}): {_shown(rows)}. Nothing was loaded."
        )


def check_scheduler(item: object, state: object, saved_class: str | None) -> list[str]:
    """Raise CheckpointError where a state is that of another kind of torch scheduler. Returns notes.

    Args:
        item: the scheduler, prepared or not. One that is not torch's decides itself what it takes.
        state: the saved state.
        saved_class: the class that it was saved by; None if it is not known.
    """
    scheduler = getattr(item, "scheduler", item)  # without the wrapper of `prepare`
    if not isinstance(scheduler, LRScheduler):
        return []
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"the saved state is a {type(state).__name__}, not the state of a scheduler"
        )
    name = type(scheduler).__qualname__
    here, saved = _entries(scheduler.state_dict()), _entries(state)
    # A class may get other entries in another version of torch or of the user's code.
    is_other = (
        (here - saved and saved - here)
        if saved_class is None
        else (saved_class != name and here != saved)
    )
    if is_other:
        by = saved_class or "another scheduler"
        raise CheckpointError(
            f"saved by {by} ({_listed(saved - here)}), and this is {name} ({_listed(here - saved)})"
        )
    if saved_class not in (None, name):
        return [f"was saved by {saved_class}, and is a {name} here: it continues from that state"]
    return []


def _entries(state: Mapping[str, object]) -> set[str]:
    """What schedulers of one class have in their state, and others have not."""
    return {name for name in state if name == "_schedulers" or not name.startswith("_")} - {
        "verbose"
    }


def _listed(names: set[str]) -> str:
    if names:
        return f"with {_shown(sorted(names))}"
    return "with nothing else"


def check_scaler(item: HasState, state: object, saved_class: str | None) -> list[str]:
    """Raise CheckpointError for a state that lacks entries which a gradient scaler needs."""
    saved = state if isinstance(state, Mapping) else {}
    lacking = [name for name in item.state_dict() if name not in saved]
    if lacking:
        raise CheckpointError(f"the saved state lacks {', '.join(lacking)}")
    return []


def check_own(item: object, state: object, saved_class: str | None) -> list[str]:
    """Let an object judge a state itself, if it can: it raises CheckpointError, or returns notes."""
    check = getattr(item, "check_state_dict", None)
    if check is not None:
        return list(check(state) or ())
    return []


def _group_differences(saved: list[list[list[int]]], here: list[list[list[int]]]) -> Iterable[str]:
    if len(saved) != len(here):
        yield f"{len(saved)} parameter groups saved, {len(here)} here"
        return
    for group, (old, new) in enumerate(zip(saved, here, strict=True)):
        if len(old) != len(new):
            yield f"group {group}: {len(old)} parameters saved, {len(new)} here"
            continue
        for position, (was, now) in enumerate(zip(old, new, strict=True)):
            if was != now:
                yield f"group {group}, parameter {position}: shape {was} saved, {now} here"

# SPDX-License-Identifier: Apache-2.0
"""Validation of the documents of a checkpoint, before anything in a run changes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import CheckpointError
from .codec import MALFORMED
from .manifest import CorruptCheckpoint, reason
from .matching import CheckpointMismatch

_NUMBERS = ("step", "epoch", "accumulation_step", "iteration", "training_loader")


def check_shared(state: Any, path: Path) -> dict[str, Any]:
    """The state that all ranks have in common. Raises CorruptCheckpoint for anything of another form."""
    with _form(path):
        found = _mapping(state, "the document")
        for name in ("schedulers", "custom"):
            if not isinstance(found[name], list):
                raise ValueError(f"{name} is not a list")
        check_progress(_mapping(found["progress"], "progress"))
        found.setdefault("scaler", None)
    return found


def check_progress(progress: Mapping[str, Any]) -> None:
    """Raise ValueError unless the entries of the run's position are non-negative integers."""
    for name in _NUMBERS:
        value = progress.get(name, 0)
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"progress.{name} is {str(value)[:60]!r}, not a number")
    trackers = progress.get("trackers", {})
    if not isinstance(trackers, dict) or not all(isinstance(key, str) for key in trackers):
        raise ValueError("progress.trackers is not an object")


def check_rank(state: Any, path: Path) -> dict[str, Any]:
    """The state of one rank. Raises CorruptCheckpoint for anything of another form."""
    with _form(path):
        found = _mapping(state, "the document")
        if not isinstance(found["dataloaders"], list):
            raise ValueError("dataloaders is not a list")
        for index, place in enumerate(found["dataloaders"]):
            if place is not None:
                _mapping(place, f"dataloaders[{index}]")
        if found["rng"] is not None:
            check_generators(_mapping(found["rng"], "rng"))
        if found["rank_state"] is not None:
            _mapping(found["rank_state"], "rank_state")
    return found


def check_generators(state: Mapping[str, Any]) -> None:
    """Try the saved states on new generators, and raise their errors. The generators of the process are unchanged."""
    python = state["python"]
    random.Random().setstate((python[0], tuple(python[1]), python[2]))
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"].cpu())
    for name in set(state) - {"python", "numpy", "torch"}:
        if not isinstance(state[name], list) or not all(isinstance(one, torch.Tensor) for one in state[name]):
            raise ValueError(f"rng.{name} is not a list of tensors")


def check_loaders(saved: Sequence[Any], here: Sequence[Any], folder: Path) -> None:
    """Raise CheckpointMismatch where the run has more or fewer loaders than were saved."""
    if len(saved) != len(here):
        raise CheckpointMismatch(
            f"{folder} was saved by another run: {len(saved)} data loaders saved, {len(here)} here. Nothing was "
            "loaded. Prepare the same loaders in the same order before loading."
        )


@contextlib.contextmanager
def taking(what: str, path: Path) -> Iterator[None]:
    """Convert an error of an object that rejects its saved state to a CheckpointError that names both."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: {what} cannot take its saved state ({type(error).__name__}: {str(error)[:500]})"
        ) from error


@contextlib.contextmanager
def _form(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CorruptCheckpoint(f"{path} is damaged: it has no entry {error}") from error
    except MALFORMED as error:
        raise CorruptCheckpoint(f"{path} is damaged: {reason(error)[:500]}") from error


def _mapping(value: Any, name: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value

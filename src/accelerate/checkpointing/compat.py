# SPDX-License-Identifier: Apache-2.0
"""The API's own checkpoint format (`optimizer.bin`, `random_states_0.pkl`, ...): written on demand, read with care.

Its files are pickles. They are read as plain data first (`weights_only`); a file that needs more is refused unless the
caller passes `allow_pickle=True`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import MAP_LOCATION
from torch.types import FileLike

from ..core.constants import RNG_STATE_NAME, SAMPLER_NAME
from ..core.errors import CheckpointError
from ..core.torch_files import READ_ERRORS, check_archive
from ..data_loader.position import Position
from .documents import damage
from .generators import accelerators, check_generators
from .layout import numbered
from .manifest import LOADER_NAME
from .run_state import StateDict

_BROKEN = (pickle.UnpicklingError, EOFError, zipfile.BadZipFile)

# What a pickled numpy array names. These build arrays and nothing else.
_NUMPY_GLOBALS: list[Any] = [
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    (np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # type: ignore[attr-defined]
    *{type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdFD"},
]


def load_pickled(
    file: FileLike,
    allow_pickle: bool = False,
    map_location: MAP_LOCATION = "cpu",
    name: str = "the file",
    **options: Any,
) -> Any:
    """The content of a file that torch.save wrote (a path, or a file object that errors call `name`), as plain data.

    Raises CheckpointError, and runs nothing from the file, when it holds more than that and `allow_pickle` is False.
    """
    path = file if isinstance(file, (str, os.PathLike)) else name
    check_archive(file, path)
    try:
        with torch.serialization.safe_globals(_NUMPY_GLOBALS):
            return torch.load(file, map_location=map_location, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            return torch.load(file, map_location=map_location, weights_only=False, **options)
        reason = str(error).strip().splitlines()[-1] if "GLOBAL" not in str(error) else _named_global(error)
        raise CheckpointError(
            f"{path} holds more than plain data ({reason}). Reading it would run code from the file. If you trust who "
            "wrote it, pass allow_pickle=True."
        ) from error
    except FileNotFoundError:
        raise
    except READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def _named_global(error: Exception) -> str:
    words = [word.rstrip(".,") for word in str(error).split() if "." in word and "http" not in word]
    after = str(error).split("GLOBAL", 1)[1].split()
    return f"it names {after[0]}" if after else " ".join(words[:1])


_RANDOM_STATES = {"random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "torch"}


def generator_file(state: Mapping[str, object], step: int) -> dict[str, object]:
    """The states of a rank's generators under the API's names, and its step in the accumulation window."""
    return {
        "step": step,
        **{theirs: state[ours] for theirs, ours in _RANDOM_STATES.items()},
        **{f"torch_{kind}_manual_seed": state[kind] for kind in accelerators(state)},
    }


def read_generators(folder: Path, rank: int, allow_pickle: bool) -> StateDict | None:
    """The states of a rank's generators; None where the folder has no file of it."""
    path = folder / f"{RNG_STATE_NAME}_{rank}.pkl"
    if not path.exists():
        return None
    saved = load_pickled(path, allow_pickle)
    with damage(path):
        state = {ours: saved[theirs] for theirs, ours in _RANDOM_STATES.items()}
        for key, value in saved.items():
            match = re.fullmatch("torch_(.+)_manual_seed", key)
            if match:
                state[match[1]] = value if isinstance(value, list) else [value]
        check_generators(state)
    return state


def read_step(folder: Path, rank: int, allow_pickle: bool) -> int:
    """A rank's step in the accumulation window; 0 where the folder has no file of it."""
    path = folder / f"{RNG_STATE_NAME}_{rank}.pkl"
    step: int = load_pickled(path, allow_pickle).get("step", 0) if path.exists() else 0
    return step


def read_loader(folder: Path, index: int, allow_pickle: bool, notes: list[str]) -> object:
    """The state of a loader, or None where none was saved that a prepared loader can take."""
    path = folder / numbered(LOADER_NAME, index, ".bin")
    if path.exists():
        state = load_pickled(path, allow_pickle)
        with damage(path):
            if "format" in state:
                return state
            done = state.get("_num_yielded", (state.get("_snapshot") or {}).get("_snapshot_step"))
        notes.append(
            f"{path.name} is the position of another kind of loader and was not used: leave the {done} batches that "
            "were read out with skip_first_batches"
        )
    return _read_sampler(folder / numbered(SAMPLER_NAME, index, ".bin"), notes)


def _read_sampler(path: Path, notes: list[str]) -> StateDict | None:
    """The seed and the epoch of a pickled seedable sampler, as the position of a loader at the start of that epoch.

    The pickle contains the dataset too, of any class: only numbers and plain containers of the file are created.
    """
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            found = _Numbers(io.BytesIO(archive.read(name))).load()
        seed, epoch = int(found.state["initial_seed"]), int(found.state["epoch"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, *_BROKEN) as error:
        notes.append(f"{path.name} holds no seedable sampler ({error!r}) and was not used")
        return None
    return Position(epoch, "samples", None, own={"seed": seed}).to_dict()


class _Inert:
    """A placeholder for an object of any class: accepts the state in the pickle and does nothing."""

    state: Any = None

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> _Inert:
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """An item of a list's subclass."""

    extend = add = append


# The unpickler written in C takes memory for any index of its memo that a file names.
class _Numbers(pickle._Unpickler):
    """Reads a pickle in which every class and function is inert, and no tensor has content."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        return _Inert

    def persistent_load(self, pid: object) -> _Inert:
        return _Inert()

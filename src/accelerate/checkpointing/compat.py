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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import MAP_LOCATION
from torch.types import FileLike

from ..core.bucket_path import BucketPath
from ..core.constants import RNG_STATE_NAME, SAMPLER_NAME
from ..core.errors import CheckpointError
from ..core.files import require_regular
from ..core.tensor_files import READ_ERRORS
from .documents import damage
from .layout import LOADER_NAME, numbered
from .run_state import StateDict, accelerators, check_generators

# What a pickled numpy array names. These build arrays and nothing else.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_NUMPY_GLOBALS: list[Any] = [
    np.ndarray,
    np.dtype,
    _RECONSTRUCT,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
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
    if isinstance(file, BucketPath):
        return load_pickled(
            io.BytesIO(file.read_bytes()), allow_pickle, map_location, str(file), **options
        )
    path = file if isinstance(file, (str, os.PathLike)) else name
    try:
        if path is file:
            require_regular(file)  # a named pipe would be waited for
        with torch.serialization.safe_globals(_NUMPY_GLOBALS):
            return torch.load(file, map_location=map_location, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            if isinstance(file, io.BytesIO):
                file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=False, **options)
        named = str(error).partition("GLOBAL ")[2].split()
        if named:
            reason = f"it names {named[0][:80]}"
        else:
            reason = str(error).strip().splitlines()[-1][:500]
        raise CheckpointError(
            f"{path} holds more than plain data ({reason}). Reading it would run code from the "
            "file. If you trust its author, pass allow_pickle=True."
        ) from error
    except FileNotFoundError:
        raise
    except READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read: {repr(error)[:500]}") from error


_RANDOM_STATES = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
}


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
            f"{path.name} is the position of another kind of loader and was not used: skip the "
            f"{done} batches that were already read with skip_first_batches"
        )
    if (folder / numbered(SAMPLER_NAME, index, ".bin")).exists():
        notes.append(
            f"{numbered(SAMPLER_NAME, index, '.bin')} was not read: prepare the loader with the "
            "seed and epoch of the run that saved it (data_seed, set_epoch)"
        )
    return None

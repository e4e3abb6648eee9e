# SPDX-License-Identifier: Apache-2.0
"""The API's own checkpoint format (`optimizer.bin`, `random_states_0.pkl`, ...): written on demand, read with care.

Its files are pickles. They are read as plain data first (`weights_only`); a file that needs more is refused unless the
caller passes `allow_pickle=True`.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.constants import OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME
from ..core.errors import CheckpointError
from ..core.torch_files import READ_ERRORS, check_archive
from ..data_loader.position import Position
from .contents import check_generators
from .layout import numbered
from .session import RunState, damage, rng_state

_LOADER_NAME = "dl_state_dict"
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
    file: Any, allow_pickle: bool = False, map_location: Any = "cpu", name: str = "the file", **options: Any
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


def rank_files(run: RunState, rank: int) -> dict[str, Any]:
    """{file name: value} of what each rank saves for itself."""
    state = rng_state()
    values: dict[str, Any] = {
        "step": run.progress.get("accumulation_step", 0),
        "random_state": state["python"],
        "numpy_random_seed": state["numpy"],
        "torch_manual_seed": state["torch"],
    }
    for kind in set(state) - {"python", "numpy", "torch"}:
        values[f"torch_{kind}_manual_seed"] = state[kind]
    return {f"{RNG_STATE_NAME}_{rank}.pkl": values}


def shared_files(run: RunState, optimizers: Sequence[Any]) -> dict[str, Any]:
    """{file name: value} of what is the same on all ranks, but for the weights."""
    files: dict[str, Any] = {}
    for index, state in enumerate(optimizers):
        files[numbered(OPTIMIZER_NAME, index, ".bin")] = state
    for index, scheduler in enumerate(run.schedulers):
        files[numbered(SCHEDULER_NAME, index, ".bin")] = scheduler.state_dict()
    for index, loader in enumerate(run.dataloaders):
        if callable(getattr(loader, "state_dict", None)):
            files[numbered(_LOADER_NAME, index, ".bin")] = loader.state_dict()
    if run.scaler is not None:
        files[SCALER_NAME] = run.scaler.state_dict()
    for index, item in enumerate(run.custom):
        files[f"custom_checkpoint_{index}.pkl"] = item.state_dict()
    return files


def read_rank(folder: Path, rank: int, allow_pickle: bool) -> dict[str, Any] | None:
    """A rank's generators in our names, and its step in the window; None where the folder has no file of it."""
    path = folder / f"{RNG_STATE_NAME}_{rank}.pkl"
    if not path.exists():
        return None
    saved = load_pickled(path, allow_pickle)
    with damage(path):
        state = {
            "python": saved["random_state"],
            "numpy": saved["numpy_random_seed"],
            "torch": saved["torch_manual_seed"],
        }
        for key, value in saved.items():
            if key.startswith("torch_") and key.endswith("_manual_seed") and key != "torch_manual_seed":
                kind = key.removeprefix("torch_").removesuffix("_manual_seed")
                state[kind] = value if isinstance(value, list) else [value]
        check_generators(state)
    return {"rng": state, "step": saved.get("step", 0)}


def read_optimizer(folder: Path, index: int, allow_pickle: bool) -> Any:
    """Read the state of an optimizer from a checkpoint in the API's format."""
    return load_pickled(folder / numbered(OPTIMIZER_NAME, index, ".bin"), allow_pickle)


def read_loader(folder: Path, index: int, allow_pickle: bool, notes: list[str]) -> Any:
    """The state of a loader, or None where none was saved that a prepared loader can take."""
    path = folder / numbered(_LOADER_NAME, index, ".bin")
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


def _read_sampler(path: Path, notes: list[str]) -> dict[str, Any] | None:
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

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """An item of a list's subclass."""

    extend = add = append


# The unpickler written in C takes memory for any index of its memo that a file names.
class _Numbers(pickle._Unpickler):
    """Reads a pickle in which every class and function is inert, and no tensor has content."""

    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def read_shared(folder: Path, run: RunState, allow_pickle: bool) -> dict[str, Any]:
    """Schedulers, scaler and custom objects of a folder, in the shape of our own session document."""
    schedulers = [
        load_pickled(folder / numbered(SCHEDULER_NAME, index, ".bin"), allow_pickle)
        for index in range(len(run.schedulers))
    ]
    scaler_path = folder / SCALER_NAME
    return {
        "schedulers": schedulers,
        "scaler": load_pickled(scaler_path, allow_pickle) if run.scaler is not None and scaler_path.exists() else None,
        "custom": [
            load_pickled(folder / f"custom_checkpoint_{index}.pkl", allow_pickle) for index in range(len(run.custom))
        ],
    }

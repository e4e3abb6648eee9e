# SPDX-License-Identifier: Apache-2.0
"""Files of weights: safetensors and torch's own, read a tensor at a time; which files make up a checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..core.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from ..core.errors import CheckpointError

logger = logging.getLogger(__name__)

# How many bytes of a file may be mapped and touched before it is opened anew, so that its pages do not add up.
_MAPPED = 64 * 2**20


@contextmanager
def open_weights(checkpoint_file: str | os.PathLike[str]) -> Iterator[Mapping[str, Any]]:
    """The tensors in a file by name, each read when it is asked for.

    Raises FileNotFoundError, ValueError for a safetensors file of another framework, CheckpointError for a broken one.
    """
    path = os.fspath(checkpoint_file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"the checkpoint file {path} does not exist")
    if path.endswith(".safetensors"):
        with SafetensorsFile(path) as weights:
            yield weights
    else:
        yield _unpickled(path)


def _unpickled(path: str) -> Mapping[str, Any]:
    import pickle
    import zipfile

    try:
        # What is mapped is read when it is touched; files of before the zip format cannot be.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read as a state dict: {error}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    return state


class SafetensorsFile(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, in the order in which they lie in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._touched = 0
        self._handle: Any = None

    def __enter__(self) -> SafetensorsFile:
        self._reopen()
        written_by = (self._handle.metadata() or {}).get("format")
        if written_by is None:
            logger.warning(
                f"The safetensors archive passed at {self.path} does not contain metadata. "
                "Make sure to save your model with the `save_pretrained` method. Defaulting to 'pt' metadata."
            )
        elif written_by != "pt":
            raise ValueError(f"The checkpoint passed was saved with {written_by}, we need a the pt format.")
        self._names = list(getattr(self._handle, "offset_keys", self._handle.keys)())
        return self

    def __exit__(self, *error: object) -> None:
        self._handle = None

    def _reopen(self) -> None:
        from safetensors import SafetensorError, safe_open

        self._touched = 0
        try:
            self._handle = safe_open(self.path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise CheckpointError(f"{self.path} is not a whole safetensors file: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._touched > _MAPPED:
            self._reopen()
        tensor: torch.Tensor = self._handle.get_tensor(name)
        self._touched += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def checkpoint_files(checkpoint: str | os.PathLike[str]) -> list[str]:
    """The files that make up a checkpoint: itself, those that its index names, or what lies in its folder.

    Raises ValueError where there is no checkpoint at that path, or several.
    """
    path = os.fspath(checkpoint)
    if os.path.isdir(path):
        indices = [name for name in os.listdir(path) if name.endswith(".index.json")]
        whole = [name for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME) if os.path.isfile(os.path.join(path, name))]
        if whole:
            return [os.path.join(path, whole[0])]
        if not indices:
            raise ValueError(
                f"{path} is not a folder containing a `.index.json` file or a {WEIGHTS_NAME} or a {SAFE_WEIGHTS_NAME} "
                "file"
            )
        if len(indices) > 1:
            raise ValueError(f"{path} containing more than one `.index.json` file, delete the irrelevant ones.")
        path = os.path.join(path, indices[0])
    elif not os.path.isfile(path):
        raise ValueError(
            "`checkpoint` should be the path to a file containing a whole state dict, or the index of a sharded "
            f"checkpoint, or a folder containing a sharded checkpoint or the whole state dict, but got {path}."
        )
    return _shards(path) if path.endswith(".index.json") else [path]


def _shards(index_file: str) -> list[str]:
    with open(index_file, encoding="utf-8") as file:
        index = json.load(file)
    names = sorted(set(index.get("weight_map", index).values()))
    files = [os.path.join(os.path.dirname(index_file), name) for name in names]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise CheckpointError(f"{index_file} names files that do not exist: {', '.join(missing)}")
    return files


class SafetensorsFiles:
    """Open safetensors files by path: the header of a file is read once, until the file is another.

    Reading the header of a file of 300 tensors takes 40 times as long as finding one of them.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[tuple[int, int, int], Any]] = {}

    def tensor(self, path: str | os.PathLike[str], name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            return self._handle(os.fspath(path)).get_tensor(name)
        except FileNotFoundError:
            raise CheckpointError(f"{path}, where {name} is kept, does not exist any more") from None
        except SafetensorError as error:
            raise CheckpointError(f"{name} cannot be read from {path}: {error}") from None

    def _handle(self, path: str) -> Any:
        from safetensors import safe_open

        state = os.stat(path)
        stamp = (state.st_ino, state.st_size, state.st_mtime_ns)
        known = self._open.get(path)
        if known is None or known[0] != stamp:
            known = self._open[path] = (stamp, safe_open(path, framework="pt", device="cpu"))
        return known[1]

    def __reduce__(self) -> Any:
        # A copy of a model, or one sent to another process, opens its files anew.
        return SafetensorsFiles, ()

# SPDX-License-Identifier: Apache-2.0
"""Files of weights: safetensors and torch's own, read a tensor at a time; which files make up a checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..core import json_text
from ..core.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from ..core.errors import CheckpointError, WeightFileError
from ..core.files import reason, require_regular
from ..core.tensor_files import READ_ERRORS, CorruptFile, Header, read_header
from . import logger

# How many bytes of a file may be mapped and touched before it is opened anew, so that its pages do not add up.
_MAPPED = 64 * 2**20


def open_weights(checkpoint_file: str | os.PathLike[str], mapped: bool = True) -> Mapping[str, Any]:
    """The tensors in a file by name, each read on access.

    The memory of a tensor is the file's. safetensors writes a new file where it saves over one that is read;
    `torch.save` does not, so that what is kept of its files must be a copy, or read with `mapped=False`.

    Raises FileNotFoundError, or CheckpointError for a broken file or one of another framework.
    """
    path = os.fspath(checkpoint_file)
    if not os.path.lexists(path):
        raise FileNotFoundError(f"the checkpoint file {path} does not exist")
    if path.endswith(".safetensors"):
        weights = SafetensorsFile(path, _MAPPED)
        written_by = weights.header.metadata.get("format")
        if written_by is None:
            logger.warning(
                f"The safetensors archive passed at {path} does not contain metadata. "
                "Make sure to save your model with the `save_pretrained` method. Defaulting to 'pt' metadata."
            )
        elif written_by != "pt":
            raise WeightFileError(
                f"The checkpoint passed was saved with {written_by[:80]}, the format pt is needed: {path}"
            )
        return weights
    try:
        require_regular(path)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read: {reason(error)}"
        ) from error
    return _unpickled(path, mapped)


def _unpickled(path: str, mapped: bool) -> Mapping[str, Any]:
    # Files of before the zip format cannot be mapped.
    mapped = mapped and zipfile.is_zipfile(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except READ_ERRORS as error:
        why = str(error)[:500] or "it is empty or incomplete"
        raise CheckpointError(f"{path} cannot be read as a state dict: {why}") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} contains a {type(state).__name__} that is not a state dict")
    return state


class SafetensorsFile(Mapping[str, torch.Tensor]):
    """A private mapping of a safetensors file: its pages are the file's until they are written to.

    Args:
        path: the file.
        limit: how many bytes are touched before the file is mapped anew, so that its pages do not add up.

    Raises:
        CheckpointError: the file is gone, broken or changed.
    """

    def __init__(self, path: str, limit: float = math.inf) -> None:
        self.path = path
        self.limit = limit
        try:
            require_regular(path)
            self.state: os.stat_result = os.stat(path)
            self.header: Header = read_header(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}, which contains offloaded weights, no longer exists"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
        except CorruptFile as error:
            raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
        self._map()

    def _map(self) -> None:
        self.storage: Any = torch.UntypedStorage.from_file(self.path, False, self.state.st_size)
        self._touched = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.header.entries[name]
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self.path)
            if now.st_ino == self.state.st_ino and now.st_mtime_ns != self.state.st_mtime_ns:
                raise CheckpointError(
                    f"{self.path} was changed after weights were offloaded from it: load the "
                    "model again"
                )
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._touched > self.limit:
            self._map()
        self._touched += entry.end - entry.start
        start = self.header.offset + entry.start
        stop = self.header.offset + entry.end
        # Only a slice of the mapping: saving the tensor would otherwise save the entire file.
        storage = self.storage[start:stop]
        if start % entry.dtype.itemsize:
            # Only writers that do not pad the header make such files.
            storage = storage.clone()
        tensor: torch.Tensor = torch.empty(0, dtype=entry.dtype).set_(storage, 0, entry.shape)  # type: ignore[call-overload]
        return tensor

    def __iter__(self) -> Iterator[str]:
        # In the order in which they lie in the file.
        return iter(sorted(self.header.entries, key=lambda name: self.header.entries[name].start))

    def __len__(self) -> int:
        return len(self.header.entries)


def shapes_in(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """{name: shape} of an open file, without reading a tensor of a safetensors file; None for what is not a tensor."""
    if isinstance(weights, SafetensorsFile):
        return {name: entry.shape for name, entry in weights.header.entries.items()}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, value in weights.items():
        shapes[name] = None
        if isinstance(value, torch.Tensor):
            shapes[name] = tuple(value.shape)
    return shapes


def checkpoint_files(checkpoint: str | os.PathLike[str]) -> list[str]:
    """The files of a checkpoint: the file itself, the files in its index, or those in its folder.

    Raises WeightFileError where there is no checkpoint at that path, or several.
    """
    path = _file_or_index(checkpoint)
    if not _is_index(path):
        return [path]
    files = sorted(set(_indexed(path).values()))
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise CheckpointError(f"{path} names files that do not exist: {', '.join(missing)[:500]}")
    return files


def indexed_files(checkpoint: str | os.PathLike[str]) -> dict[str, str]:
    """{name of a weight: its file} of a sharded checkpoint, by its index; empty for any other checkpoint."""
    path = _file_or_index(checkpoint)
    if _is_index(path):
        return _indexed(path)
    return {}


def _is_index(path: str) -> bool:
    return path.endswith(".index.json")


def _file_or_index(checkpoint: str | os.PathLike[str]) -> str:
    path = os.fspath(checkpoint)
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        raise WeightFileError(
            "`checkpoint` should be the path to a file containing a full state dict, or the index of a sharded "
            f"checkpoint, or a folder containing a sharded checkpoint or the full state dict, but got {path}."
        )
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        single = os.path.join(path, name)
        if os.path.isfile(single):
            return single
    indices = [name for name in os.listdir(path) if _is_index(name)]
    if not indices:
        raise WeightFileError(
            f"{path} is not a folder containing a `.index.json` file or a {WEIGHTS_NAME} or a {SAFE_WEIGHTS_NAME} file"
        )
    if len(indices) > 1:
        raise WeightFileError(
            f"{path} containing more than one `.index.json` file, delete the irrelevant ones."
        )
    return os.path.join(path, indices[0])


def _indexed(index_file: str) -> dict[str, str]:
    try:
        index = json_text.read(index_file, numbers=True)
    except (OSError, json_text.JSONTextError) as error:
        raise CheckpointError(f"the index {index_file} cannot be read: {reason(error)}") from error
    weight_map: Any = None
    if isinstance(index, dict):
        weight_map = index.get("weight_map", index)
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"the index {index_file} does not have a `weight_map`")
    folder = os.path.dirname(index_file)
    files: dict[str, str] = {}
    for weight, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"the index {index_file} does not map weight names to file names")
        if not name or "\0" in name or os.path.isabs(name) or ".." in name.split("/"):
            raise CheckpointError(
                f"the index {index_file} names a file outside its folder: {name[:200]!r}"
            )
        files[weight] = os.path.join(folder, name)
    return files


class SafetensorsFiles:
    """Tensors of safetensors files at any time. A file is mapped once.

    It is read from then on, also after it has been removed or another one has taken its place. What is written to a
    tensor stays in this process and never reaches the file.
    """

    def __init__(self) -> None:
        self._files: dict[str, SafetensorsFile] = {}

    def open(self, path: str | os.PathLike[str]) -> SafetensorsFile:
        """Map a file, unless it is. Raises CheckpointError where it is gone or broken."""
        file = os.fspath(path)
        if file not in self._files:
            self._files[file] = SafetensorsFile(file)
        return self._files[file]

    def tensor(self, path: str | os.PathLike[str], name: str) -> torch.Tensor:
        """Raises CheckpointError where the file is gone, broken or changed, or does not hold the tensor."""
        file = self.open(path)
        if name not in file:
            raise CheckpointError(f"{file.path} does not contain the tensor {name}")
        return file[name]

    def __deepcopy__(self, memo: Any) -> SafetensorsFiles:
        return self

    def __reduce__(self) -> Any:
        # A model that is sent to another process opens its files there.
        return SafetensorsFiles, ()

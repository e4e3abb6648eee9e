# SPDX-License-Identifier: Apache-2.0
"""Files of weights: safetensors and torch's own, read a tensor at a time; which files make up a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..core import json_text
from ..core.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from ..core.dtypes import BY_NAME
from ..core.errors import CheckpointError
from ..core.files import open_regular, require_regular
from ..core.system import available_memory
from ..core.torch_files import READ_ERRORS, check_archive
from .file_pages import is_unwritten, read_file

logger: logging.Logger = logging.getLogger(__name__)

# How many bytes of a file may be mapped and touched before it is opened anew, so that its pages do not add up.
_MAPPED = 64 * 2**20
_DESCRIPTORS = "/dev/fd"  # an open file by its descriptor, where the system has such names
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors format's own limit


@contextmanager
def open_weights(checkpoint_file: str | os.PathLike[str], mapped: bool = True) -> Iterator[Mapping[str, Any]]:
    """The tensors in a file by name, each read on access.

    The memory of a tensor is the file's. safetensors writes a new file where it saves over one that is read;
    `torch.save` does not, so that what is kept of its files must be a copy, or read with `mapped=False`.

    Raises FileNotFoundError, ValueError for a safetensors file of another framework, CheckpointError for a broken one.
    """
    path = os.fspath(checkpoint_file)
    if not os.path.lexists(path):
        raise FileNotFoundError(f"the checkpoint file {path} does not exist")
    try:
        require_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint file {path} cannot be read: {_reason(error)}") from error
    if path.endswith(".safetensors"):
        with SafetensorsFile(path) as weights:
            yield weights
    else:
        yield _unpickled(path, mapped)


def _unpickled(path: str, mapped: bool) -> Mapping[str, Any]:
    # Files of before the zip format cannot be mapped.
    mapped = check_archive(path) and mapped
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except READ_ERRORS as error:
        reason = str(error) or "it is empty or incomplete"
        raise CheckpointError(f"{path} cannot be read as a state dict: {reason}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    if not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} is not a state dict: a name in it is no text")
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
            raise ValueError(
                f"The checkpoint passed was saved with {written_by}, we need a the pt format: {self.path}"
            )
        self._names = list(getattr(self._handle, "offset_keys", self._handle.keys)())
        return self

    def __exit__(self, *error: object) -> None:
        self._handle = None

    def _reopen(self) -> None:
        from safetensors import SafetensorError, safe_open

        self._touched = 0
        try:
            self._handle = safe_open(self.path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is not a complete safetensors file: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._touched > _MAPPED:
            self._reopen()
        try:
            tensor: torch.Tensor = self._handle.get_tensor(name)
        except READ_ERRORS as error:
            raise CheckpointError(f"{name} in {self.path} cannot be read: {error}") from error
        self._touched += tensor.nbytes
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return tuple(self._handle.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def shapes_in(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """{name: shape} of an open file, without reading a tensor of a safetensors file; None for what is no tensor."""
    if isinstance(weights, SafetensorsFile):
        return {name: weights.shape(name) for name in weights}
    return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else None for name, value in weights.items()}


def checkpoint_files(checkpoint: str | os.PathLike[str]) -> list[str]:
    """The files of a checkpoint: the file itself, the files in its index, or those in its folder.

    Raises ValueError where there is no checkpoint at that path, or several.
    """
    path = _file_or_index(checkpoint)
    if not _is_index(path):
        return [path]
    files = sorted(set(_indexed(path).values()))
    if missing := [file for file in files if not os.path.isfile(file)]:
        raise CheckpointError(f"{path} names files that do not exist: {', '.join(missing)}")
    return files


def indexed_files(checkpoint: str | os.PathLike[str]) -> dict[str, str]:
    """{name of a weight: its file} of a sharded checkpoint, by its index; empty for any other checkpoint."""
    path = _file_or_index(checkpoint)
    return _indexed(path) if _is_index(path) else {}


def _is_index(path: str) -> bool:
    return path.endswith(".index.json")


def _file_or_index(checkpoint: str | os.PathLike[str]) -> str:
    path = os.fspath(checkpoint)
    if os.path.isdir(path):
        indices = [name for name in os.listdir(path) if _is_index(name)]
        single = [name for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME) if os.path.isfile(os.path.join(path, name))]
        if single:
            return os.path.join(path, single[0])
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
            "`checkpoint` should be the path to a file containing a full state dict, or the index of a sharded "
            f"checkpoint, or a folder containing a sharded checkpoint or the full state dict, but got {path}."
        )
    return path


def _indexed(index_file: str) -> dict[str, str]:
    try:
        index = json_text.read(index_file, numbers=True)
    except (OSError, json_text.JSONTextError) as error:
        raise CheckpointError(f"the index {index_file} cannot be read: {_reason(error)}") from error
    places = index.get("weight_map", index) if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"the index {index_file} does not map names of weights to names of files")
    for name in places.values():
        if not name or "\0" in name or os.path.isabs(name) or ".." in name.split("/"):
            raise CheckpointError(f"the index {index_file} names a file outside of its folder: {name[:200]!r}")
    folder = os.path.dirname(index_file)
    return {weight: os.path.join(folder, name) for weight, name in places.items()}


class SafetensorsFiles:
    """Tensors of safetensors files at any time: the header of a file is read once, until the file is another.

    For a file of 300 tensors that takes 40 times as long as reaching one of them. Each tensor of
    `tensor` is a separate mapping: what is written to one reaches neither the file nor what is read from it later.
    """

    def __init__(self) -> None:
        self._headers: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}
        self._kept: dict[str, _KeptFile] = {}
        self._available = 0  # bytes that may stay mapped, of what was free at `_measured` (seconds)
        self._measured = -math.inf
        self._lock = threading.Lock()  # for the mappings that stay

    def keep(self, path: str | os.PathLike[str]) -> None:
        """Read this file from now on, also after it has been removed or another one has taken its place.

        A file that cannot be read yet is left to `tensor`.
        """
        file = os.fspath(path)
        if os.path.isdir(_DESCRIPTORS) and file not in self._kept:
            with contextlib.suppress(OSError):
                self._kept[file] = _KeptFile(open_regular(file))

    def tensor(self, path: str | os.PathLike[str], name: str) -> torch.Tensor:
        """Raises CheckpointError where the file is gone or broken, or does not hold the tensor."""
        file = os.fspath(path)
        kept = self._kept.get(file)
        opened = file if kept is None else kept.opened
        return self._read(file, name, lambda size: _map(opened, size))

    def shared(self, path: str | os.PathLike[str], name: str) -> torch.Tensor:
        """Return the tensor in a mapping that stays, so that its pages are looked up once, and not at each call.

        A tensor that was written to, or that would map more than half of the free memory, is one of `tensor`.
        """
        file = os.fspath(path)
        kept = self._kept.get(file)
        if kept is None or name in kept.written:
            return self.tensor(file, name)
        with self._lock:
            tensor = self._read(file, name, kept.mapping)
            new = name not in kept.tensors
            if not self._may_stay(tensor.nbytes if new else 0):
                return self.tensor(file, name)
            if tensor.nbytes and not is_unwritten(tensor.data_ptr(), tensor.nbytes):
                # What a forward writes to its weights is lost afterwards.
                kept.written.add(name)
                kept.unmap()
                return self.tensor(file, name)
            if new:
                kept.tensors[name] = (tensor.data_ptr(), tensor.nbytes)
                kept.size += tensor.nbytes
            return tensor

    def read(self, path: str | os.PathLike[str], name: str) -> None:
        """Read the bytes of a tensor to the system's cache."""
        file = os.fspath(path)
        kept = self._kept.get(file)
        _, header = self._header(file)
        begin, end = header[name]["data_offsets"]
        if kept is not None:
            read_file(kept.descriptor, begin, end)
            return
        with open(open_regular(file), "rb", buffering=0) as opened:
            read_file(opened.fileno(), begin, end)

    def place(self, path: str | os.PathLike[str], name: str) -> tuple[int, int] | None:
        """(address, bytes) of a tensor in the mapping that stays; None if it is not there."""
        kept = self._kept.get(os.fspath(path))
        return None if kept is None else kept.tensors.get(name)

    def _may_stay(self, size: int) -> bool:
        """Whether so many bytes more may stay mapped."""
        mapped = sum(kept.size for kept in self._kept.values())
        now = time.monotonic()
        if now > self._measured + 1:
            self._measured, self._available = now, (available_memory() or 0) // 2
            if mapped > self._available:
                for kept in self._kept.values():
                    kept.unmap()
                return False
        return mapped + size <= self._available

    def _read(self, file: str, name: str, mapping: Callable[[int], torch.UntypedStorage]) -> torch.Tensor:
        size, header = self._header(file)
        entry = header.get(name)
        if entry is None:
            raise CheckpointError(f"{file} has no tensor {name}")
        dtype = BY_NAME.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{name} in {file} is of the type {entry['dtype']}, which torch cannot read")
        start, stop = entry["data_offsets"]
        empty = torch.empty(entry["shape"], dtype=dtype, device="meta")
        if not empty.numel():
            return torch.empty_like(empty, device="cpu")
        if stop - start != empty.nbytes or stop > size:
            raise CheckpointError(f"{file} is not a complete safetensors file: {name} lies outside of it")
        # Only a slice of the mapping: saving the tensor would otherwise save the entire file.
        storage = mapping(size)[start:stop]
        if start % dtype.itemsize:
            # Only writers that do not pad the header make such files.
            storage = storage.clone()
        tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(storage, 0, empty.shape)  # type: ignore[call-overload]
        return tensor

    def _header(self, path: str) -> tuple[int, dict[str, Any]]:
        """The size of a file in bytes, and its entries with their places counted from the start of the file."""
        kept = self._kept.get(path)
        if kept is not None:
            state, opened = os.fstat(kept.descriptor), kept.opened
            if _stamp(state) != kept.stamp:
                raise CheckpointError(
                    f"{path} was changed after its weights had been offloaded from it: load the model again"
                )
        else:
            try:
                require_regular(path)
                state, opened = os.stat(path), path
            except FileNotFoundError:
                raise CheckpointError(f"{path}, where offloaded weights are kept, does not exist any more") from None
        stamp = _stamp(state)
        known = self._headers.get(path)
        if known is None or known[0] != stamp:
            known = self._headers[path] = (stamp, _read_header(path, state.st_size, opened))
        return state.st_size, known[1]

    def __deepcopy__(self, memo: Any) -> SafetensorsFiles:
        return self

    def __reduce__(self) -> Any:
        # A model that is sent to another process opens its files there.
        return SafetensorsFiles, ()


def _map(path: str, size: int) -> torch.UntypedStorage:
    """A private mapping of a file: its pages are the file's until they are written to."""
    storage: Any = torch.UntypedStorage.from_file(path, False, size)
    return storage  # type: ignore[no-any-return]


class _KeptFile:
    """An open file, what it was like when it was opened, and a mapping of it.

    Fields:
        tensors: in the mapping: name -> (address, bytes).
        size: their bytes.
        written: the names of tensors that were written to while they were in use.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.stamp = _stamp(os.fstat(descriptor))
        self.opened = f"{_DESCRIPTORS}/{descriptor}"
        self.tensors: dict[str, tuple[int, int]] = {}
        self.size = 0
        self.written: set[str] = set()
        self._storage: torch.UntypedStorage | None = None

    def mapping(self, size: int) -> torch.UntypedStorage:
        """Return the mapping of the file."""
        if self._storage is None:
            self._storage = _map(self.opened, size)
        return self._storage

    def unmap(self) -> None:
        """Drop the mapping: the next tensors come from a new one."""
        self._storage = None
        self.tensors, self.size = {}, 0

    def __del__(self) -> None:
        os.close(self.descriptor)


def _stamp(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_ino, state.st_size, state.st_mtime_ns


def _read_header(path: str, size: int, opened: str) -> dict[str, Any]:
    with open(open_regular(opened), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json_text.parse(file.read(length)) if 0 < length <= min(size - 8, _HEADER_LIMIT) else None
        except json_text.JSONTextError:
            header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    begin = 8 + length
    for name, entry in header.items():
        if not _is_entry(entry):
            raise CheckpointError(f"{path} is not a safetensors file: its header describes {name[:80]!r} wrongly")
        entry["data_offsets"] = [begin + at for at in entry["data_offsets"]]
    return header


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    numbers = all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, *offsets))
    return numbers and math.prod(shape) < 1 << 62


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)

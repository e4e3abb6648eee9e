# SPDX-License-Identifier: Apache-2.0
"""Shards in torch.distributed.checkpoint's own format, read without running what their pickled index may hold."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ..core.errors import CheckpointError
from ..core.files import read_regular, reason, require_regular
from ..core.tensor_files import READ_ERRORS
from .compat import load_pickled

# The index names classes that hold places and shapes, and nothing that acts.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "dict"),
    ("builtins", "list"),
    ("builtins", "set"),
}
_CLASSES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorProperties._MEM_FORMAT_ENCODING",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
}


_PATHS = {
    "Path": PurePosixPath,
    "PosixPath": PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "WindowsPath": PureWindowsPath,
    "PureWindowsPath": PureWindowsPath,
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = (module in _MODULES and name in _CLASSES) or (module, name) in _NAMES
        if (
            not allowed
            and module == "torch"
            and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            allowed = True
        # Only a note of where the shards were written. Python 3.13 pickles it under another module, and one of Windows
        # cannot be made elsewhere.
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        if not allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@functools.lru_cache(maxsize=8)
def _read_index(path: Path, stamp: tuple[int, int, int]) -> Metadata:
    """The index in a file; `stamp` identifies its content. A load reads the same one several times."""
    metadata = _IndexUnpickler(io.BytesIO(read_regular(path, 1 << 30))).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("it is not an index of shards")
    for name in {str(entry.relative_path) for entry in metadata.storage_data.values()}:
        if Path(name).name != name:
            raise ValueError(f"it names a file outside its folder: {name[:200]!r}")
        try:
            require_regular(path.with_name(name))
        except OSError as error:
            raise ValueError(f"it names {name}: {reason(error)}") from error
    return metadata


class PlainReader(FileSystemReader):
    """A reader of torch's own shards whose index is unpickled with an allow-list.

    The shards themselves are read by torch with `weights_only=True`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path))
        self._folder = Path(path)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Read the index of the checkpoint without executing pickled code."""
        path = self._folder / ".metadata"
        try:
            found = path.stat()
            metadata = copy.copy(
                _read_index(path, (found.st_ino, found.st_size, found.st_mtime_ns))
            )
        except READ_ERRORS as error:
            raise CheckpointError(
                f"{path} is not a trustworthy index of shards: {reason(error)}"
            ) from error
        metadata.storage_meta = copy.copy(metadata.storage_meta) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Reads what is not a tensor with `weights_only=True`; torch's own planner unpickles it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one entry. Raises CheckpointError for one that holds more than plain data."""
        name = read_item.dest_index.fqn
        # The state dict that is filled is flat: it has no entry below another one.
        self.original_state_dict[name] = load_pickled(value, name=f"{self._folder}: {name}")

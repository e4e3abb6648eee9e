# SPDX-License-Identifier: Apache-2.0
"""Shards in torch.distributed.checkpoint's own format, read without running what their pickled index may hold."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _ReaderView

from ..core.errors import CheckpointError
from ..core.files import open_regular, read_regular, require_regular
from ..core.torch_files import READ_ERRORS, check_archive
from .compat import load_pickled
from .manifest import reason

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


# The unpickler written in Python keeps its memo in a dict: the one in C takes memory for any index that a file names.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = (module in _MODULES and name in _CLASSES) or (module, name) in _NAMES
        if not allowed and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            allowed = True
        if module == "pathlib" and name in ("PosixPath", "PurePosixPath", "Path"):
            allowed = True
        if not allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@functools.lru_cache(maxsize=8)
def _read_index(path: Path, stamp: tuple[int, int, int]) -> Metadata:
    """The index in a file; `stamp` identifies its content. A load reads the same one several times."""
    metadata = _Unpickler(io.BytesIO(read_regular(path, 1 << 30))).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("it is no index of shards")
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
        raise ValueError("its tables are no dicts")
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        name = place.relative_path
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ValueError(f"it names a file outside of its folder: {str(name)[:200]!r}")
        if name not in sizes:
            try:
                sizes[name] = require_regular(path.with_name(name))
            except OSError as error:
                raise ValueError(f"it names {name}: {reason(error)}") from error
        if min(place.offset, place.length) < 0 or place.offset + place.length > sizes[name]:
            raise ValueError(f"it names bytes that {name} does not have")
    return metadata


class _Shard(_ReaderView):
    """One shard in a file. torch's own class (2.11 to 2.13) seeks to a wrong place from the end."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


class PlainReader(FileSystemReader):
    """A reader of torch's own shards whose index is unpickled with an allow-list.

    The shards themselves are read by torch with `weights_only=True`, after a check that they take no more memory than
    their file has.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path))
        self._folder = Path(path)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Read the index of the checkpoint without executing pickled code."""
        path = self._folder / ".metadata"
        try:
            found = path.stat()
            metadata = copy.copy(_read_index(path, (found.st_ino, found.st_size, found.st_mtime_ns)))
        except READ_ERRORS as error:
            raise CheckpointError(f"{path} is not an index of shards that can be trusted: {reason(error)}") from error
        metadata.storage_meta = copy.copy(metadata.storage_meta) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        """The bytes of one shard. A name of torch 2.11 to 2.13."""
        found = _Shard(file, sinfo.offset, sinfo.length)
        if not sinfo.transform_descriptors:
            check_archive(found, self._folder / sinfo.relative_path)
            found.seek(0)
        return found

    def check_shards(self) -> None:
        """Raise CheckpointError unless each tensor that the index names can be read, in its shape. Reads no values."""
        from torch._subclasses import FakeTensorMode

        metadata = self.read_metadata()
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode())
            files: dict[str, IO[bytes]] = {}
            for index, place in metadata.storage_data.items():
                entry = metadata.state_dict_metadata.get(index.fqn)
                if not isinstance(entry, TensorStorageMetadata) or place.transform_descriptors:
                    continue
                path = self._folder / place.relative_path
                if path.name not in files:
                    files[path.name] = stack.enter_context(open(open_regular(path), "rb"))
                try:
                    tensor = torch.load(self._slice_file(files[path.name], place), weights_only=True)
                    chunk = next(chunk for chunk in entry.chunks if index.offset in (None, chunk.offsets))
                    if tensor.shape != chunk.sizes:
                        raise ValueError(f"it has the shape {list(tensor.shape)}, not {list(chunk.sizes)}")
                except CheckpointError:
                    raise
                except (StopIteration, *READ_ERRORS) as error:
                    raise CheckpointError(
                        f"{path}: the shard of {index.fqn} cannot be read: {reason(error)}"
                    ) from error


class PlainPlanner(DefaultLoadPlanner):
    """Reads what is no tensor with `weights_only=True`; torch's own planner unpickles it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one entry. Raises CheckpointError for one that holds more than plain data."""
        name = read_item.dest_index.fqn
        self.state_dict[name] = load_pickled(value, name=f"{self._folder}: {name}")
        set_element(self.original_state_dict, self.mappings[name], self.state_dict[name])

# SPDX-License-Identifier: Apache-2.0
"""Shards in torch.distributed.checkpoint's own format, read without running what their pickled index may hold."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ..core.errors import CheckpointError
from ..core.files import read_regular
from ..core.torch_files import READ_ERRORS
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        allowed = (module in _MODULES and name in _CLASSES) or (module, name) in _NAMES
        if not allowed and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            allowed = True
        if module == "pathlib" and name in ("PosixPath", "PurePosixPath", "Path"):
            allowed = True
        if not allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class PlainReader(FileSystemReader):
    """A reader of torch's own shards whose index is unpickled with an allow-list.

    The shards themselves are read by torch with `weights_only=True`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path))
        self._folder = Path(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(read_regular(path, 1 << 30))).load()
        except READ_ERRORS as error:
            raise CheckpointError(f"{path} is not an index of shards that can be trusted: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is not an index of shards")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Reads what is no tensor with `weights_only=True`; torch's own planner unpickles it."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Take one entry. Raises CheckpointError for one that holds more than plain data."""
        self.state_dict[read_item.dest_index.fqn] = load_pickled(value)
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            self.state_dict[read_item.dest_index.fqn],
        )

# SPDX-License-Identifier: Apache-2.0
"""Shards in a bucket: torch's writer and reader of safetensors shards, for objects instead of files.

The files are those that torch's own writer makes. A rank reads the blocks that have its part of each tensor, and
compares these with their checksums.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..core import json_text
from ..core.bucket_path import BucketPath
from ..core.tensor_files import Header, TensorEntry, read_header
from .documents import damage
from .files import FileRecord, download, segments, upload

_OFFSETS = "DCP_SHARDING_INFO"  # torch's key for where each shard belongs in its tensor
_BLOCK = 4 << 20  # bytes with a checksum of their own, and the least that is read
_THREADS = 16  # which wait for answers of the store


class ShardWriter(dcp.StorageWriter):
    """Writes one object for each rank that has shards.

    Args:
        folder: where the objects belong.
    """

    def __init__(self, folder: BucketPath) -> None:
        self.folder = folder
        self.records: dict[str, FileRecord] = {}  # of what this rank has written
        self.names: list[str] = []  # of all objects, on the coordinator

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: a bucket has no folders to make."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan itself."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with the name of its object."""
        named = []
        for index, plan in enumerate(plans, start=1):
            name = f"shard-{index:05d}-model-00001-of-00001.safetensors"
            named.append(dataclasses.replace(plan, storage_data=name))
        return named

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shards of this rank."""
        name = plan.storage_data
        tensors: dict[str, torch.Tensor] = {}
        offsets = {}
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
            tensors[item.index.fqn] = tensor.detach()
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, tensor.nbytes, name))
        if tensors:
            metadata = {_OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}
            # Every rank reads the counts of steps, which one has written: they are neighbours.
            by_size = dict(sorted(tensors.items(), key=lambda entry: entry[1].nbytes))
            content = segments(by_size, metadata)
            self.records[name] = upload(self.folder / name, content, _BLOCK)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: take the names of all objects."""
        names = {result.storage_data for rows in results for result in rows}
        self.names = sorted(names)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: torch never chooses this writer itself."""
        return False


class ShardReader(dcp.StorageReader):
    """Reads shards from objects.

    Args:
        folder: that has the objects, and knows their records.
    """

    def __init__(self, folder: BucketPath) -> None:
        self.folder = folder
        # By entry: its object, the length of the object's header, its place behind that.
        self._places: dict[MetadataIndex, tuple[BucketPath, int, TensorEntry]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader has one folder."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take what `read_metadata` has found."""
        self._places = metadata.storage_data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors, from the headers of all objects."""
        entries: dict[str, TensorStorageMetadata] = {}
        paths = list(self.folder.glob("*.safetensors"))
        with ThreadPoolExecutor(_THREADS) as pool:
            headers = list(pool.map(_header, paths))
        places: dict[MetadataIndex, tuple[BucketPath, int, TensorEntry]] = {}
        for path, header in zip(paths, headers, strict=True):
            offsets = json_text.parse(header.metadata[_OFFSETS])
            for name, entry in header.entries.items():
                start = torch.Size(offsets[name]["saved_offsets"])
                end = torch.Size(a + b for a, b in zip(start, entry.shape, strict=True))
                known = entries.setdefault(
                    name, TensorStorageMetadata(TensorProperties(entry.dtype), end, [])
                )
                known.size = torch.Size(map(max, known.size, end))
                known.chunks.append(ChunkStorageMetadata(start, torch.Size(entry.shape)))
                places[MetadataIndex(name, start)] = (path, header.offset, entry)
        return Metadata(dict(entries), storage_data=places)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan itself."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans themselves."""
        return plans

    def fetch(self, items: Iterable[ReadItem]) -> None:
        """Read and check the blocks that have these parts of tensors, unless that was done. They stay in memory."""
        missing: set[tuple[BucketPath, int]] = set()
        for item in items:
            path, start, end = self._span(item)
            for index in range(start // _block(path), -(-end // _block(path))):
                if (path.key, index) not in path.cache:
                    missing.add((path, index))
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(_read_block, missing))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan."""
        self.fetch(plan.items)
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._part(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _rows(self, item: ReadItem) -> tuple[int, int]:
        """The first of the rows that have a part of a saved tensor, and the number of the rows."""
        if item.lengths:
            return item.storage_offsets[0], item.lengths[0]
        return 0, 1

    def _span(self, item: ReadItem) -> tuple[BucketPath, int, int]:
        """The object, and the bytes in it, of the rows that have a part of a saved tensor."""
        path, header, entry = self._places[item.storage_index]
        first, count = self._rows(item)
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        start = header + entry.start + first * row
        return path, start, start + count * row

    def _part(self, item: ReadItem) -> torch.Tensor:
        path, start, end = self._span(item)
        entry = self._places[item.storage_index][2]
        content = bytearray(end - start)
        block = _block(path)
        for index in range(start // block, -(-end // block)):
            first = max(start, index * block)
            last = min(end, (index + 1) * block)
            cached = path.cache[path.key, index]
            content[first - start : last - start] = cached[
                first - index * block : last - index * block
            ]
        if not content:
            return torch.empty(tuple(item.lengths), dtype=entry.dtype)
        rows = torch.frombuffer(content, dtype=entry.dtype)
        if not entry.shape:
            return rows.reshape(())
        rows = rows.reshape(self._rows(item)[1], *entry.shape[1:])
        for dimension in range(1, len(entry.shape)):
            offset, length = item.storage_offsets[dimension], item.lengths[dimension]
            rows = rows.narrow(dimension, offset, length)
        return rows

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: torch never chooses this reader itself."""
        return False


def _header(path: BucketPath) -> Header:
    key = (path.key, "header")
    if key not in path.cache:
        with damage(path):
            path.cache[key] = read_header(path)
    header: Header = path.cache[key]
    return header


def _record(path: BucketPath) -> FileRecord:
    assert path.objects is not None
    record = path.objects[path.key]
    assert isinstance(record, FileRecord)
    return record


def _block(path: BucketPath) -> int:
    return _record(path).block


def _read_block(block: tuple[BucketPath, int]) -> None:
    path, index = block
    record = _record(path)
    start = index * record.block
    content = bytearray(min(record.block, record.size - start))
    with damage(path):
        download(path, record, start, memoryview(content))
    path.cache[path.key, index] = content

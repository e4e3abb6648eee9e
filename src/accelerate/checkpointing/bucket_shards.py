# SPDX-License-Identifier: Apache-2.0
"""Shards in a bucket: torch's writer and reader of safetensors shards, for objects instead of files.

The files are those that torch's own writer makes. An index beside them says where each shard is, so that a rank reads
no headers. It reads the blocks that have its part of each tensor, and compares these with their checksums.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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
from ..core.tensor_files import BY_NAME, NAMES, Header, parse_header, read_header
from .documents import damage
from .files import BlockIO, FileRecord, download, segments, upload
from .layout import INDEX

_OFFSETS = "DCP_SHARDING_INFO"  # torch's key for where each shard belongs in its tensor
_BLOCK = 4 << 20  # bytes with a checksum of their own, and the least that is read
_THREADS = 16  # which wait for answers of the store


# By file: its shards, as `Shard` has them without the file.
Index = dict[str, list[Any]]


class Shard(NamedTuple):
    """A part of a tensor.

    Fields:
        file: the name of its object.
        name: of the tensor.
        dtype: its name in a safetensors file.
        offsets: of the first element, in the tensor.
        shape: of the part.
        start: of the first byte, in the object.
    """

    file: str
    name: str
    dtype: str
    offsets: list[int]
    shape: list[int]
    start: int


class ShardWriter(dcp.StorageWriter):
    """Writes one object for each rank that has shards.

    Args:
        folder: where the objects belong.
    """

    def __init__(self, folder: BucketPath) -> None:
        self.folder = folder
        self.records: dict[str, FileRecord] = {}  # of what this rank has written
        self.index: Index = {}  # of all shards, on the coordinator

    def reset(self, checkpoint_id: object = None) -> None:
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
        """Write the shards of this rank. The result is what the index has of them."""
        tensors: dict[str, torch.Tensor] = {}
        offsets: dict[str, list[int]] = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
            name = item.index.fqn
            tensors[name] = tensor.detach()
            offsets[name] = list(item.tensor_data.chunk.offsets)
        results = []
        if tensors:
            results.append(self._write(plan.storage_data, tensors, offsets))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(
        self, file: str, tensors: dict[str, torch.Tensor], offsets: dict[str, list[int]]
    ) -> WriteResult:
        saved = {name: {"saved_offsets": first} for name, first in offsets.items()}
        metadata = {_OFFSETS: json.dumps(saved), "DCP_VERSION": "1.0"}
        # Every rank reads the counts of steps, which one has written: they are neighbours.
        by_size = dict(sorted(tensors.items(), key=lambda entry: entry[1].nbytes))
        content = segments(by_size, metadata)
        record = upload(self.folder / file, content, _BLOCK)
        self.records[file] = record
        head = content[0]
        assert isinstance(head, bytes)
        header = parse_header(head, record.size)
        return WriteResult(MetadataIndex(file), record.size, _rows(header))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: make the index."""
        for results_of_rank in results:
            for result in results_of_rank:
                self.index[result.index.fqn] = result.storage_data

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """False: torch never chooses this writer itself."""
        return False


class ShardReader(dcp.StorageReader):
    """Reads shards from objects.

    Args:
        folder: that has the objects, and knows their records.
    """

    def __init__(self, folder: BucketPath) -> None:
        self.folder = folder
        self._shards: dict[MetadataIndex, Shard] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing: a reader has one folder."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take what `read_metadata` has found."""
        self._shards = metadata.storage_data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors and where their shards are. They are looked up once."""
        key = (self.folder.key, INDEX)
        if key not in self.folder.cache:
            self.folder.cache[key] = _metadata(_index(self.folder))
        metadata: Metadata = self.folder.cache[key]
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan itself."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans themselves."""
        return plans

    def fetch(self, items: Iterable[ReadItem]) -> None:
        """Read and check the blocks that have these parts of tensors, unless that was done. They stay in memory."""
        blocks: set[tuple[BucketPath, int]] = set()
        for item in items:
            path, start, end = self._span(item)
            for number in _blocks(path, start, end):
                blocks.add((path, number))
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(_block, blocks))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan."""
        self.fetch(plan.items)
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            if target.numel():
                target.copy_(self._part(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _span(self, item: ReadItem) -> tuple[BucketPath, int, int]:
        """The rows of a shard that have this part: their object, their first byte in it, the first one behind."""
        shard = self._shards[item.storage_index]
        row = math.prod(shard.shape[1:]) * BY_NAME[shard.dtype].itemsize
        first = 0
        count = 1
        if shard.shape:
            first = item.storage_offsets[0]
            count = item.lengths[0]
        start = shard.start + first * row
        return self.folder / shard.file, start, start + count * row

    def _part(self, item: ReadItem) -> torch.Tensor:
        shard = self._shards[item.storage_index]
        path, start, end = self._span(item)
        pieces = []
        for number in _blocks(path, start, end):
            block = _block((path, number))
            offset = number * _record(path).block
            first = max(0, start - offset)
            pieces.append(block[first : end - offset])
        content = torch.cat(pieces)
        values = content.view(BY_NAME[shard.dtype])
        part = values.reshape(-1, *shard.shape[1:])
        for dimension in range(1, len(shard.shape)):
            first = item.storage_offsets[dimension]
            length = item.lengths[dimension]
            part = part.narrow(dimension, first, length)
        return part.reshape(item.lengths)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """False: torch never chooses this reader itself."""
        return False


def _index(folder: BucketPath) -> Index:
    """The index of a folder. Files that were copied from a local folder have none: it is made of their headers."""
    path = folder / INDEX
    if path.is_file():
        content = bytearray(path.size())
        with damage(path), BlockIO() as io:
            io.read(path, [memoryview(content)])
            index: Index = json_text.parse(content)
        return index
    paths = list(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(_THREADS) as pool:
        rows_of_files = pool.map(_rows_in, paths)
    names = [path.name for path in paths]
    return dict(zip(names, rows_of_files, strict=True))


def _rows_in(path: BucketPath) -> list[Any]:
    with damage(path):
        return _rows(read_header(path))


def _rows(header: Header) -> list[Any]:
    """The shards in a file, as the index has them."""
    saved = json_text.parse(header.metadata[_OFFSETS])
    rows = []
    for name, entry in header.entries.items():
        offsets = saved[name]["saved_offsets"]
        start = header.offset + entry.start
        rows.append((name, NAMES[entry.dtype], offsets, entry.shape, start))
    return rows


def _metadata(index: Index) -> Metadata:
    tensors: dict[str, Any] = {}
    shards: dict[MetadataIndex, Shard] = {}
    for file, rows in index.items():
        for row in rows:
            shard = Shard(file, *row)
            start = torch.Size(shard.offsets)
            shape = torch.Size(shard.shape)
            end = torch.Size(map(operator.add, start, shape))
            if shard.name not in tensors:
                properties = TensorProperties(BY_NAME[shard.dtype])
                tensors[shard.name] = TensorStorageMetadata(properties, end, [])
            tensor = tensors[shard.name]
            tensor.size = torch.Size(map(max, tensor.size, end))
            chunk = ChunkStorageMetadata(start, shape)
            tensor.chunks.append(chunk)
            shards[MetadataIndex(shard.name, start)] = shard
    return Metadata(tensors, storage_data=shards)


def _record(path: BucketPath) -> FileRecord:
    assert path.objects is not None
    record = path.objects[path.key]
    assert isinstance(record, FileRecord)
    return record


def _blocks(path: BucketPath, start: int, end: int) -> range:
    """The numbers of the blocks that have these bytes of an object."""
    size = _record(path).block
    return range(start // size, -(-end // size))


def _block(position: tuple[BucketPath, int]) -> torch.Tensor:
    """The bytes of a block of an object, which is read and checked unless that was done."""
    path, number = position
    key = (path.key, number)
    if key not in path.cache:
        record = _record(path)
        start = number * record.block
        content = bytearray(min(record.block, record.size - start))
        with damage(path):
            download(path, record, start, memoryview(content))
        path.cache[key] = torch.frombuffer(content, dtype=torch.uint8)
    block: torch.Tensor = path.cache[key]
    return block

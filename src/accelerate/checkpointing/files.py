# SPDX-License-Identifier: Apache-2.0
"""Files in large blocks, several at a time, with a CRC-32 of each block; safetensors files without a copy in between.

The safetensors format: eight bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from safetensors import safe_open

from ..core.bucket_path import BucketPath
from ..core.errors import CheckpointError
from ..core.files import O_BINARY, fsync_path, named_errors, open_regular, read_at, write_at
from ..core.json_text import JSONObject
from ..core.tensor_files import NAMES, CorruptFile, Header, read_header, saved_bytes, write_file
from ..core.trees import map_leaves

P = ParamSpec("P")
R = TypeVar("R")

BLOCK = 16 << 20  # bytes; a power of two, large enough that Python's part of the work vanishes
_IOV_MAX = 1000  # most systems take 1024 pieces in one call
_WINDOW = 256 << 20  # bytes of host memory used to carry tensors from an accelerator to the disk

# A piece of a file: bytes in host memory, or a tensor (any device, any strides).
Segment = memoryview | bytes | torch.Tensor


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and the CRC-32 of each of its blocks, as eight hexadecimal digits each."""

    size: int
    crc32: tuple[str, ...]
    block: int

    def to_json(self) -> JSONObject:
        """Return the record as plain data for a manifest."""
        return {"size": self.size, "block": self.block, "crc32": list(self.crc32)}

    @classmethod
    def from_json(cls, data: JSONObject) -> FileRecord:
        """The record of a manifest."""
        return cls(data["size"], tuple(data["crc32"]), data["block"])


def host_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied. Any dtype, any shape, writable."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def is_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes can be read or written where they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def nbytes(segment: Segment) -> int:
    """Return the size of a segment in bytes."""
    if isinstance(segment, torch.Tensor):
        return segment.nbytes
    return memoryview(segment).nbytes


class _Threads:
    """A few threads that work until `close`, also while the interpreter exits.

    The standard library's pools refuse new work then, and a background save must be finished.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        self._jobs.put(job)
        if len(self._started) < self._count:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._started.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            job()

    def close(self) -> None:
        for _ in self._started:
            self._jobs.put(None)
        for thread in self._started:
            thread.join()


class BlockIO:
    """A few threads that write, read and check files block by block. Use it as a context manager.

    CRC-32 and the system calls release the interpreter lock, so that two threads are enough to keep a disk busy.
    """

    def __init__(self) -> None:
        self._threads = max(2, min(4, (os.cpu_count() or 2) // 2))
        self._pool = _Threads(self._threads, "checkpoint-io")
        # Threads that only wait for the disk or a store. Syncs that run at the same time share one commit of the file
        # system.
        self._waiting = _Threads(8, "checkpoint-sync")
        self._held: list[int] = []  # descriptors of files that are read later

    def __enter__(self) -> BlockIO:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()
        self._waiting.close()
        while self._held:
            os.close(self._held.pop())

    def hold(self, path: Path) -> Path:
        """Another path of a regular file: it leads to the same file when `path` was replaced or removed.

        The file is open until the end of the block. Where the system names no open files, `path` itself is returned.
        """
        if isinstance(path, BucketPath):
            return path
        self._held.append(open_regular(path))
        held = Path(f"/dev/fd/{self._held[-1]}")
        if held.exists():
            return held
        return path

    def write(self, path: Path, segments: Sequence[Segment]) -> FileRecord:
        """Write a new file of these segments and sync it to the disk; its record. System errors pass through."""
        return self.write_all([(path, segments)])[0]

    def write_all(self, files: Sequence[tuple[Path, Sequence[Segment]]]) -> list[FileRecord]:
        """Write several new files side by side; their records in order.

        Tensors elsewhere than in contiguous host memory pass through at most 256 MiB of host memory (or one tensor).
        """
        if any(isinstance(path, BucketPath) for path, _ in files):
            uploads = [self._waiting.submit(upload, path, segments) for path, segments in files]
            _finish(uploads)
            return [job.result() for job in uploads]
        records = []
        syncing: list[Future[None]] = []
        for path, segments in files:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY, 0o666)
            try:
                with named_errors(path):
                    records.append(self._write_segments(descriptor, segments))
            except BaseException:
                os.close(descriptor)
                raise
            # One file is synced while the next is written.
            syncing.append(self._waiting.submit(_sync_and_close, descriptor, path))
        for job in syncing:
            job.result()
        return records

    def write_pickled(self, path: Path, value: object) -> FileRecord:
        """Write a new file with torch.save and sync it to the disk; its record."""
        if isinstance(path, BucketPath):
            return self.write(path, [saved_bytes(value)])
        write_file(value, path)
        return self.record(path)

    def _write_segments(self, descriptor: int, segments: Sequence[Segment]) -> FileRecord:
        jobs: list[Future[int]] = []
        size = 0
        try:
            for offset, pieces in _cut(_host_views(segments, jobs), BLOCK):
                jobs.append(self._pool.submit(_write_block, descriptor, offset, pieces))
                size = offset + sum(len(piece) for piece in pieces)
            return FileRecord(size, tuple(f"{job.result():08x}" for job in jobs), BLOCK)
        except BaseException:
            _cancel(jobs)
            raise

    def read(
        self, path: Path, targets: Sequence[memoryview], record: FileRecord | None = None
    ) -> None:
        """Fill `targets`, one after another, with the entire content of a file, and compare it with its record.

        Raises CorruptFile when the size or a checksum differs. What was read stays in the targets: pass memory that
        nothing depends on yet, or check the file first.
        """
        total = sum(len(view) for view in targets)
        if isinstance(path, BucketPath):
            if record is None and path.objects is not None:
                record = cast(FileRecord, path.objects[path.key])
            _finish(list(self._downloads(path, total, targets, record)))
            return
        block = record.block if record else BLOCK
        with _opened(path, total, record) as descriptor:
            jobs = []
            for index, (offset, pieces) in enumerate(_cut(targets, block)):
                want = record.crc32[index] if record else None
                jobs.append(self._pool.submit(_read_block, descriptor, offset, pieces, want))
            _finish(jobs)

    def _downloads(
        self,
        path: BucketPath,
        size: int,
        targets: Iterable[memoryview],
        record: FileRecord | None,
    ) -> Iterator[Future[None]]:
        if record is not None and size != record.size:
            raise CorruptFile(f"it has {size} bytes, but {record.size} were written")
        for index, (offset, pieces) in enumerate(_cut(targets, record.block if record else BLOCK)):
            want = record.crc32[index] if record else None
            yield self._waiting.submit(_download, path, offset, pieces, want)

    def copy(self, pairs: Iterable[tuple[memoryview, memoryview]]) -> None:
        """Copy each (source, target) of host memory, in blocks that whichever thread is free takes.

        torch's own copy starts its threads for every tensor and waits for each of them, which costs a multiple on a
        machine that is busy with data loading.
        """
        jobs = [
            self._pool.submit(_copy_block, source[at : at + BLOCK], target[at : at + BLOCK])
            for source, target in pairs
            for at in range(0, len(source), BLOCK)
        ]
        _finish(jobs)

    def check(self, path: Path, record: FileRecord) -> None:
        """Read a file and compare it with its record. Raises CorruptFile, or OSError when it cannot be read."""
        if isinstance(path, BucketPath):
            jobs = [
                self._waiting.submit(_check_object, path, record, index)
                for index in range(len(record.crc32))
            ]
            _finish(jobs)
            return
        with _opened(path, record.size, record) as descriptor:
            ahead = self._threads * record.block
            _fetch(descriptor, 0, ahead)
            checks = [
                self._pool.submit(
                    _check_block, descriptor, index * record.block, record.block, want, ahead
                )
                for index, want in enumerate(record.crc32)
            ]
            _finish(checks)

    def record(self, path: Path) -> FileRecord:
        """The record of a file that somebody else wrote; the file is synced to the disk."""
        if isinstance(path, BucketPath):
            content = path.read_bytes()
            blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
            return FileRecord(len(content), tuple(f"{zlib.crc32(b):08x}" for b in blocks), BLOCK)
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            jobs = [
                self._pool.submit(_check_block, descriptor, at, BLOCK, None)
                for at in range(0, size, BLOCK)
            ]
            fsync_path(path)
            return FileRecord(size, tuple(f"{job.result():08x}" for job in jobs), BLOCK)
        finally:
            os.close(descriptor)


def upload(path: Path, segments: Sequence[Segment], block: int = BLOCK) -> FileRecord:
    """Write an object of these segments, which are read as they are sent; its record."""
    assert isinstance(path, BucketPath)
    sums: list[str] = []

    def pieces() -> Iterator[memoryview]:
        for _, views in _cut(_host_views(segments, ()), block):
            sums.append(f"{_sum_of(views):08x}")
            yield from views

    size = sum(map(nbytes, segments))
    path.bucket.write(path.key, pieces(), size)
    return FileRecord(size, tuple(sums), block)


def _download(path: BucketPath, offset: int, pieces: list[memoryview], want: str | None) -> None:
    """Read a block of an object by one request, and compare it with `want` unless that is None."""
    size = sum(map(len, pieces))
    whole = pieces[0] if len(pieces) == 1 else memoryview(bytearray(size))
    path.read_at(offset, whole)
    if want is not None:
        _compare(zlib.crc32(whole), want, offset, offset + size)
    if len(pieces) > 1:
        start = 0
        for piece in pieces:
            piece[:] = whole[start : start + len(piece)]
            start += len(piece)


def download(path: BucketPath, record: FileRecord, start: int, target: memoryview) -> None:
    """Fill memory with blocks of an object, from the start of one on, and compare these with its record."""
    path.read_at(start, target)
    for offset in range(0, len(target), record.block):
        content = target[offset : offset + record.block]
        first = start + offset
        want = record.crc32[first // record.block]
        _compare(zlib.crc32(content), want, first, first + len(content))


def _check_object(path: BucketPath, record: FileRecord, index: int) -> None:
    start = index * record.block
    buffer = bytearray(min(record.block, record.size - start))
    download(path, record, start, memoryview(buffer))


def _host_views(segments: Sequence[Segment], jobs: Sequence[Future[int]]) -> Iterator[memoryview]:
    """The bytes of each segment. Copies are bounded: a full window waits for the jobs that write it."""
    copied = 0
    for segment in segments:
        if not isinstance(segment, torch.Tensor):
            yield memoryview(segment).cast("B")
            continue
        if not segment.numel():
            continue
        here = segment.detach()
        if not is_host(here):
            if copied and copied + nbytes(here) > _WINDOW:
                for job in jobs:
                    job.result()
                copied = 0
            copied += nbytes(here)
            here = here.to("cpu").resolve_conj().resolve_neg().contiguous()
        yield host_view(here)


def _cut(views: Iterable[memoryview], block: int) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset, pieces) of each block of the file that these views make up."""
    offset, used = 0, 0
    pieces: list[memoryview] = []
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + block - used]
            pieces.append(piece)
            start += len(piece)
            used += len(piece)
            if used == block:
                yield offset, pieces
                offset, used, pieces = offset + used, 0, []
    if pieces:
        yield offset, pieces


def _write_block(descriptor: int, offset: int, pieces: list[memoryview]) -> int:
    value = _sum_of(pieces)
    _transfer(write_at, descriptor, offset, pieces)
    return value


def _read_block(descriptor: int, offset: int, pieces: list[memoryview], want: str | None) -> None:
    end = _transfer(read_at, descriptor, offset, pieces)
    if want is not None:
        _compare(_sum_of(pieces), want, offset, end)


def _sum_of(pieces: list[memoryview]) -> int:
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value


def _transfer(
    call: Callable[..., int], descriptor: int, offset: int, pieces: list[memoryview]
) -> int:
    """Read or write all of the pieces, however many calls the system makes of it; the offset behind them."""
    for first in range(0, len(pieces), _IOV_MAX):
        chunk = pieces[first : first + _IOV_MAX]
        while chunk:
            done = call(descriptor, chunk, offset)
            if done == 0:
                raise CorruptFile(f"it ends at byte {offset}")
            offset += done
            while chunk and done >= len(chunk[0]):
                done -= len(chunk[0])
                chunk = chunk[1:]
            if chunk and done:
                chunk = [chunk[0][done:], *chunk[1:]]
    return offset


def _copy_block(source: memoryview, target: memoryview) -> None:
    # Numpy gives the interpreter lock away while it copies; a memoryview's own assignment does not.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _fetch(descriptor: int, offset: int, size: int) -> None:
    """Let the system read ahead in a file: it would take the reads of several threads for random access."""
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def _check_block(descriptor: int, offset: int, block: int, want: str | None, ahead: int = 0) -> int:
    """Return the CRC-32 of a block of the file, and compare it with `want` unless that is None.

    With `ahead`, the block that many bytes further on is fetched meanwhile.
    """
    if ahead:
        _fetch(descriptor, offset + ahead, block)
    value, at, end = 0, offset, offset + block
    buffer = memoryview(bytearray(min(block, 1 << 20)))
    while at < end:
        done = read_at(descriptor, [buffer[: end - at]], at)
        if done == 0:
            break
        value = zlib.crc32(buffer[:done], value)
        at += done
    if want is not None:
        _compare(value, want, offset, at)
    return value


def _compare(value: int, want: str, start: int, end: int) -> None:
    if value != int(want, 16):
        raise CorruptFile(
            f"bytes {start} to {end} have changed: their checksum is {value:08x} and was {want} "
            "when they were saved"
        )


def _finish(jobs: Sequence[Future[Any]]) -> None:
    try:
        for job in jobs:
            job.result()
    except BaseException:
        _cancel(jobs)
        raise


def _cancel(jobs: Sequence[Future[Any]]) -> None:
    """No job is left running on a descriptor that is about to be closed."""
    for job in jobs:
        if not job.cancel():
            job.exception()


def _sync_and_close(descriptor: int, path: Path) -> None:
    try:
        with named_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(path: Path, size: int, record: FileRecord | None) -> Iterator[int]:
    """A descriptor for reading a file whose size is as expected."""
    descriptor = open_regular(path)
    try:
        found = os.fstat(descriptor).st_size
        want = record.size if record else size
        if found != want or size != want:
            raise CorruptFile(f"it has {found} bytes, but {want} were written")
        yield descriptor
    finally:
        os.close(descriptor)


# What identifies the values of a tensor: see `memory_of`.
Memory = tuple[object, ...]


def only_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The entries of a state that are tensors."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def memory_of(tensor: torch.Tensor) -> Memory:
    """Equal for two tensors that are the same values in the same memory. Empty and meta tensors are their own."""
    if hasattr(tensor, "to_local"):  # a DTensor has no memory but its shard's
        return (tuple(tensor.shape), *memory_of(tensor.to_local()))
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return (id(tensor),)
    # A conjugate or negative view has the memory of its base, and other values.
    views = (tensor.is_conj(), tensor.is_neg())
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        *views,
    )


def require_plain_tensor(tensor: torch.Tensor, path: str) -> None:
    """CheckpointError for a tensor that a safetensors file cannot hold as it is."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{path}: a tensor of type {kind.__module__}.{kind.__qualname__} ({tensor.layout}) cannot be saved. "
            "Convert it to a dense torch.Tensor in `state_dict()` (for a DTensor: `full_tensor()`)."
        )
    if tensor.is_quantized or tensor.device.type == "meta":
        if tensor.is_quantized:
            what = "quantized"
        else:
            what = "on the meta device and does not have values"
        raise CheckpointError(f"{path}: the tensor is {what} and cannot be saved")


def without_aliases(
    state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors that are memories of their own, {alias: name}) of a state whose tied tensors stand in it twice."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Memory, str] = {}
    for name, tensor in state.items():
        first = seen.setdefault(memory_of(tensor), name)
        if first == name:
            kept[name] = tensor
        else:
            aliases[name] = first
    return kept, aliases


def with_own_storages(value: Any) -> Any:
    """The same data for torch.save, which writes the whole storage of a tensor: views of a part of one are copied."""
    copies: dict[Memory, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        is_plain = (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.device.type != "meta"
        )
        if not is_plain or tensor.nbytes >= tensor.untyped_storage().nbytes():
            return tensor
        memory = memory_of(tensor)
        if memory not in copies:
            copies[memory] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[memory]

    return map_leaves(copied, value)


def segments(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> list[Segment]:
    """The bytes of a safetensors file of these tensors: its header, then the tensors themselves, not copied."""
    for name, tensor in tensors.items():
        require_plain_tensor(tensor, name)
    ordered = in_file_order(tensors)
    return [file_head(ordered, metadata), *ordered.values()]


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The widest first, as the format's own writer has them: each starts at a multiple of its width."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def file_head(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What stands before the bytes of these tensors, which follow in this order. They may be on the meta device."""
    header: JSONObject = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name}: a safetensors file cannot store a tensor of dtype {tensor.dtype}"
            )
        size = tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(
    io: BlockIO, path: Path, record: FileRecord | None = None
) -> dict[str, torch.Tensor]:
    """All tensors of a file in new host memory of their own, the file checked against its record in the same reading.

    Raises CorruptFile.
    """
    header = read_header(path)
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in header.entries.items()
    }
    _read(io, path, header, tensors, record)
    return tensors


def read_into(io: BlockIO, path: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors that exist from a file that was checked before, and that has these tensors and no others.

    If all of it is contiguous host memory it is read in place.
    """
    if all(map(is_host, targets.values())):
        _read(io, path, read_header(path), targets)
        return
    with torch.no_grad(), safe_open(path, framework="pt") as file:
        for name, target in targets.items():
            target.copy_(file.get_tensor(name))


def _read(
    io: BlockIO,
    path: Path,
    header: Header,
    tensors: Mapping[str, torch.Tensor],
    record: FileRecord | None = None,
) -> None:
    ordered = sorted(header.entries, key=lambda name: header.entries[name].start)
    views = [host_view(tensors[name]) for name in ordered if tensors[name].numel()]
    io.read(path, [memoryview(bytearray(header.offset)), *views], record)

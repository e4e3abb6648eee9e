# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written from and read into memory that is there already, with no copy in between.

The safetensors format: eight bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from ..core import json_text
from ..core.dtypes import BY_NAME, NAMES
from ..core.errors import CheckpointError
from ..core.files import open_regular
from ..core.json_text import JSONObject
from .blocks import BlockIO, CorruptFile, FileRecord, Segment, host_view, is_host
from .codec import Memory, memory_of, require_plain_tensor

_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
# Metadata key of ours: {alias: name} of tensors that are one memory and are stored once.
ALIASES = "accelerate.aliases"


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor stands in a file: `start` and `end` are bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    offset: int  # bytes before the first tensor

    @property
    def aliases(self) -> dict[str, str]:
        """{alias: name of the stored tensor}. Other writers store them as plain metadata entries."""
        if ALIASES in self.metadata:
            return {str(alias): str(name) for alias, name in json_text.parse(self.metadata[ALIASES]).items()}
        return {
            key: value
            for key, value in self.metadata.items()
            if value in self.entries and key not in self.entries and key != "format"
        }


def only_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The entries of a state that are tensors."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def without_aliases(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
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


def segments(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> list[Segment]:
    """The bytes of a safetensors file of these tensors: its header, then the tensors themselves, not copied."""
    for name, tensor in tensors.items():
        require_plain_tensor(tensor, name)
    ordered = sorted(tensors.items(), key=lambda item: widest_first(item[1]))
    return [file_head(dict(ordered), metadata), *(tensor for _, tensor in ordered)]


def widest_first(tensor: torch.Tensor) -> int:
    """The sort key of a file's tensors: as the format's own writer has it, each starts at a multiple of its width."""
    return -tensor.element_size()


def file_head(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """What stands before the bytes of these tensors, which follow in this order. They may be on the meta device."""
    header: JSONObject = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{name}: a tensor of dtype {tensor.dtype} has no place in a safetensors file")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """What a file holds. Raises CorruptFile for anything that is not a safetensors file."""
    with open(open_regular(path), "rb") as file:
        total = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(total - 8, _HEADER_LIMIT):
            raise CorruptFile("it is not a safetensors file, or it is cut short")
        text = file.read(length)
    try:
        data = json_text.parse(text)
        metadata = {str(key): str(value) for key, value in (data.pop("__metadata__", None) or {}).items()}
        entries = {name: _entry(row) for name, row in data.items()}
        header = Header(entries, metadata, 8 + length)
        foreign = [alias for alias, name in header.aliases.items() if name not in entries or alias in entries]
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        why = error if isinstance(error, json_text.JSONTextError) else repr(error)
        raise CorruptFile(f"its safetensors header cannot be read ({why})") from error
    if foreign:
        raise CorruptFile(f"its header has {foreign[0][:80]} as another name of a tensor that it does not hold")
    _check_entries(entries, total - 8 - length)
    return header


def _entry(row: JSONObject) -> TensorEntry:
    start, end = row["data_offsets"]
    numbers = (start, end, *row["shape"])
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"{str(row)[:100]} holds what is no size")
    return TensorEntry(BY_NAME[row["dtype"]], tuple(row["shape"]), start, end)


def _check_entries(entries: Mapping[str, TensorEntry], size: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        size_of = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.start != at or entry.end - entry.start != size_of:
            raise CorruptFile(f"its header places the tensor {name} wrongly")
        at = entry.end
    if at != size:
        raise CorruptFile(f"it holds {size} bytes of tensors where its header names {at}")


def read_tensors(io: BlockIO, path: Path, record: FileRecord | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a file in new host memory of their own, the file checked against its record in the same reading.

    Aliases are tensors of the same memory. Raises CorruptFile.
    """
    header = read_header(path)
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in header.entries.items()}
    _read(io, path, header, tensors, record)
    for alias, name in header.aliases.items():
        tensors[alias] = tensors[name]
    return tensors


def read_into(io: BlockIO, path: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors that exist from a file that was checked before and that holds each of them in its shape.

    Contiguous host memory of the same dtype is read in place; anything else goes through one tensor of host memory.
    """
    header = read_header(path)
    wanted: dict[str, list[torch.Tensor]] = {}
    for name, target in targets.items():
        wanted.setdefault(header.aliases.get(name, name), []).append(target)
    entries = header.entries
    direct = {
        name: group[0] for name, group in wanted.items() if is_host(group[0]) and group[0].dtype == entries[name].dtype
    }
    with torch.no_grad():
        if len(direct) == len(entries):
            _read(io, path, header, direct, None)
        else:
            _read_some(path, header, wanted, direct)
        for group in wanted.values():
            for other in group[1:]:
                if memory_of(other) != memory_of(group[0]):
                    other.copy_(group[0])


def _read_some(
    path: Path, header: Header, wanted: Mapping[str, list[torch.Tensor]], direct: Mapping[str, torch.Tensor]
) -> None:
    with open(open_regular(path), "rb", buffering=0) as file:
        for name in sorted(wanted, key=lambda name: header.entries[name].start):
            if name in direct:
                _read_one(file, header, name, direct[name])
                continue
            entry = header.entries[name]
            staging = torch.empty(entry.shape, dtype=entry.dtype)
            _read_one(file, header, name, staging)
            wanted[name][0].copy_(staging)


def _read(
    io: BlockIO, path: Path, header: Header, tensors: Mapping[str, torch.Tensor], record: FileRecord | None
) -> None:
    ordered: Iterable[str] = sorted(header.entries, key=lambda name: header.entries[name].start)
    views = [host_view(tensors[name]) for name in ordered if tensors[name].numel()]
    io.read(path, [memoryview(bytearray(header.offset)), *views], record)


def _read_one(file: FileIO, header: Header, name: str, target: torch.Tensor) -> None:
    if not target.numel():
        return
    view = host_view(target)
    file.seek(header.offset + header.entries[name].start)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CorruptFile(f"it ends inside the tensor {name}")
        done += count

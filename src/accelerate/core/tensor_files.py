# SPDX-License-Identifier: Apache-2.0
"""Files of tensors that others may have edited: the header of safetensors, read with care, and torch.save."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from . import json_text
from .files import atomic_write, named_errors, read_range, require_regular
from .json_text import JSONObject

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
BY_NAME = {name: dtype for dtype, name in NAMES.items()}
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_HEAD = 1 << 18  # bytes of a file that are read at first, for most headers
# Metadata key of ours: {alias: name} of tensors that are one memory and are stored once.
ALIASES = "accelerate.aliases"


class CorruptFile(Exception):
    """A file that is not what it should be. The message reports how, without the name of the file."""


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
            return {
                str(alias): str(name)
                for alias, name in json_text.parse(self.metadata[ALIASES]).items()
            }
        return {
            key: value
            for key, value in self.metadata.items()
            if value in self.entries and key not in self.entries and key != "format"
        }


def read_header(path: str | os.PathLike[str]) -> Header:
    """What a file holds. Raises CorruptFile for anything that is not a safetensors file."""
    total = require_regular(path)
    content = read_range(path, 0, min(total, _HEAD))
    length = 8 + int.from_bytes(content[:8], "little")
    if len(content) < length <= min(total, _HEADER_LIMIT):
        content = read_range(path, 0, length)
    return parse_header(content, total)


def parse_header(content: bytes | bytearray, total: int) -> Header:
    """What a file of `total` bytes holds that begins with `content`. Raises CorruptFile as `read_header` does."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length:
        raise CorruptFile("it is not a safetensors file, or it is truncated")
    text = content[8 : 8 + length]
    try:
        data = json_text.parse(text)
        metadata = {
            str(key): str(value) for key, value in (data.pop("__metadata__", None) or {}).items()
        }
        entries = {name: _entry(row) for name, row in data.items()}
        header = Header(entries, metadata, 8 + length)
        foreign = [
            alias
            for alias, name in header.aliases.items()
            if name not in entries or alias in entries
        ]
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        why = error if isinstance(error, json_text.JSONTextError) else repr(error)
        raise CorruptFile(f"its safetensors header cannot be read ({why})") from error
    if foreign:
        raise CorruptFile(
            f"its header names {foreign[0][:80]} as an alias of a tensor that the file does not "
            "contain"
        )
    _check_entries(entries, total - 8 - length)
    return header


def _entry(row: JSONObject) -> TensorEntry:
    start, end = row["data_offsets"]
    numbers = (start, end, *row["shape"])
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"{str(row)[:100]} contains a value that is not a size")
    return TensorEntry(BY_NAME[row["dtype"]], tuple(row["shape"]), start, end)


def _check_entries(entries: Mapping[str, TensorEntry], size: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        size_of = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.start != at or entry.end - entry.start != size_of:
            raise CorruptFile(f"its header has a wrong position for the tensor {name}")
        at = entry.end
    if at != size:
        raise CorruptFile(f"it contains {size} bytes of tensors, but its header declares {at}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without its prefix, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: object) -> torch.dtype:
    """Any torch dtype by its name. Raises ValueError where there is none."""
    if isinstance(name, str):
        found = getattr(torch, name, None)
    else:
        found = None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{str(name)[:80]!r} is not a dtype of this torch version")
    return found


def tensor_dtype(name: object) -> torch.dtype:
    """The dtype of a tensor in a document. Torch ends the process for tensors of some dtypes that it cannot read."""
    found = torch_dtype(name)
    if found not in NAMES:
        raise ValueError(f"tensors of dtype {name} cannot be saved")
    return found


# What torch's reader of plain data raises for files that were changed or cut short.
READ_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
    MemoryError,
    struct.error,
    zlib.error,
)


def write_file(value: object, path: str | os.PathLike[str]) -> None:
    """Write a file with torch.save. Raises OSError where it cannot be written, as for a full disk."""
    with named_errors(path):
        try:
            # For a path, torch raises a RuntimeError about the place in the file.
            with open(path, "wb") as file:
                torch.save(value, file)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None


def saved_bytes(value: object) -> memoryview:
    """What `write_file` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def write_atomically(value: object, path: str | os.PathLike[str]) -> None:
    """Write a file with torch.save that appears complete or not at all."""
    with atomic_write(path) as file:
        torch.save(value, file)

# SPDX-License-Identifier: Apache-2.0
"""Documents of a checkpoint: JSON with its tensors in a safetensors file next to it, checked when they are read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..core import json_text
from ..core.errors import CheckpointError
from ..core.safetensors_header import CorruptFile, read_header
from .blocks import BlockIO, Segment
from .codec import MALFORMED, TensorSink, decode, encode
from .manifest import CorruptCheckpoint, Manifest, reason
from .tensorfile import read_into, read_tensors, segments


def documents(name: str, value: object, root: str, inline: int = 64) -> dict[str, list[Segment]]:
    """{file name: segments} of a JSON document, and of a tensor file if the value contains tensors."""
    sink = TensorSink(inline)
    text = json.dumps(encode(value, sink, root), separators=(",", ":"), allow_nan=False).encode()
    files: dict[str, list[Segment]] = {f"{name}.json": [text]}
    if sink.tensors:
        files[f"{name}.safetensors"] = segments(sink.tensors)
    return files


def read_document(
    io: BlockIO, folder: Path, name: str, manifest: Manifest, unshare: bool = False
) -> Any:
    """The value that `documents` wrote, its files checked against the manifest in the same reading."""
    with damage(folder / f"{name}.json"):
        text = _read_text(io, folder, name, manifest)
    path = folder / f"{name}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    if path.name in manifest.files:
        with damage(path):
            tensors = read_tensors(io, path, manifest.files[path.name])
    with damage(folder / f"{name}.json"):
        return decode(json_text.parse(text), tensors, str(folder / f"{name}.json"), unshare)


def read_document_into(
    io: BlockIO, folder: Path, name: str, manifest: Manifest, current: object, root: str
) -> Callable[[], object]:
    """Do the same as `read_document` in two steps: check the files now, and return a function that reads them.

    The function returns the saved value. It reads tensors into those of the `current` value if that has a tensor of
    the same shape and dtype at the same place.
    """
    path = folder / f"{name}.safetensors"
    sink = TensorSink()
    encode(current, sink, root)
    if not sink.tensors or path.name not in manifest.files:
        value = read_document(io, folder, name, manifest, unshare=True)
        return lambda: value
    with damage(folder / f"{name}.json"):
        data = json_text.parse(_read_text(io, folder, name, manifest))
    with damage(path):
        held = io.hold(path)
        io.check(held, manifest.files[path.name])
        entries = read_header(held).entries

    def read() -> Any:
        targets = {}
        for key, entry in entries.items():
            mine = sink.tensors.get(key)
            if mine is None or mine.dtype != entry.dtype or tuple(mine.shape) != entry.shape:
                mine = torch.empty(entry.shape, dtype=entry.dtype)
            targets[key] = mine
        with damage(path):
            read_into(io, held, targets)
        with damage(folder / f"{name}.json"):
            return decode(data, targets, str(folder / f"{name}.json"), unshare=True)

    return read


def _read_text(io: BlockIO, folder: Path, name: str, manifest: Manifest) -> bytearray:
    record = manifest.files.get(f"{name}.json")
    if record is None:
        raise CorruptCheckpoint(f"{folder} holds no {name}.json")
    text = bytearray(record.size)
    io.read(folder / f"{name}.json", [memoryview(text)], record)
    return text


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Convert errors from reading a damaged file to a CorruptCheckpoint that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except (CorruptFile, OSError, *MALFORMED) as error:
        if isinstance(error, KeyError):
            why = f"it has no entry {error}"
        else:
            why = reason(error)[:500]
        raise CorruptCheckpoint(f"{path} is damaged: {why}") from error

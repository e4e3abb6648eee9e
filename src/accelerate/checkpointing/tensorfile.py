# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written from and read into memory that is there already, with no copy in between.

The safetensors format: eight bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..core.dtypes import NAMES
from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from ..core.safetensors_header import Header, read_header
from ..core.trees import map_leaves
from .blocks import BlockIO, FileRecord, Segment, host_view, is_host

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
            what = "on the meta device, so it has no values"
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
    ordered = sorted(tensors.items(), key=lambda item: widest_first(item[1]))
    return [file_head(dict(ordered), metadata), *(tensor for _, tensor in ordered)]


def widest_first(tensor: torch.Tensor) -> int:
    """The sort key of a file's tensors: as the format's own writer has it, each starts at a multiple of its width."""
    return -tensor.element_size()


def file_head(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What stands before the bytes of these tensors, which follow in this order. They may be on the meta device."""
    header: JSONObject = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name}: a tensor of dtype {tensor.dtype} has no place in a safetensors file"
            )
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

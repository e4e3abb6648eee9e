# SPDX-License-Identifier: Apache-2.0
"""Many tensors of any dtype as one contiguous row of bytes, and back: so a nested value travels as one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core import trees

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Segment:
    """The tensors of one dtype in a row of bytes: where they stand in the value, and where in the row."""

    dtype: torch.dtype
    places: list[int]
    sizes: list[int]
    start: int
    stop: int


def collect(data: Any, operation: str) -> list[torch.Tensor]:
    """The tensors of nested `data` in order.

    Raises TypeError, naming `operation`, for a value that is neither tensor nor container, and for a tensor whose
    content is not one dense block (sparse, nested, sharded over ranks).
    """
    if type(data) in PLAIN:
        found = [data]
    else:
        found = []
        trees.map_leaves(found.append, data, strict=operation)
    for leaf in found:
        if leaf.layout is not torch.strided or leaf.is_nested or type(leaf) not in PLAIN:
            found = [plain(leaf, operation) for leaf in found]
            break
    return found


def plain(leaf: torch.Tensor, operation: str) -> torch.Tensor:
    """`leaf` without the subclass that only decorates it; TypeError where its content is not one dense block."""
    if leaf.is_nested:
        raise TypeError(
            f"{operation} takes dense tensors; it was given a nested one: pad it first (`to_padded_tensor`)"
        )
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"{operation} takes dense tensors; it was given one of layout {leaf.layout}: call `.to_dense()`"
        )
    if isinstance(leaf, DTensor):
        raise TypeError(
            f"{operation} takes plain tensors; it was given a DTensor: call `.full_tensor()` or `.to_local()`"
        )
    if is_traceable_wrapper_subclass(leaf):
        raise TypeError(
            f"{operation} takes plain tensors; it was given a {type(leaf).__qualname__}: dequantize it first"
        )
    return leaf if type(leaf) in PLAIN else leaf.as_subclass(torch.Tensor)


def lone_device(leaves: Sequence[torch.Tensor]) -> torch.device | None:
    """The device that all `leaves` share, or None."""
    first = leaves[0].device
    return first if all(leaf.device == first for leaf in leaves) else None


def segments_of(leaves: Sequence[torch.Tensor], sizes: Sequence[int] | None = None) -> tuple[list[Segment], int]:
    """How `leaves` are laid out in a row of bytes, and the row's length.

    Wide dtypes come first, so that each segment is aligned to its own width without a gap; the length is a multiple
    of the widest, so that rows stacked on each other stay aligned. `sizes` replaces the numbers of elements.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(place)
    order = sorted(by_dtype, key=_width, reverse=True) if len(by_dtype) > 1 else list(by_dtype)
    segments = []
    stop = 0
    for dtype in order:
        places = by_dtype[dtype]
        counts = [leaves[place].numel() if sizes is None else sizes[place] for place in places]
        start, stop = stop, stop + sum(counts) * dtype.itemsize
        segments.append(Segment(dtype, places, counts, start, stop))
    return segments, aligned(stop, order[0].itemsize if order else 1)


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def aligned(length: int, width: int) -> int:
    """`length` rounded up to a multiple of `width`."""
    return -(-length // width) * width


def pack(
    leaves: Sequence[torch.Tensor], segments: Sequence[Segment], length: int, device: torch.device | None = None
) -> torch.Tensor:
    """The bytes of `leaves` as one row of `length`, laid out as `segments` say, on `device`.

    A lone contiguous tensor is not copied: the row shares its memory.
    """
    with torch.no_grad():
        parts = []
        for segment in segments:
            members = [readable(leaves[place], device) for place in segment.places]
            # One tensor: a view where it is contiguous, its one copy where it is not.
            joined = members[0].reshape(-1) if len(members) == 1 else _flatten_dense_tensors(members)
            parts.append(joined.view(torch.uint8))
        filled = segments[-1].stop if segments else 0
        if filled < length:
            parts.append(torch.zeros(length - filled, dtype=torch.uint8, device=parts[0].device))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def readable(leaf: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """`leaf` on `device`, with a pending conjugation or negation done: bytes are read as they lie."""
    leaf = leaf.detach()
    if leaf.is_neg() or leaf.is_conj():
        leaf = leaf.resolve_conj().resolve_neg()
    return leaf if device is None else leaf.to(device)


def unpack(row: torch.Tensor, segments: Sequence[Segment], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of one row of bytes, with the shapes of `leaves`; they share the row's memory."""
    found: list[Any] = [None] * len(leaves)
    for segment in segments:
        likes = [leaves[place] for place in segment.places]
        flat = row[segment.start : segment.stop].view(segment.dtype)
        for place, tensor in zip(segment.places, _unflatten_dense_tensors(flat, likes), strict=True):
            found[place] = tensor
    return found


def unpack_stacked(
    rows: torch.Tensor, segments: Sequence[Segment], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors of `rows` (one row of bytes a rank), each joined over the ranks along dimension 0.

    A tensor without dimensions becomes one of dimension 1 with an element a rank.
    """
    world = rows.shape[0]
    found: list[Any] = [None] * len(leaves)
    for segment in segments:
        part = rows[:, segment.start : segment.stop].view(segment.dtype)
        pieces = torch.split_with_sizes(part, segment.sizes, 1)
        for place, piece in zip(segment.places, pieces, strict=True):
            found[place] = piece.reshape(stacked_shape(leaves[place].shape, world))
    return found


def stacked_shape(shape: torch.Size, world: int) -> tuple[int, ...]:
    return (world * shape[0], *shape[1:]) if shape else (world,)


def join(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new flat tensor with the elements of `leaves`, which share one dtype. Gradients flow through it."""
    resolved = [leaf.resolve_conj().resolve_neg() for leaf in leaves]
    if len(resolved) == 1:
        return resolved[0].clone(memory_format=torch.contiguous_format).view(-1)
    joined: torch.Tensor = _flatten_dense_tensors(resolved)
    return joined


def part(flat: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`flat`, made by `join`, as tensors with the shapes of `leaves`, which share its memory."""
    if len(leaves) == 1:
        return (flat.view(leaves[0].shape),)
    return tuple(_unflatten_dense_tensors(flat, leaves))

# SPDX-License-Identifier: Apache-2.0
"""Many tensors of any dtype as one contiguous row of bytes, and back: so a nested value travels as one message."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import trees
from ..core.modules import is_dtensor, is_wrapper_subclass
from ..runtime.channel import signature

# Keys whose text is their value; of any other key the type is compared.
_PRINTED = frozenset({str, int, float, bool, bytes, type(None)})
PLAIN = (Tensor, torch.nn.Parameter)
# torch's stubs know only the form of this function that fills tensors given to it.
_split_copy: Any = torch.split_with_sizes_copy

# What the layout of a row follows from: shape and dtype of each tensor.
Specs = tuple[tuple[torch.Size, torch.dtype], ...]


def collect(data: object, operation: str) -> list[Tensor]:
    """The tensors of nested `data` in order, `checked`. Raises TypeError for what is neither tensor nor container."""
    return checked(tensors_in(data, operation), operation)


def tensors_in(data: object, operation: str, outline: list[Any] | None = None) -> list[Tensor]:
    """The tensors of nested `data` in order, none of a subclass. `outline` is filled with the keys of its mappings.

    Raises TypeError, naming `operation`, for a value that is neither tensor nor container, and for a tensor of a kind
    that is not a plain one.
    """
    if outline is None:
        outline = []
    leaves: list[Tensor] = []
    _collect(data, leaves, operation, outline)
    return leaves


def _collect(
    data: Any,
    leaves: list[Tensor],
    operation: str,
    outline: list[Any],
) -> None:
    # The common containers are walked without being rebuilt: this is on the path of every operation.
    kind = type(data)
    if kind in PLAIN:
        leaves.append(data)
        return
    if kind is dict:
        outline.append(tuple(data))
        for value in data.values():
            _collect(value, leaves, operation, outline)
        return
    if kind is list or kind is tuple:
        for value in data:
            _collect(value, leaves, operation, outline)
        return
    if isinstance(data, Mapping):
        outline.append(tuple(data))

    def append(leaf: Tensor) -> None:
        leaves.append(plain(leaf, operation))

    trees.map_leaves(append, data, strict=operation)


def checked(leaves: list[Tensor], operation: str) -> list[Tensor]:
    """`leaves`; TypeError for one whose content is not one dense block."""
    for leaf in leaves:
        if leaf.layout is not torch.strided or leaf.is_nested:
            plain(leaf, operation)
    return leaves


def plain(leaf: Tensor, operation: str) -> Tensor:
    """`leaf` without the subclass that only decorates it; TypeError where its content is not one dense block."""
    is_dense = leaf.layout is torch.strided and not leaf.is_nested
    if not is_dense or is_dtensor(leaf) or is_wrapper_subclass(leaf):
        raise TypeError(
            f"{operation} takes dense, plain tensors, but got a {type(leaf).__qualname__} of "
            f"layout {leaf.layout} (nested: {leaf.is_nested}): convert it first"
        )
    if type(leaf) in PLAIN:
        return leaf
    return leaf.as_subclass(Tensor)


def signature_of(
    operation: str,
    leaves: Sequence[Tensor],
    outline: Sequence[object],
    *facts: object,
) -> bytes:
    """What must be the same on every rank in a call on `leaves`: operation, keys, dtypes, shapes, and `facts`."""
    keys = keys_of(outline)
    specs = specs_of(leaves)
    return signature(operation, keys, specs, facts)


def keys_in(data: object) -> list[Any]:
    """The keys of the mappings in nested `data`, whatever else is in it."""
    outline: list[Any] = []
    values: Any = ()
    if isinstance(data, Mapping):
        keys = tuple(data)
        outline.append(keys)
        values = data.values()
    elif isinstance(data, (list, tuple)):
        values = data
    for value in values:
        keys_below = keys_in(value)
        outline.extend(keys_below)
    return outline


def keys_of(outline: Sequence[Any]) -> tuple[Any, ...]:
    """The keys of mappings in a form whose repr is the same in every process."""
    printed = []
    for keys in outline:
        printed.append(tuple([_printed(key) for key in keys]))
    return tuple(printed)


def _printed(key: object) -> Any:
    kind = type(key)
    if kind in _PRINTED:
        return key
    return kind.__qualname__


def lone_device(leaves: Sequence[Tensor]) -> torch.device | None:
    """The device that all `leaves` share, or None."""
    if not leaves:
        return None
    first = leaves[0].device
    for leaf in leaves:
        if leaf.device != first:
            return None
    return first


def specs_of(leaves: Sequence[Tensor]) -> Specs:
    """The shape and dtype of each tensor."""
    return tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


@functools.lru_cache(maxsize=256)
def sizes_of(specs: Specs) -> list[int]:
    """The number of bytes of each tensor."""
    return [shape.numel() * dtype.itemsize for shape, dtype in specs]


@functools.lru_cache(maxsize=256)
def stacked_likes(specs: Specs, world: int) -> list[Tensor]:
    """Tensors, without content, of the shapes that joining over `world` ranks gives: `view_as` is the fastest view."""
    return [torch.empty(stacked_shape(shape, world), device="meta") for shape, _ in specs]


def stacked_shape(shape: torch.Size, world: int) -> tuple[int, ...]:
    """The shape after joining along dimension 0 over `world` ranks."""
    if shape:
        return (world * shape[0], *shape[1:])
    return (world,)


def aligned(length: int, width: int) -> int:
    """`length` rounded up to a multiple of `width`."""
    return -(-length // width) * width


def as_bytes(leaf: Tensor, device: torch.device | None = None) -> Tensor:
    """The content of `leaf` as contiguous bytes on `device`. It shares the memory where no copy is needed."""
    if leaf.is_neg() or leaf.is_conj():
        # Apply a lazy conjugation or negation, since the bytes are read from memory.
        leaf = leaf.resolve_conj().resolve_neg()
    if device is not None:
        leaf = leaf.to(device)
    flat = leaf.contiguous().view(-1)
    if flat.stride(0) != 1:
        # A single element may have the stride of its view, with which torch refuses to view it as bytes.
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def pack(leaves: Sequence[Tensor], device: torch.device | None = None, length: int = 0) -> Tensor:
    """The bytes of `leaves` in one row on `device`, padded with zeros to `length`.

    A single contiguous tensor is not copied: the row shares its memory.
    """
    with torch.no_grad():
        pieces = [as_bytes(leaf, device) for leaf in leaves]
        if length:
            missing = length - sum(piece.numel() for piece in pieces)
            padding = torch.zeros(missing, dtype=torch.uint8, device=pieces[0].device)
            pieces.append(padding)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces)


def unpack(row: Tensor, specs: Specs) -> list[Tensor]:
    """The tensors that `pack` has put into a row."""
    sizes = sizes_of(specs)
    pieces = _split_copy(row, sizes)
    values = []
    for piece, (shape, dtype) in zip(pieces, specs, strict=True):
        value = piece.view(dtype)
        values.append(value.view(shape))
    return values


def unpack_stacked(rows: Tensor, specs: Specs) -> list[Tensor]:
    """The tensors of `rows` (one row of bytes a rank), each joined over the ranks along dimension 0.

    A tensor without dimensions becomes one of dimension 1 with an element a rank.
    """
    sizes = sizes_of(specs)
    pieces = _split_copy(rows, sizes, 1)
    if 0 in sizes:
        # An empty piece keeps a stride of one byte a rank, of which no wider dtype can be viewed.
        pieces = [piece.view(-1) for piece in pieces]
    ranks = rows.shape[0]
    likes = stacked_likes(specs, ranks)
    values = []
    for piece, (_, dtype), like in zip(pieces, specs, likes, strict=True):
        value = piece.view(dtype)
        values.append(value.view_as(like))
    return values


def replace(data: object, values: Sequence[Tensor]) -> Any:
    """`data` with the tensors that `collect` found replaced, in order, by `values`."""
    return _replace(data, iter(values))


def _replace(data: Any, values: Iterator[Tensor]) -> Any:
    kind = type(data)
    if kind in PLAIN:
        return next(values)
    if kind is dict:
        return {key: _replace(value, values) for key, value in data.items()}
    if kind is list:
        return [_replace(value, values) for value in data]
    if kind is tuple:
        return tuple([_replace(value, values) for value in data])
    return trees.map_leaves(lambda _: next(values), data)


def join(leaves: Sequence[Tensor]) -> Tensor:
    """A new flat tensor with the elements of `leaves`, which share one dtype. Gradients flow through it."""
    pieces = []
    for leaf in leaves:
        resolved = leaf.resolve_conj().resolve_neg()
        pieces.append(resolved.reshape(-1))
    # Copies also where there is one.
    return torch.cat(pieces)


def part(flat: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """`flat`, made by `join`, as tensors with the shapes of `leaves`, which share its memory."""
    values = []
    start = 0
    for leaf in leaves:
        stop = start + leaf.numel()
        # Not `split`, whose outputs autograd lets nobody change in place.
        piece = flat[start:stop]
        values.append(piece.view(leaf.shape))
        start = stop
    return values

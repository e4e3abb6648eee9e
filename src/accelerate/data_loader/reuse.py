# SPDX-License-Identifier: Apache-2.0
"""Sources that yield the same memory again: their elements are copied, because several are read before one is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..core import trees

_NONE: Any = object()


def separated(elements: Iterator[Any]) -> Iterator[Any]:
    """`elements`, each of which stays as it is when the next ones are read.

    A plain loop uses an element before it requests the next one, so a source may yield one buffer again and again.
    The first element is copied, and all others if the second one has memory of the first.
    """
    first = next(elements, _NONE)
    if first is _NONE:
        return
    try:
        copy = [_copied(first)]
    except TypeError:
        # A container that cannot be made again from its values.
        yield first
        yield from elements
        return
    yield copy.pop()
    second = [next(elements, _NONE)]
    if second[0] is _NONE:
        return
    shares = _share(first, second[0])
    del first
    if shares:
        yield _copied(second.pop())
        elements = map(_copied, elements)
    else:
        # This frame keeps no reference to what it has yielded.
        yield second.pop()
    yield from elements


def own_indices(batch: Any) -> Any:
    """A batch of indices that no longer changes: a batch sampler may refill one list, or yield an iterator."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, (list, np.ndarray)):
        return batch.copy()
    return batch if hasattr(batch, "__len__") else list(batch)


def _copied(element: Any) -> Any:
    """Nested data with copies of all containers, tensors and arrays."""
    return trees.map_leaves(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy(), element, _has_memory
    )


def _has_memory(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _share(first: Any, second: Any) -> bool:
    if first is second:
        return trees.children(first) is not None or _has_memory(first)
    known = set(map(_address, trees.leaves(first, _has_memory))) - {0}
    return not known.isdisjoint(map(_address, trees.leaves(second, _has_memory)))


def _address(leaf: Any) -> int:
    """The address of its first element; 0 where it has none."""
    if isinstance(leaf, np.ndarray):
        return leaf.ctypes.data if leaf.size else 0
    plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested
    return leaf.data_ptr() if plain and leaf.numel() and leaf.device.type != "meta" else 0

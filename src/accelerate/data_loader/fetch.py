# SPDX-License-Identifier: Apache-2.0
"""Read samples in this process: what torch's loader does for one batch, without its overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from ..core import trees
from ..core.messages import warn

Fetch = Callable[[Any], Any]


def map_fetch(dataset: Any, collate: Fetch, batched: bool) -> Fetch:
    """A function from indices (one index where the loader does not batch) to a batch of a map-style dataset."""
    if not batched:
        return lambda index: collate(dataset[index])
    if collate is default_collate and _is_plain_tensors(dataset):
        return _rows_of(dataset.tensors)
    if getattr(dataset, "__getitems__", None):
        return lambda indices: collate(dataset.__getitems__(indices))
    return lambda indices: collate([dataset[index] for index in indices])


def _is_plain_tensors(dataset: Any) -> bool:
    # For these, picking rows gives bit for bit what stacking samples gives.
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_contiguous()
        for tensor in dataset.tensors
    )


def _rows_of(tensors: tuple[torch.Tensor, ...]) -> Fetch:
    def fetch(indices: list[Any]) -> Any:
        if type(indices[0]) is int:
            rows = torch.tensor(indices)
            return [tensor[rows] for tensor in tensors]
        return default_collate([tuple(tensor[index] for tensor in tensors) for index in indices])

    return fetch


def pinned(loader: Any, fetch: Fetch) -> Fetch:
    """`fetch`, followed by pinning where the loader requests it."""
    if pin_device(loader) is None:
        return fetch
    return lambda wanted: pin_memory(fetch(wanted))


def pin_memory(batch: Any) -> Any:
    """`batch` with its tensors, and objects with a `pin_memory` of their own, in pinned memory."""
    return trees.map_leaves(
        lambda leaf: leaf.pin_memory(), batch, lambda value: hasattr(value, "pin_memory")
    )


def pin_device(loader: Any) -> str | None:
    """The kind of device to pin memory for, or None where the loader does not pin or this machine cannot."""
    if not loader.pin_memory:
        return None
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
    else:
        found = None
    if found is None or found.type == "mps":
        if found:
            where = "not supported on MPS"
        else:
            where = "set, but no accelerator is found"
        warn(f"pin_memory=True is {where}: memory is not pinned.")
        return None
    return found.type

# SPDX-License-Identifier: Apache-2.0
"""Count, slice and join the rows of batches. Columns are tensors, or lists with one element for each row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ..core import trees


def count_rows(batch: Any) -> int | None:
    """The number of rows: the length of the first tensor, or of the first list of plain values; else None."""
    found = trees.first_leaf(batch)
    if found is not None:
        return int(found.shape[0]) if found.dim() else None
    column = next(_columns(batch), None)
    return None if column is None else len(column)


def take_rows(batch: Any, rows: int | None, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of a batch of `rows`. Values that are not columns are not changed."""
    return _per_column(lambda column: column[start:stop], batch, rows)


def repeat_rows(batch: Any, rows: int, count: int) -> Any:
    """`count` rows of a batch of `rows`, from the first on, repeated where there are fewer."""
    wanted = [index % rows for index in range(count)]

    def pick(column: Any) -> Any:
        if isinstance(column, torch.Tensor):
            return column[torch.tensor(wanted, dtype=torch.int64, device=column.device)]
        return type(column)(column[index] for index in wanted)

    return _per_column(pick, batch, rows)


def join_rows(batches: list[Any], rows: list[int]) -> Any:
    """Join batches of the same structure. Raises ValueError where their columns have different shapes."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    if _is_column(first, rows[0]):
        if isinstance(first, torch.Tensor):
            return _concatenated(batches)
        return type(first)(itertools.chain.from_iterable(batches))
    if isinstance(first, Mapping):
        joined = {key: join_rows([batch[key] for batch in batches], rows) for key in first}
        return trees.rebuild_mapping(first, joined)
    if isinstance(first, (list, tuple)):
        return trees.honor_type(first, (join_rows(list(parts), rows) for parts in zip(*batches, strict=True)))
    return first


def _concatenated(tensors: list[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.cat(tensors)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"the last batches of an epoch have tensors of shapes {shapes}, which cannot be joined and split "
            "equally. Pad all samples to one length, drop the last batch (drop_last=True), or use exact=True, which "
            "does not join batches."
        ) from error


def _is_column(value: Any, rows: int | None) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    if not isinstance(value, (list, tuple)) or trees.is_namedtuple(value) or len(value) != rows:
        return False
    # A list with an element a row, unless its elements are columns themselves.
    return not any(_holds_columns(element, rows) for element in value)


def _holds_columns(value: Any, rows: int | None) -> bool:
    return any(leaf.dim() > 0 and leaf.shape[0] == rows for leaf in trees.leaves(value))


def _per_column(function: Any, batch: Any, rows: int | None) -> Any:
    return trees.map_leaves(function, batch, lambda value: _is_column(value, rows))


def _columns(batch: Any) -> Any:
    return trees.leaves(batch, lambda value: isinstance(value, (list, tuple)) and not _nests(value))


def _nests(value: Any) -> bool:
    return any(isinstance(element, (list, tuple, Mapping)) for element in value)

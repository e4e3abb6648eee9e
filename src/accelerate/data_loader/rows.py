# SPDX-License-Identifier: Apache-2.0
"""Count, slice and join the rows of batches. Columns are tensors, arrays, and lists with one element for each row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ..core import trees

_ARRAYS = (torch.Tensor, np.ndarray)


def count_rows(batch: Any) -> int | None:
    """The number of rows: the length of the first tensor or array, or of the first list of plain values; else None."""
    tensor = trees.first_leaf(batch)
    if tensor is None:
        tensor = trees.first_leaf(batch, _is_array)
    if tensor is None:
        column = trees.first_leaf(batch, _is_plain_list)
        if column is None:
            return None
        return len(column)
    if not tensor.ndim:
        return None
    return _length(tensor)


def rows_of(batch: Any, samples: int | None) -> int | None:
    """The number of rows of a batch of `samples` samples: a collate function may drop or add some."""
    if samples is None:
        return count_rows(batch)
    lengths = _array_lengths(batch)
    if samples in lengths or not lengths:
        return samples
    return lengths[0]


def has_rows(batch: Any, rows: int) -> bool:
    """Whether a batch of `rows` samples can be split: it has columns, and no tensor that cannot be one."""

    def is_end(value: Any) -> bool:
        return _is_column(value, rows) or _is_indivisible(value, rows)

    columns = list(trees.leaves(batch, is_end))
    return bool(columns) and not any(_is_indivisible(column, rows) for column in columns)


def take_rows(batch: Any, rows: int | None, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of a batch of `rows`. Values that are not columns are not changed."""
    return join_rows([batch], [rows], start, stop)


def repeat_rows(batch: Any, rows: int, count: int) -> Any:
    """`count` rows of a batch of `rows`, from the first on, repeated where there are fewer."""
    wanted = [index % rows for index in range(count)]

    def pick(columns: list[Any]) -> Any:
        column = columns[0]
        if isinstance(column, torch.Tensor):
            return column[torch.tensor(wanted, dtype=torch.int64, device=column.device)]
        if isinstance(column, np.ndarray):
            return column[wanted]
        return type(column)(column[index] for index in wanted)

    return _per_column(pick, [batch], [rows])


def join_rows(
    batches: list[Any], rows: Sequence[int | None], start: int = 0, stop: int | None = None
) -> Any:
    """Join batches of the same structure, or only rows `start` to `stop` of them.

    Values that are not columns are those of the first batch.

    Raises:
        ValueError: columns have different shapes, or lists have lengths that are not the numbers of rows.
    """

    def joined(columns: list[Any]) -> Any:
        return _concatenated(columns)[start:stop]

    return _per_column(joined, batches, rows)


def can_join(batches: list[Any], rows: Sequence[int | None]) -> bool:
    """Whether `join_rows` can join batches."""
    try:
        join_rows(batches, rows)
    except ValueError:
        return False
    return True


def _concatenated(columns: list[Any]) -> Any:
    first = columns[0]
    if len(columns) == 1:
        return first
    if not isinstance(first, _ARRAYS):
        return type(first)(itertools.chain.from_iterable(columns))
    try:
        if isinstance(first, torch.Tensor):
            return torch.cat(columns)
        return np.concatenate(columns)
    except (RuntimeError, ValueError) as error:
        shapes = ", ".join(str(tuple(column.shape)) for column in columns)
        raise _not_joined(f"tensors of shapes {shapes}") from error


def _not_joined(what: str) -> ValueError:
    return ValueError(
        f"the last batches of an epoch have {what}, which cannot be joined and split evenly. Pad "
        "all samples to the same length, drop the last batch (drop_last=True), or use "
        "exact=True, which does not join batches."
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, _ARRAYS)


def _length(array: Any) -> int:
    # A nested tensor has no `shape`.
    if isinstance(array, torch.Tensor):
        return array.size(0)
    return int(array.shape[0])


def _array_lengths(batch: Any) -> list[int]:
    return [_length(leaf) for leaf in trees.leaves(batch, _is_array) if leaf.ndim]


def _is_indivisible(value: Any, rows: int | None) -> bool:
    """Whether a value is a tensor that slices do not split into samples: packed, ragged, sparse, of other rows."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, PackedSequence)
    if value.layout is not torch.strided or value.is_nested:
        return True
    return value.dim() > 0 and _length(value) != rows


def _is_column(value: Any, rows: int | None) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    if isinstance(value, np.ndarray):
        return bool(value.shape[:1] == (rows,))
    if not isinstance(value, (list, tuple)) or trees.is_namedtuple(value) or len(value) != rows:
        return False
    # A list with an element a row, unless its elements are columns themselves.
    lengths = set(_array_lengths(value))
    if not lengths:
        return True
    if len(set(map(_kind, value))) == 1:
        # Samples of one kind have other lengths than the batch, or at least some of them have.
        return lengths != {rows}
    if rows in lengths:
        return False
    return any(not isinstance(element, (list, tuple)) or len(element) != rows for element in value)


def _kind(value: Any) -> Any:
    """What the samples of a batch have in common: types, fields, dtypes and numbers of dimensions."""
    if _is_array(value):
        return type(value), value.dtype, value.ndim
    if isinstance(value, (list, tuple)):
        return type(value), frozenset(map(_kind, value))
    inner = trees.children(value)
    if inner is None:
        return type(value)
    return (type(value), tuple((key, _kind(child)) for key, child in inner.items()))


def _per_column(
    function: Callable[[list[Any]], Any], batches: list[Any], rows: Sequence[int | None]
) -> Any:
    """The first batch with `function` applied to the values of all batches for each column."""
    first = batches[0]
    if isinstance(first, PackedSequence):
        raise _not_joined("a PackedSequence")
    if all(map(_is_column, batches, rows)):
        return function(batches)
    if trees.children(first) is None:
        return first
    if isinstance(first, (list, tuple)):
        lengths = [len(batch) for batch in batches]
        if len(set(lengths)) > 1:
            raise _not_joined(f"lists of lengths {', '.join(map(str, lengths))}")
    entries: list[Any] = [trees.children(batch) for batch in batches]
    joined = {}
    for key in entries[0]:
        column = [entry[key] for entry in entries]
        joined[key] = _per_column(function, column, rows)
    return trees.with_children(first, joined)


def _is_plain_list(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return not any(isinstance(element, (list, tuple, Mapping)) for element in value)

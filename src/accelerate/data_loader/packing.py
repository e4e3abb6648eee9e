# SPDX-License-Identifier: Apache-2.0
"""Pack documents into rows of one length."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from ..core.documents import IGNORED
from ..core.errors import ConfigurationError

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


# Rows have positions of their own, and need no mask: their lengths say which tokens see each other.
_REPLACED = ("attention_mask", "position_ids")


def pack(
    dataset: Any,
    length: int,
    *,
    lengths: Sequence[int] | Integers | torch.Tensor | None = None,
    fields: Sequence[str] | None = None,
    labels: bool = False,
    mask_first_label: bool = True,
    split_long: bool = False,
    drop_last: bool = False,
    pad_token_id: int = 0,
) -> PackedDataset:
    """Pack documents into rows of exactly `length` tokens.

    Each document goes, unsplit, into the fullest row that has room for it, starting with the longest
    documents (best fit decreasing). The result depends only on the lengths. Tokens are read when a row is requested.

    Args:
        dataset: a map-style dataset or a list of documents. A document is a mapping with `input_ids` and other fields
            that have one value for each token, or a 1-D tensor of tokens.
        length: the tokens of a row.
        lengths: the tokens of each document. None: every document is read once to count them.
        fields: the fields of rows. None: those with one value for each token in the first document. A row never has
            an `attention_mask`: `seq_lens` replaces it.
        labels: copy `labels` from `input_ids` where documents have none.
        mask_first_label: set the first label of each document to -100, because the token before it belongs to
            another document. Use False for labels that are already shifted.
        split_long: split documents longer than `length` into documents of at most `length` tokens.
        drop_last: drop the last row, which has the most padding, if it is not full.
        pad_token_id: fills `input_ids`. The labels of padding are -100, and other fields 0.

    Returns:
        The dataset of the rows. Each has `input_ids`, the other fields, `position_ids` that begin with 0 in each
        document, and `seq_lens`: the lengths of its documents, with padding as the last one, then zeros.

    Raises:
        ConfigurationError: a document is empty, longer than `length`, or does not have one value for each token.

    Example:
        rows = pack(documents, 4096, labels=True)
        loader = accelerator.prepare(DataLoader(rows, batch_size=2, shuffle=True))
    """
    if not isinstance(length, int) or length < 1:
        raise ConfigurationError(f"pack: length must be a positive integer, not {length!r}")
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise ConfigurationError(
            "pack: the dataset must be map-style and contain at least one document; this is a "
            f"{type(dataset).__name__}"
        )
    if lengths is None:
        lengths = []
        for number in range(len(dataset)):
            document = _fields_of(dataset, number)
            lengths.append(len(document["input_ids"]))
    sizes = checked_lengths(lengths, "pack")
    if len(sizes) != len(dataset):
        raise ConfigurationError(
            f"pack: lengths has {len(sizes)} values, but there are {len(dataset)} documents"
        )
    longest = int(sizes.argmax())
    if sizes[longest] > length and not split_long:
        raise ConfigurationError(
            f"pack: document {longest} has {sizes[longest]} tokens, but a row has {length}. Use "
            "longer rows or split_long=True"
        )
    if fields is None:
        fields = _per_token_fields(_fields_of(dataset, 0), int(sizes[0]))
    return PackedDataset(
        dataset,
        length,
        _rows_of(sizes, length, drop_last),
        fields=[name for name in fields if name not in _REPLACED],
        copies_labels=labels and "labels" not in fields,
        mask_first_label=mask_first_label,
        filling={"input_ids": pad_token_id, "labels": IGNORED},
    )


class Rows(NamedTuple):
    """Which documents are in which row. A document longer than a row has several pieces, in several rows.

    Fields:
        ends: the pieces of row i are those from `ends[i]` to `ends[i + 1]`.
        documents: the document of each piece.
        starts: where each piece begins in its document.
        sizes: the tokens of each piece.
    """

    ends: Integers
    documents: Integers
    starts: Integers
    sizes: Integers


@dataclass(eq=False, repr=False)
class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """The rows that `pack` returns. See there.

    Fields:
        dataset: the documents.
        length: the tokens of a row.
        rows: what is in the rows.
        fields: the fields that are read from documents.
        copies_labels: whether `labels` are a copy of `input_ids`.
        mask_first_label: whether the first label of each piece is -100.
        filling: the padding of fields, if it is not 0.
    """

    dataset: Any
    length: int
    rows: Rows
    fields: list[str]
    copies_labels: bool
    mask_first_label: bool
    filling: dict[str, int]

    def __post_init__(self) -> None:
        # The most documents in a row, and its padding.
        self._width: int = int(np.diff(self.rows.ends).max(initial=0)) + 1

    def __len__(self) -> int:
        return len(self.rows.ends) - 1

    def documents(self, row: int) -> list[int]:
        """The documents in a row, by their numbers in the dataset."""
        documents: list[int] = self.rows.documents[self._pieces(row)].tolist()
        return documents

    def _pieces(self, row: int) -> slice:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return slice(self.rows.ends[row], self.rows.ends[row + 1])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        pieces = self._pieces(row)
        starts = self.rows.starts[pieces].tolist()
        lengths: list[int] = self.rows.sizes[pieces].tolist()
        columns: dict[str, list[torch.Tensor]] = {}
        for document, start, size in zip(self.documents(row), starts, lengths, strict=True):
            piece = self._read(document, start, size)
            for name, values in piece.items():
                columns.setdefault(name, []).append(values)
        padding = self.length - sum(lengths)
        if padding:
            lengths.append(padding)
        packed = {}
        for name, column in columns.items():
            filling = self.filling.get(name, 0)
            tail = column[0].new_full((padding, *column[0].shape[1:]), filling)
            packed[name] = torch.cat([*column, tail])
        packed["position_ids"] = torch.cat([torch.arange(size) for size in lengths])
        zeros = [0] * (self._width - len(lengths))
        packed["seq_lens"] = torch.tensor(lengths + zeros)
        return packed

    def _read(self, document: int, start: int, size: int) -> dict[str, torch.Tensor]:
        sample = _fields_of(self.dataset, document)
        tokens = len(sample["input_ids"])
        piece = {}
        for name in self.fields:
            if name not in sample:
                raise ConfigurationError(
                    f"pack: document {document} does not have {name}; it has "
                    f"{', '.join(map(str, sample))}"
                )
            values = torch.as_tensor(sample[name])
            if len(values) != tokens or tokens < start + size:
                raise ConfigurationError(
                    f"pack: {name} of document {document} has {len(values)} values, but the "
                    f"document has {max(tokens, start + size)} tokens"
                )
            if name == "input_ids" and (values.dim() != 1 or values.is_floating_point()):
                raise ConfigurationError(
                    f"pack: input_ids of document {document} must be 1-D integers, but are "
                    f"{values.dtype} of shape {list(values.shape)}"
                )
            if name in self.filling:
                values = values.long()
            piece[name] = values[start : start + size]
        if self.copies_labels:
            piece["labels"] = piece["input_ids"]
        if "labels" in piece and self.mask_first_label:
            piece["labels"] = piece["labels"].clone()
            piece["labels"][0] = IGNORED
        return piece


def _rows_of(sizes: Integers, length: int, drop_last: bool) -> Rows:
    """The rows in the order of their first documents; the one with the most padding is the last one."""
    counts = -(-sizes // length)
    documents = np.repeat(np.arange(len(sizes)), counts)
    first_pieces = np.cumsum(counts) - counts
    starts = length * (np.arange(len(documents)) - first_pieces[documents])
    pieces = np.minimum(sizes[documents] - starts, length)
    rows = np.array(best_fit(pieces, length))
    _, firsts = np.unique(rows, return_index=True)
    filled = np.bincount(rows, weights=pieces)
    emptiest = np.lexsort((-firsts, filled))[0]
    firsts[emptiest] = len(pieces)
    order = np.argsort(firsts[rows], kind="stable")
    in_row = np.bincount(rows)[np.argsort(firsts)]
    ends = np.append(0, np.cumsum(in_row))
    if drop_last and filled[emptiest] < length:
        ends = ends[:-1]
    return Rows(ends, documents[order], starts[order], pieces[order])


def _fields_of(dataset: Any, number: int) -> Mapping[str, Any]:
    document = dataset[number]
    if not isinstance(document, Mapping):
        return {"input_ids": document}
    if "input_ids" not in document:
        raise ConfigurationError(
            f"pack: document {number} does not have input_ids; it has "
            f"{', '.join(map(str, document))}"
        )
    return document


def _per_token_fields(document: Mapping[str, Any], tokens: int) -> list[str]:
    """The fields with one number for each token."""
    fields = []
    for name, values in document.items():
        is_array = isinstance(values, (torch.Tensor, np.ndarray))
        if isinstance(values, (list, tuple)) and values:
            is_array = isinstance(values[0], (int, float))
        if is_array and len(values) == tokens:
            fields.append(name)
    if "input_ids" not in fields:
        ids = document["input_ids"]
        raise ConfigurationError(
            f"pack: input_ids of document 0 must be {tokens} integers, but is a "
            f"{type(ids).__name__} of {len(ids)}"
        )
    return fields


def best_fit(sizes: Integers, length: int) -> list[int]:
    """The row of each piece, longest first: the fullest row that has room for it, or a new one."""
    rows = [0] * len(sizes)
    number = 0
    # The rows with some room, by how much they have.
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        index = bisect.bisect_left(rooms, size)
        if index == len(rooms):
            row = number
            room = length
            number += 1
        else:
            room = rooms[index]
            candidates = by_room[room]
            row = candidates.pop()
            if not candidates:
                del rooms[index]
        rows[piece] = row
        room -= size
        if room:
            candidates = by_room.setdefault(room, [])
            if not candidates:
                bisect.insort(rooms, room)
            candidates.append(row)
    return rows


def checked_lengths(lengths: Any, owner: str) -> Integers:
    """The lengths of documents as integers. Raises ConfigurationError where one is none, or not positive."""
    values = np.asarray(lengths)
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{owner}: lengths must be one integer for each document, but are {values.dtype} of "
            f"shape {list(values.shape)}"
        )
    if values.min() < 1:
        document = int((values < 1).argmax())
        raise ConfigurationError(
            f"{owner}: document {document} has the length {values[document]}: remove empty "
            "documents"
        )
    return values.astype(np.int64)

# SPDX-License-Identifier: Apache-2.0
"""The documents of packed rows: where each begins, its positions, and the mask that keeps attention inside of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .errors import ConfigurationError

# The arguments of a forward that say how long documents are.
FIELDS = ("seq_lens", "cu_seqlens")
_FORMS = {
    "seq_lens": "the lengths of the documents in each row, as a list of integers for each row or "
    "a 2-D tensor",
    "cu_seqlens": "1-D: the start of each document in the flattened rows, followed by the number "
    "of tokens",
}
# A label that is not trained on.
IGNORED = -100
# Queries and keys in a block of flex_attention.
_BLOCK = 128


class Documents:
    """The documents in the rows of a batch. Every token belongs to one.

    Args:
        lengths: the lengths of the documents in each row; rows are equally long.
        device: of the tensors.

    Fields:
        lengths: as given.
        numbers: (rows, length): the number of each token's document in the batch.
    """

    def __init__(self, lengths: list[list[int]], device: torch.device | None = None) -> None:
        self.lengths = lengths
        sizes = torch.tensor(list(chain(*lengths)))
        numbers = torch.arange(len(sizes)).repeat_interleave(sizes)
        self.numbers: torch.Tensor = numbers.view(len(lengths), -1).to(device)
        # Masks, with the masks that they were joined with.
        self._masks: dict[tuple[bool, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._block_masks: dict[bool, Any] = {}

    @classmethod
    def of_batch(
        cls, batch: Mapping[str, Any], rows: int, length: int, device: torch.device | None = None
    ) -> Documents | None:
        """The documents that a batch of so many rows has; None without `seq_lens` and `cu_seqlens`.

        Raises:
            ConfigurationError: naming the field, for lengths that are not those of documents in these rows; naming
                both, if they contradict each other.
        """
        field = next((name for name in FIELDS if batch.get(name) is not None), None)
        if field is None:
            return None
        try:
            if field == "seq_lens":
                lengths = _lengths_by_row(batch[field])
            else:
                lengths = _lengths_between(batch[field], rows, length)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"{field} must be {_FORMS[field]}, but is a {type(batch[field]).__name__}: {error}"
            ) from error
        if len(lengths) != rows:
            raise ConfigurationError(f"{field} has {len(lengths)} rows, but the batch has {rows}")
        for number, row in enumerate(lengths):
            if min(row, default=0) < 1 or sum(row) != length:
                raise ConfigurationError(
                    f"{field}: the documents of row {number} are {row}, {sum(row)} tokens, but "
                    f"the row has {length}. Each document needs at least 1 token, and padding "
                    "counts as the last document of a row. In a tensor, zeros can fill the end "
                    "of a row"
                )
        bounds = batch.get("cu_seqlens")
        if field == "seq_lens" and bounds is not None:
            by_lengths = {0, *accumulate(chain(*lengths))}
            by_bounds = set(torch.as_tensor(bounds).flatten().tolist())
            contradicting = by_lengths ^ by_bounds
            if contradicting:
                raise ConfigurationError(
                    "seq_lens and cu_seqlens of a batch contradict each other: only one of them has "
                    f"a document that begins or ends at token {min(contradicting)}. Pass one of them"
                )
        return cls(lengths, device)

    @property
    def starts(self) -> torch.Tensor:
        """(rows, length): whether a token is the first of its document."""
        return self.numbers.diff(dim=1, prepend=self.numbers[:, :1] - 1) != 0

    @property
    def positions(self) -> torch.Tensor:
        """(rows, length): the position of each token in its document."""
        index = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        first = torch.where(self.starts, index, 0).cummax(dim=1).values
        return index - first

    @functools.cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """(documents + 1): where each document begins in the flattened rows, and the number of tokens."""
        first = self.starts.flatten().nonzero().flatten()
        return F.pad(first, (0, 1), value=self.numbers.numel()).int()

    @functools.cached_property
    def longest(self) -> int:
        """The number of tokens of the longest document, with its padding."""
        return max(map(max, self.lengths))

    def without_padding(self, mask: torch.Tensor) -> Documents:
        """The same with the padding of each document, where `mask` (rows, length) is 0, as one of its own."""
        documents = Documents(self.lengths, self.numbers.device)
        documents.numbers = 2 * self.numbers + mask.ne(0)
        return documents

    def trained_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels (rows, length) without those of first tokens, which the token before them is not to predict."""
        return labels.masked_fill(self.starts.to(labels.device), IGNORED)

    def mask(self, causal: bool, mask: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, 1, length, length): which keys a query sees, joined with a mask that broadcasts to this shape.

        The same tensor for each layer of a model, since the backward keeps it.
        """
        key = (causal, id(mask))
        if key not in self._masks:
            shown = self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
            if causal:
                shown = shown.tril()
            self._masks[key] = (mask, joined(mask, shown))
        return self._masks[key][1]

    def block_mask(self, causal: bool) -> Any:
        """The same as a BlockMask of flex_attention, in which nothing has (length, length) elements.

        It has the blocks of keys that each block of queries reads, and a function for the keys in them.
        """
        if causal not in self._block_masks:
            self._block_masks[causal] = _block_mask(self.numbers, causal)
        return self._block_masks[causal]


def joined(mask: torch.Tensor | None, shown: torch.Tensor) -> torch.Tensor:
    """An attention mask, boolean or added to scores, that hides also the keys that a boolean one does not show."""
    if mask is None:
        return shown
    if mask.dtype == torch.bool:
        return mask & shown
    return mask.masked_fill(~shown, float("-inf"))


def _block_mask(numbers: torch.Tensor, causal: bool) -> Any:
    # Few devices use it.
    from torch.nn.attention.flex_attention import BlockMask

    def is_shown(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_same = numbers[row, query] == numbers[row, key]
        if causal:
            return is_same & (key <= query)
        return is_same

    length = numbers.shape[1]
    filling = numbers[:, -1:].expand(-1, -length % _BLOCK)
    blocks = torch.cat([numbers, filling], dim=1).unflatten(1, (-1, _BLOCK))
    # Blocks have no document in common if the numbers in one are all smaller than those in the other.
    smallest, largest = blocks.aminmax(dim=2)
    is_read = smallest[:, :, None] <= largest[:, None]
    is_read = is_read & is_read.transpose(1, 2)
    if causal:
        is_read = is_read.tril()
    is_read = is_read[:, None].int()
    order = is_read.argsort(descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        is_read.sum(-1).int(),
        order.int(),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_shown,
        seq_lengths=(length, length),
    )


def _lengths_by_row(seq_lens: Any) -> list[list[int]]:
    # The rows of an array are equally long.
    is_padded = hasattr(seq_lens, "tolist")
    if is_padded:
        seq_lens = seq_lens.tolist()
    rows = list(seq_lens)
    if rows and np.ndim(rows[0]) == 0:
        rows = [rows]
    lengths = [_integers(row) for row in rows]
    for row in lengths:
        while is_padded and row and row[-1] == 0:
            row.pop()
    return lengths


def _lengths_between(cu_seqlens: Any, rows: int, length: int) -> list[list[int]]:
    lengths: list[list[int]] = [[] for _ in range(rows)]
    for first, end in pairwise(_integers(cu_seqlens)):
        row = min(first // length, rows - 1)
        lengths[row].append(end - first)
    return lengths


def _integers(values: Any) -> list[int]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    integers = []
    for value in values:
        if isinstance(value, bool):
            raise TypeError("'bool' object is not an integer")
        integers.append(operator.index(value))
    return integers

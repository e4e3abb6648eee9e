# SPDX-License-Identifier: Apache-2.0
"""Attention masks over a split sequence: what a rank's rows see of the whole, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...collectives import transport
from ...core.errors import ConfigurationError
from .shard import SequenceLayout

# What is added to a score to hide it: beside any other score nothing is left of it.
_HIDDEN = torch.finfo(torch.float16).min
_MASKS = 4


@dataclass(frozen=True)
class Sight:
    """What this rank's rows see: keys up to themselves, what a mask shows, or (neither) everything.

    `mask` broadcasts to (batch, heads, rows, length): boolean, or what is added to the scores. `chunks` says of each
    half of the rows, and each chunk of the sequence: seen whole (True), in part (False), or not at all (None).
    """

    causal: bool = False
    mask: torch.Tensor | None = None
    # (batch or 1, heads or 1, rows, 1): what is added to all scores of a row that hides everything by large numbers.
    shift: torch.Tensor | None = None
    chunks: tuple[tuple[bool | None, ...], ...] = ()

    def of(self, dtype: torch.dtype) -> Sight:
        """The same, a bias in the precision of queries: kernels add no other."""
        if self.mask is None or self.mask.dtype in (torch.bool, dtype):
            return self
        return replace(self, mask=self.mask.to(dtype))

    def shift_of(self, queries: slice) -> torch.Tensor | None:
        """What is added to all scores of some rows."""
        return None if self.shift is None else self.shift[:, :, queries]

    def part(self, queries: slice, chunks: Sequence[int], size: int) -> torch.Tensor:
        """The mask of some rows and of chunks of so many columns, next to each other."""
        assert self.mask is not None
        rows = self.mask[:, :, queries]
        return torch.cat([rows.narrow(-1, chunk * size, size) for chunk in chunks], dim=-1)


EVERYTHING = Sight()


class MaskReader:
    """What the mask of a call says about the whole sequence.

    Rows may be this rank's or all, columns are all; a mask over this rank's rows and columns alone says something
    about the whole where everything is seen, or everything before. Layers share masks: the last few are remembered.
    """

    def __init__(self, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
        self.layout, self.group = layout, group
        self._known: dict[tuple[int, int, bool], tuple[torch.Tensor, Sight]] = {}

    def forget(self) -> None:
        """Let go of the masks of a batch."""
        self._known.clear()

    def sight(self, mask: torch.Tensor, query: torch.Tensor, flat: bool) -> Sight:
        """What rows of `query` (batch, heads, rows, width) see; `flat`: it was (batch, rows, width)."""
        return self._remembered(mask, query, flat, self._sight)

    def whole(self, mask: torch.Tensor, query: torch.Tensor, flat: bool) -> Sight:
        """As `sight`, of all rows of the sequence and without `chunks`; rows of other ranks are fetched."""
        return self._remembered(mask, query, flat, self._whole)

    def _remembered(
        self,
        mask: torch.Tensor,
        query: torch.Tensor,
        flat: bool,
        read: Callable[[torch.Tensor, torch.Tensor], Sight],
    ) -> Sight:
        key = (id(mask), 0 if mask.is_inference() else mask._version, flat)
        if key not in self._known:
            if len(self._known) >= _MASKS:
                del self._known[next(iter(self._known))]
            self._known[key] = mask, read(self._shaped(mask, query, flat), query)
        return self._known[key][1]

    def _shaped(self, mask: torch.Tensor, query: torch.Tensor, flat: bool) -> torch.Tensor:
        """The mask as (batch or 1, heads or 1, ...), with all columns or (own rows or 1, own columns)."""
        given, rows = mask, query.shape[2]
        length = rows * self.layout.ranks
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise self._refuse(given, f"its dtype is {mask.dtype}, not bool and not a floating point type")
        if flat and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        if 2 <= mask.dim() < 4:
            mask = mask[(None,) * (4 - mask.dim())]
        if mask.dim() != 4 or any(size not in (1, of) for size, of in zip(mask.shape, query.shape[:2], strict=False)):
            raise self._refuse(given, f"it does not broadcast over {query.shape[0]} x {query.shape[1]} heads")
        if mask.shape[-1] == 1:
            mask = mask.expand(*mask.shape[:3], length)
        known = {length: (1, rows, length), rows: (1, rows)}
        if mask.shape[2] not in known.get(mask.shape[3], ()):
            raise self._refuse(given, f"the sequence has {length} rows, {rows} of them here")
        return compact(mask)

    def _sight(self, mask: torch.Tensor, query: torch.Tensor) -> Sight:
        rows, length = query.shape[2], query.shape[2] * self.layout.ranks
        if mask.shape[3] == rows:
            return self._local(mask, rows)
        if mask.requires_grad and torch.is_grad_enabled():
            raise self._refuse(mask, "it requires a gradient, which is computed for queries, keys and values only")
        if mask.shape[2] == length:
            mask = self.layout.take(mask, 2)
        mask, shift = _plain(mask.detach())
        mask = mask.expand(-1, -1, rows, -1)
        whole = mask if mask.dtype == torch.bool else mask == 0
        if shift is not None:
            shift = shift.expand(-1, -1, rows, -1)
        elif bool(whole.all()):
            return EVERYTHING
        places = self.layout.rows(length, mask.device)
        if (
            shift is None
            and mask.dtype == torch.bool
            and bool((mask == (places[:, None] >= torch.arange(length).to(places))).all())
        ):
            return Sight(causal=True)
        # (batch, heads, half of the rows, rows, chunk of the sequence, columns)
        some, whole = (s.unflatten(3, (self.layout.multiple, -1)).unflatten(2, (2, -1)) for s in (_seen(mask), whole))
        found = torch.stack([some.any(5).any(3).any(1).any(0), whole.all(5).all(3).all(1).all(0)], dim=-1)
        views = {(False, False): None, (True, False): False, (True, True): True}
        return Sight(
            mask=mask, shift=shift, chunks=tuple(tuple(views[tuple(pair)] for pair in half) for half in found.tolist())
        )

    def _whole(self, mask: torch.Tensor, query: torch.Tensor) -> Sight:
        rows, heads, layout = query.shape[2], query.shape[1], self.layout
        if mask.shape[3] == rows:
            return self._local(mask, rows)
        if mask.shape[2] == rows:
            if mask.requires_grad and torch.is_grad_enabled():
                raise self._refuse(mask, "it requires a gradient: give all of its rows")
            own = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
            parts = transport.all_gather(own.flatten(), self.group).view(layout.ranks, *own.shape).to(mask.dtype)
            mask = layout.join(list(parts), 2)
        if mask.shape[1] == heads > 1:
            mask = mask.unflatten(1, (layout.ranks, -1)).select(1, layout.rank)
        return Sight(mask=mask)

    def _local(self, mask: torch.Tensor, rows: int) -> Sight:
        """Of a mask over this rank's rows and columns: everything, or causal; nothing else can be known."""
        shown, shift = _plain(mask.detach())
        if shift is not None:
            raise self._refuse(mask, "it hides a whole row of this rank's part by large numbers")
        if shown.dtype != torch.bool:
            raise self._refuse(mask, "it adds a bias to the scores of this rank's part alone")
        if bool(shown.all()):
            return EVERYTHING
        lower = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()
        if shown.shape[2] == rows and bool((shown == lower).all()):
            return Sight(causal=True)
        raise self._refuse(mask, "it is neither causal nor all true, and shows this rank's part alone")

    def _refuse(self, mask: torch.Tensor, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"attn_mask of shape {tuple(mask.shape)} under {self.layout.size}={self.layout.ranks}: {why}. Give one "
            "that broadcasts to (batch, heads, rows, length), whose columns are the whole sequence and whose rows are "
            "the whole sequence or this rank's part of it; or is_causal=True. A padding mask goes to a transformers "
            "model as attention_mask, and is not needed at all where padding comes behind and has no labels, and "
            "attention is causal."
        )


def compact(mask: torch.Tensor) -> torch.Tensor:
    """A mask of four dimensions, without copies for batches and heads that share memory."""
    for dimension in (0, 1):
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    return mask


def _plain(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A mask that only hides as a boolean one; of any other, what hides as -inf. And the shift of each row.

    Where everything in a row is hidden by large numbers, as much is taken off all of them, and given back as a shift:
    softmax does not change by it, but scores lose what such a number rounds off (often all: the mean of all values).
    """
    if mask.dtype == torch.bool:
        return mask, None
    top = mask.amax(-1, keepdim=True)
    top = top.where((top <= _HIDDEN) & top.isfinite(), 0.0)
    mask = mask - top
    hidden = mask <= _HIDDEN
    shift = top if bool(top.any()) else None
    if bool((hidden | (mask == 0)).all()):
        return ~hidden, shift
    return mask.masked_fill(hidden, float("-inf")), shift


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > float("-inf")

# SPDX-License-Identifier: Apache-2.0
"""Attention masks over a split sequence: what a rank's rows see of the full sequence, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...collectives import transport
from ...core.errors import ConfigurationError
from .blocks import seen
from .shard import SequenceLayout

# A score to which this is added vanishes next to any other.
_HIDDEN = torch.finfo(torch.float16).min
_MASKS = 4


@dataclass(frozen=True)
class Visibility:
    """What this rank's rows see: keys up to themselves (`causal`), what `mask` shows, or else all keys.

    `mask` broadcasts to (batch, heads, rows, length): boolean, or added to the scores. `chunks`, for each half of the
    rows and each chunk of the sequence: seen completely (True), partly (False), or not at all (None).
    """

    causal: bool = False
    mask: torch.Tensor | None = None
    # (batch or 1, heads or 1, rows, 1): added to all scores of a row in which large negative numbers hide all keys.
    shift: torch.Tensor | None = None
    chunks: tuple[tuple[bool | None, ...], ...] = ()

    def of(self, dtype: torch.dtype) -> Visibility:
        """The same, with a bias in the dtype of the queries, as kernels need it."""
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


SEES_ALL = Visibility()


class MaskReader:
    """What the mask of a call shows of the full sequence.

    A mask has all columns, and this rank's rows or all rows. One with only this rank's rows and columns is accepted
    where it is causal or shows everything. Layers share masks: the last few are cached.
    """

    def __init__(self, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
        self.layout = layout
        self.group = group
        self._cache: dict[tuple[int, int, bool], tuple[torch.Tensor, Visibility]] = {}

    def forget(self) -> None:
        """Free the masks of a batch."""
        self._cache.clear()

    def visibility(self, mask: torch.Tensor, query: torch.Tensor, flat: bool) -> Visibility:
        """What rows of `query` (batch, heads, rows, width) see; `flat`: it was (batch, rows, width)."""
        return self._cached(mask, query, flat, self._sight)

    def full(self, mask: torch.Tensor, query: torch.Tensor, flat: bool) -> Visibility:
        """As `visibility`, for all rows of the sequence and without `chunks`; gathers the rows of other ranks."""
        return self._cached(mask, query, flat, self._full)

    def _cached(
        self,
        mask: torch.Tensor,
        query: torch.Tensor,
        flat: bool,
        read: Callable[[torch.Tensor, torch.Tensor], Visibility],
    ) -> Visibility:
        key = (id(mask), 0 if mask.is_inference() else mask._version, flat)
        if key not in self._cache:
            if len(self._cache) >= _MASKS:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = mask, read(self._shaped(mask, query, flat), query)
        return self._cache[key][1]

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

    def _sight(self, mask: torch.Tensor, query: torch.Tensor) -> Visibility:
        rows, length = query.shape[2], query.shape[2] * self.layout.ranks
        if mask.shape[3] == rows:
            return self._local(mask, rows)
        if mask.requires_grad and torch.is_grad_enabled():
            raise self._refuse(mask, "it requires a gradient, which is computed for queries, keys and values only")
        if mask.shape[2] == length:
            mask = self.layout.take(mask, 2)
        mask, shift = _plain(mask.detach())
        mask = mask.expand(-1, -1, rows, -1)
        plain = mask if mask.dtype == torch.bool else mask == 0
        if shift is not None:
            shift = shift.expand(-1, -1, rows, -1)
        elif bool(plain.all()):
            return SEES_ALL
        places = self.layout.rows(length, mask.device)
        if (
            shift is None
            and mask.dtype == torch.bool
            and bool((mask == (places[:, None] >= torch.arange(length).to(places))).all())
        ):
            return Visibility(causal=True)
        # (batch, heads, half of the rows, rows, chunk of the sequence, columns)
        some, plain = (s.unflatten(3, (self.layout.multiple, -1)).unflatten(2, (2, -1)) for s in (seen(mask), plain))
        found = torch.stack([some.any(5).any(3).any(1).any(0), plain.all(5).all(3).all(1).all(0)], dim=-1)
        views = {(False, False): None, (True, False): False, (True, True): True}
        return Visibility(
            mask=mask, shift=shift, chunks=tuple(tuple(views[tuple(pair)] for pair in half) for half in found.tolist())
        )

    def _full(self, mask: torch.Tensor, query: torch.Tensor) -> Visibility:
        rows, heads, layout = query.shape[2], query.shape[1], self.layout
        if mask.shape[3] == rows:
            return self._local(mask, rows)
        if mask.shape[2] == rows:
            if mask.requires_grad and torch.is_grad_enabled():
                raise self._refuse(mask, "it requires a gradient: give all of its rows")
            own = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
            shards = transport.all_gather(own.flatten(), self.group).view(layout.ranks, *own.shape).to(mask.dtype)
            mask = layout.join(list(shards), 2)
        if mask.shape[1] == heads > 1:
            mask = mask.unflatten(1, (layout.ranks, -1)).select(1, layout.rank)
        return Visibility(mask=mask)

    def _local(self, mask: torch.Tensor, rows: int) -> Visibility:
        """A mask over this rank's rows and columns, which must show everything or be causal."""
        shown, shift = _plain(mask.detach())
        if shift is not None:
            raise self._refuse(mask, "it hides all keys of a row of this rank by large numbers")
        if shown.dtype != torch.bool:
            raise self._refuse(mask, "it adds a bias to scores of this rank's columns only")
        if bool(shown.all()):
            return SEES_ALL
        lower = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()
        if shown.shape[2] == rows and bool((shown == lower).all()):
            return Visibility(causal=True)
        raise self._refuse(mask, "it is neither causal nor all true, and has this rank's columns only")

    def _refuse(self, mask: torch.Tensor, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"attn_mask of shape {tuple(mask.shape)} under {self.layout.size}={self.layout.ranks}: {why}. Give one "
            "that broadcasts to (batch, heads, rows, length), with the columns of the full sequence and its rows or "
            "this rank's; or is_causal=True. Give a padding mask to a transformers model as attention_mask; it is not "
            "needed where padding comes after the tokens and has no labels, and attention is causal."
        )


def compact(mask: torch.Tensor) -> torch.Tensor:
    """A mask of four dimensions, with size 1 where batches or heads share memory."""
    for dimension in (0, 1):
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    return mask


def _plain(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A mask that only hides keys as a boolean one; in others, -inf for hidden keys. And the shift of each row.

    Where large negative numbers hide all keys of a row, the largest of them is subtracted from the row and returned as
    a shift. Softmax is invariant under it, but the scores must lose what adding such a number rounds off (often all,
    which gives the mean of all values).
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

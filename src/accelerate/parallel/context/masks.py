# SPDX-License-Identifier: Apache-2.0
"""Attention masks over a split sequence, in the shapes that torch's attention takes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...core.errors import ConfigurationError
from .exchange import gather_rows
from .shard import SequenceLayout

# A score to which this is added vanishes next to any other.
_HIDDEN = torch.finfo(torch.float16).min


class MaskReader:
    """Reads the masks of calls: they have all columns, and this rank's rows or all rows.

    A mask with this rank's rows and columns only is accepted where it is causal or shows everything.
    """

    def __init__(self, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
        self.layout = layout
        self.group = group

    def own_rows(
        self, mask: torch.Tensor, query: torch.Tensor, flat: bool
    ) -> tuple[torch.Tensor | None, bool]:
        """(this rank's rows of a mask over all columns, whether attention is causal instead).

        `query` is (batch, heads, rows, width); `flat`: it was (batch, rows, width).
        """
        shaped, is_local = self._shaped(mask, query, flat)
        if is_local:
            return None, self._is_causal(shaped, query.shape[2])
        if shaped.shape[2] not in (1, query.shape[2]):
            shaped = self.layout.take(shaped, 2)
        return shaped, False

    def own_heads(
        self, mask: torch.Tensor, query: torch.Tensor, flat: bool
    ) -> tuple[torch.Tensor | None, bool]:
        """As `own_rows`, for all rows of the sequence and this rank's heads; gathers the rows of other ranks."""
        shaped, is_local = self._shaped(mask, query, flat)
        layout = self.layout
        rows = query.shape[2]
        if is_local:
            return None, self._is_causal(shaped, rows)
        if shaped.shape[2] == rows:
            if shaped.requires_grad and torch.is_grad_enabled():
                raise self._refuse(shaped, "it requires a gradient: pass all of its rows")
            shaped = gather_rows(shaped, 2, self.group, layout)
        if shaped.shape[1] == query.shape[1] > 1:
            by_rank = shaped.unflatten(1, (layout.ranks, -1))
            shaped = by_rank.select(1, layout.rank)
        return shaped, False

    def _shaped(
        self, mask: torch.Tensor, query: torch.Tensor, flat: bool
    ) -> tuple[torch.Tensor, bool]:
        """The mask in four dimensions, and whether it has this rank's columns only."""
        batch, heads, rows = query.shape[:3]
        length = rows * self.layout.ranks
        shaped = mask
        if flat and mask.dim() == 3:
            shaped = mask.unsqueeze(1)
        while 2 <= shaped.dim() < 4:
            shaped = shaped.unsqueeze(0)
        if (
            shaped.dim() != 4
            or shaped.shape[0] not in (1, batch)
            or shaped.shape[1] not in (1, heads)
        ):
            raise self._refuse(mask, f"it does not broadcast over {batch} x {heads} heads")
        if shaped.shape[3] == 1:
            shaped = shaped.expand(*shaped.shape[:3], length)
        columns = shaped.shape[3]
        sizes = {1, rows}
        if columns == length:
            sizes.add(length)
        if columns not in (length, rows) or shaped.shape[2] not in sizes:
            raise self._refuse(mask, f"the sequence has {length} rows, of which {rows} are here")
        if shaped.is_floating_point():
            # Under autocast the queries may have another dtype.
            shaped = shaped.to(query.dtype)
        return compact(shaped), columns == rows

    def _is_causal(self, mask: torch.Tensor, rows: int) -> bool:
        """Whether a mask over this rank's rows and columns is causal; it must be, or show everything."""
        shown = mask
        if mask.dtype != torch.bool:
            shown = mask > _HIDDEN
            if bool((mask[shown] != 0).any()):
                raise self._refuse(mask, "it adds a bias only to the scores of this rank's columns")
        if bool(shown.all()):
            return False
        lower = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()
        if shown.shape[2] == rows and bool((shown == lower).all()):
            return True
        raise self._refuse(
            mask, "it is neither causal nor all true, and it has only this rank's columns"
        )

    def _refuse(self, mask: torch.Tensor, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"attn_mask of shape {tuple(mask.shape)} under {self.layout}: {why}. Use a mask that "
            "broadcasts to (batch, heads, rows, length), with the columns of the full sequence "
            "and all rows or this rank's rows, or use is_causal=True. Pass a padding mask to a "
            "transformers model as attention_mask."
        )


def compact(mask: torch.Tensor) -> torch.Tensor:
    """A mask of four dimensions, with size 1 where batches or heads share memory."""
    for dimension in (0, 1):
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    return mask

# SPDX-License-Identifier: Apache-2.0
"""torch's attention of a rank's rows to the whole sequence: what a call asks for, and which method runs it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...core.errors import ConfigurationError
from .blocks import Block, accumulator
from .gather import GatherAttention
from .ring import Exchange, RingAttention
from .shard import SequenceLayout
from .ulysses import copies_of_heads, split_rows, spread_inputs

# Taken before anything is put in its place.
plain_attention = F.scaled_dot_product_attention

# What it is -> (messages, bytes).
Sent = dict[str, tuple[int, int]]


@dataclass
class Call:
    """The arguments of a call beside query, key and value, and which keys of the sequence are padding."""

    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    # (ranks, batch, rows): the keys of each rank that count; None for all.
    keep: torch.Tensor | None = None
    # Padding that comes after everything that counts: under a causal mask nothing that counts sees it.
    padded_behind: bool = False

    def padding(self, causal: bool) -> torch.Tensor | None:
        return None if causal and self.padded_behind else self.keep


class MaskReader:
    """What a mask over a rank's own rows says about the whole sequence: everything, or causal; nothing else can be.

    All layers of a model share a mask, so the last verdict is kept.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout
        self._last: Any = lambda: None
        self._version, self._verdict = -1, False

    def is_causal(self, mask: torch.Tensor, rows: int) -> bool:
        version = 0 if mask.is_inference() else mask._version
        if self._last() is not mask or self._version != version:
            self._verdict = self._read(mask, rows)
            self._last, self._version = weakref.ref(mask), version
        return self._verdict

    def _read(self, mask: torch.Tensor, rows: int) -> bool:
        seen = mask
        if mask.dtype != torch.bool:
            seen = mask == 0
            hidden = mask <= torch.finfo(torch.float16).min
            if not bool((seen | hidden).all()):
                raise self._refuse(mask, "it adds a bias to the scores")
        if bool(seen.all()):
            return False
        if mask.shape[-2:] == (rows, rows):
            lower = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()
            if bool((seen == lower).all()):
                return True
        raise self._refuse(mask, "it is neither causal nor all true")

    def _refuse(self, mask: torch.Tensor, why: str) -> ConfigurationError:
        size = f"{self.layout.size}={self.layout.ranks}"
        remedy = "use is_causal=True or no mask"
        if self.layout.size == "sp_size":
            remedy += ", or give one over the whole sequence"
        return ConfigurationError(
            f"attn_mask of shape {tuple(mask.shape)} under {size}: {why}, and its rows and columns are this rank's "
            f"part of the sequence only: {remedy}. A padding mask goes to a transformers model as attention_mask, and "
            "is not needed at all where padding comes behind and attention is causal."
        )


class ContextAttention:
    """Keys and values travel (cp_size): `rotate` round a ring, otherwise in one all-gather."""

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout, rotate: bool) -> None:
        self.group, self.layout = group, layout
        self.kind: Any = RingAttention if rotate else GatherAttention
        self.masks = MaskReader(layout)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
        layout = self.layout
        if call.dropout > 0.0:
            raise ConfigurationError(
                f"dropout_p={call.dropout} inside attention is not computed under {layout.size}={layout.ranks}: the "
                "ranks would have to agree on what is dropped. Set the attention's dropout to 0 (attention_dropout of "
                "transformers' configurations), or split with sp_size, which computes whole rows."
            )
        causal = call.causal or (call.mask is not None and self.masks.is_causal(call.mask, query.shape[2]))
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        exchange = Exchange(self.group, layout.ranks, layout.rank, Block(scale, causal), call.padding(causal))
        # The kernels read rows; keys and values travel as dense messages anyway.
        query = query if query.stride(-1) == 1 else query.contiguous()
        out: torch.Tensor = self.kind.apply(query, key, value, exchange)
        return out

    def sent(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sent:
        """What a rank sends for one attention of these sizes and its backward."""
        others, held = self.layout.ranks - 1, key.nbytes + value.nbytes
        gradients = (key.numel() + value.numel()) * accumulator(key.dtype).itemsize
        keys = "keys and values over cp"
        if self.kind is RingAttention:
            back = (others + 1, (others + 1) * gradients)
            return {f"{keys}, round, twice": (2 * others, 2 * others * held), f"{keys}, gradients round": back}
        return {f"{keys}, gathered, twice": (2, 2 * others * held), f"{keys}, gradients": (1, others * gradients)}


class SequenceAttention:
    """Heads are dealt to the ranks (sp_size): each computes torch's own attention over the whole sequence."""

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout) -> None:
        self.group, self.layout = group, layout
        self.masks = MaskReader(layout)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
        ranks, rows, heads = self.layout.ranks, query.shape[2], query.shape[1]
        mask, causal = self._mask(call, rows, heads)
        query, key, value = spread_inputs(query, key, value, self.group, ranks)
        out = plain_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=call.dropout,
            is_causal=causal,
            scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return split_rows(out, self.group, ranks)

    def _mask(self, call: Call, rows: int, heads: int) -> tuple[torch.Tensor | None, bool]:
        """(mask over the whole sequence for this rank's heads, whether attention is causal instead of it)."""
        mask, causal, layout = call.mask, call.causal, self.layout
        length = rows * layout.ranks
        if mask is not None and mask.shape[-1] == length:
            if mask.dim() >= 3 and mask.shape[-3] == heads:
                mask = mask.unflatten(-3, (layout.ranks, -1)).select(-4, layout.rank)
            if call.keep is not None:
                raise ConfigurationError("an attn_mask and a padding mask are given both: put the padding in the mask")
            return mask, causal
        if mask is not None:
            causal = self.masks.is_causal(mask, rows)
        keep = call.padding(causal)
        if keep is None:
            return None, causal
        seen = layout.join(list(keep), 1)[:, None, None]
        if causal:
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
        return seen, False

    def sent(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sent:
        """What a rank sends for one attention of these sizes and its backward."""
        ranks, copies = self.layout.ranks, copies_of_heads(key.shape[1], self.layout.ranks)
        out = query.nbytes // query.shape[-1] * value.shape[-1]
        moved = query.nbytes + out + copies * (key.nbytes + value.nbytes)
        together = query.shape[-1] == key.shape[-1] == value.shape[-1]
        messages = 4 if together else 8
        return {"heads for rows over sp, there and back": (messages, 2 * moved * (ranks - 1) // ranks)}

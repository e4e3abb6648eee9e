# SPDX-License-Identifier: Apache-2.0
"""torch's attention of a rank's rows to the full sequence: the arguments of a call, and the methods that run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...core.errors import ConfigurationError
from .blocks import Block, accumulator
from .exchange import Exchange, ExchangedAttention, Gather, Ring
from .masks import MaskReader, Visibility
from .random import ShardRandom
from .shard import SequenceLayout
from .ulysses import copies_of_heads, split_rows, spread_inputs

# torch's function, bound before it is patched.
plain_attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

# Kind of communication -> (messages, bytes).
Sent = dict[str, tuple[int, int]]


@dataclass
class AttentionCall:
    """The arguments of a call other than query, key and value, and which keys of the sequence are padding."""

    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    # (ranks, batch, rows): the keys of each rank that are not padding; None for all.
    keep: torch.Tensor | None = None
    # Padding comes after all tokens and has no labels: under a causal mask no token sees it.
    padded_behind: bool = False
    # Whether queries were (batch, rows, width): the first of three dimensions of a mask is then the batch.
    flat: bool = False

    def padding(self, causal: bool) -> torch.Tensor | None:
        """Return which keys are not padding; None if there is no padding, or if a causal mask hides it."""
        return None if causal and self.padded_behind else self.keep


class ContextAttention:
    """Keys and values are exchanged (cp_size): with `rotate` round a ring, otherwise in one all-gather."""

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout, rotate: bool) -> None:
        self.group = group
        self.layout = layout
        self.method: type[Ring] | type[Gather] = Ring if rotate else Gather
        self.masks: MaskReader = MaskReader(layout, group)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute the attention of this rank's rows to the keys of all ranks."""
        layout = self.layout
        if call.dropout > 0.0:
            raise ConfigurationError(
                f"dropout_p={call.dropout} inside attention is not computed under {layout.size}={layout.ranks}: the "
                "ranks would have to agree on what is dropped. Set the attention's dropout to 0 (attention_dropout of "
                "transformers' configurations), or split with sp_size, which computes complete rows."
            )
        sees = Visibility(call.causal) if call.mask is None else self.masks.visibility(call.mask, query, call.flat)
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        keep = call.padding(sees.causal)
        block = Block(scale, sees.causal)
        exchange = Exchange(self.method, self.group, layout, block, keep, sees.of(query.dtype))
        # The kernels read rows; keys and values are sent as contiguous messages anyway.
        query = query if query.stride(-1) == 1 else query.contiguous()
        out: torch.Tensor = ExchangedAttention.apply(query, key, value, exchange)
        return out

    def sent(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sent:
        """What a rank sends for one attention of these sizes and its backward."""
        others, size = self.layout.ranks - 1, key.nbytes + value.nbytes
        gradients = (key.numel() + value.numel()) * accumulator(key.dtype).itemsize
        keys = "keys and values over cp"
        if self.method is Ring:
            back = (others + 1, (others + 1) * gradients)
            return {f"{keys}, round, twice": (2 * others, 2 * others * size), f"{keys}, gradients round": back}
        return {f"{keys}, gathered, twice": (2, 2 * others * size), f"{keys}, gradients": (1, others * gradients)}


class SequenceAttention:
    """Heads are split over the ranks (sp_size): each runs torch's attention over the full sequence."""

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout, random: ShardRandom | None = None) -> None:
        self.group = group
        self.layout = layout
        self.random: ShardRandom = random or ShardRandom(layout.rank, "cpu")
        self.masks: MaskReader = MaskReader(layout, group)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute the attention of this rank's heads over the full sequence."""
        ranks = self.layout.ranks
        mask, causal = self._mask(call, query)
        query, key, value = spread_inputs(query, key, value, self.group, ranks)
        groups = query.shape[1] // key.shape[1]
        if mask is not None and groups > 1:
            # With a mask, torch's memory-efficient kernels need as many key heads as query heads.
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        # Each rank draws its own dropout.
        with self.random.seeded() if call.dropout > 0.0 else contextlib.nullcontext():
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

    def _mask(self, call: AttentionCall, query: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """(mask over the full sequence for this rank's heads, whether attention is causal instead)."""
        sees = Visibility(call.causal) if call.mask is None else self.masks.full(call.mask, query, call.flat)
        mask, causal, keep = sees.mask, sees.causal, call.padding(sees.causal)
        if keep is None:
            return mask, causal
        seen = self.layout.join(list(keep), 1)[:, None, None]
        if causal:
            length = query.shape[2] * self.layout.ranks
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
        elif mask is not None and mask.dtype != torch.bool:
            return mask.masked_fill(~seen, float("-inf")), False
        return seen if mask is None else seen & mask, False

    def sent(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sent:
        """What a rank sends for one attention of these sizes and its backward."""
        ranks, copies = self.layout.ranks, copies_of_heads(key.shape[1], self.layout.ranks)
        out = query.nbytes // query.shape[-1] * value.shape[-1]
        moved = query.nbytes + out + copies * (key.nbytes + value.nbytes)
        together = query.shape[-1] == key.shape[-1] == value.shape[-1]
        messages = 4 if together else 8
        return {"heads for rows over sp, there and back": (messages, 2 * moved * (ranks - 1) // ranks)}

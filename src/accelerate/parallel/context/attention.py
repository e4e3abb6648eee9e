# SPDX-License-Identifier: Apache-2.0
"""torch's attention of a rank's rows to the full sequence."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right

from ...core import devices
from ...core.documents import Documents, joined
from ...torch_internals.attention import plain_attention
from .exchange import copies_of_heads, full_keys, split_rows, spread_inputs, sum_dtype
from .masks import MaskReader
from .shard import SequenceLayout

# Kind of communication -> (messages, bytes).
Sent = dict[str, tuple[int, int]]


@dataclass
class AttentionCall:
    """The arguments of a call other than query, key and value, and which keys of the sequence are padding."""

    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    # (batch, length): the keys of the sequence that are not padding; None for all.
    keep: torch.Tensor | None = None
    # The documents of packed rows: keys of other ones are hidden.
    documents: Documents | None = None
    # Whether queries were (batch, rows, width): the first of three dimensions of a mask is then the batch.
    flat: bool = False


class SplitAttention:
    """Attention of a rank's part of a sequence to all of it, by torch's function on tensors of the full sequence.

    Args:
        group: the ranks that share each sequence.
        layout: how they share it.
        random: what dropout draws from: each rank drops other weights.
    """

    def __init__(
        self, group: dist.ProcessGroup, layout: SequenceLayout, random: ShardRandom
    ) -> None:
        self.group = group
        self.layout = layout
        self.random = random
        self.masks: MaskReader = MaskReader(layout, group)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """The output for this rank's rows. All are (batch, heads, rows, width)."""
        raise NotImplementedError

    def sent(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sent:
        """What a rank sends for one attention of these sizes and its backward."""
        raise NotImplementedError

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        mask: torch.Tensor | None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Torch's attention to keys of the full sequence."""
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and (mask is not None or query.dtype not in (torch.float16, torch.bfloat16)):
            # Of torch's memory-efficient kernels only flash attention takes fewer key heads than query heads.
            key, value = (
                key.repeat_interleave(groups, dim=1),
                value.repeat_interleave(groups, dim=1),
            )
        random: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if call.dropout > 0.0:
            random = self.random.seeded()
        with random:
            return plain_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=call.dropout,
                is_causal=causal,
                scale=call.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )

    def only_shown(
        self, mask: torch.Tensor | None, causal: bool, call: AttentionCall, rows: torch.Tensor
    ) -> tuple[torch.Tensor | None, bool]:
        """(the mask without padding and other documents, whether attention is causal instead), at these rows."""
        shown = call.keep
        if shown is not None:
            shown = shown[:, None, None]
        if call.documents is not None:
            numbers = call.documents.numbers
            is_same = numbers[:, None, rows, None] == numbers[:, None, None]
            shown = joined(shown, is_same)
        if shown is None:
            return mask, causal
        if causal:
            shown = shown & (rows[:, None] >= torch.arange(shown.shape[-1], device=rows.device))
        return joined(mask, shown), False


class ContextAttention(SplitAttention):
    """Each rank gets the keys and values of all ranks, and computes its rows for all heads (cp_size).

    `all_to_all`: they are exchanged directly, otherwise by all-gather and reduce-scatter.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: SequenceLayout,
        random: ShardRandom,
        all_to_all: bool = False,
    ) -> None:
        super().__init__(group, layout, random)
        self.all_to_all = all_to_all
        # Makes the mask of a chunk from the numbers of its rows and keys.
        self.causal_mask: Callable[[int, int], torch.Tensor | None] = causal_lower_right

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute the attention of this rank's rows to the keys of all ranks."""
        if call.mask is None:
            mask = None
            causal = call.causal
        else:
            mask, causal = self.masks.own_rows(call.mask, query, call.flat)
        key, value = full_keys(key, value, self.group, self.layout, self.all_to_all)
        rows = self.layout.rows(key.shape[2], query.device)
        mask, causal = self.only_shown(mask, causal, call, rows)
        if not causal:
            return self.attend(query, key, value, call, mask)
        # Each of this rank's chunks sees the keys up to its own end.
        outputs = []
        size = key.shape[2] // self.layout.multiple
        chunks = self.layout.chunks(self.layout.rank)
        for chunk, part in zip(chunks, query.split(size, dim=2), strict=True):
            end = (chunk + 1) * size
            keys = key[:, :, :end]
            values = value[:, :, :end]
            mask = self.causal_mask(size, end)
            outputs.append(self.attend(part, keys, values, call, mask))
        return torch.cat(outputs, dim=2)

    def sent(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sent:
        """What a rank sends for one attention of these sizes and its backward."""
        others = self.layout.ranks - 1
        gradients = (key.numel() + value.numel()) * sum_dtype(key.dtype).itemsize
        return {
            "keys and values over cp": (1, others * (key.nbytes + value.nbytes)),
            "gradients of keys and values over cp": (1, others * gradients),
        }


class SequenceAttention(SplitAttention):
    """Heads are split over the ranks: each computes all rows of the sequence for some of them (sp_size)."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute the attention of this rank's heads over the full sequence."""
        ranks = self.layout.ranks
        if call.mask is None:
            mask = None
            causal = call.causal
        else:
            mask, causal = self.masks.own_heads(call.mask, query, call.flat)
        query, key, value = spread_inputs(query, key, value, self.group, ranks)
        rows = torch.arange(query.shape[2], device=query.device)
        mask, causal = self.only_shown(mask, causal, call, rows)
        out = self.attend(query, key, value, call, mask, causal)
        return split_rows(out, self.group, ranks)

    def sent(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sent:
        """What a rank sends for one attention of these sizes and its backward."""
        ranks = self.layout.ranks
        copies = copies_of_heads(key.shape[1], ranks)
        out = query.nbytes // query.shape[-1] * value.shape[-1]
        moved = query.nbytes + out + copies * (key.nbytes + value.nbytes)
        together = query.shape[-1] == key.shape[-1] == value.shape[-1]
        messages = 4 if together else 8
        return {
            "heads for rows over sp, there and back": (messages, 2 * moved * (ranks - 1) // ranks)
        }


class ShardRandom:
    """Streams seeded from the generators' states and the rank in the sequence: a checkpoint needs none of them.

    Afterwards the generators are where they were. Where something was drawn they are one number further, equally on
    all ranks, so that the next streams differ.
    """

    def __init__(self, rank: int, device_type: str) -> None:
        self.place: bytes = rank.to_bytes(8, "little")
        self.kinds: tuple[str, ...] = ("cpu",) if device_type == "cpu" else ("cpu", device_type)

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """A block that draws from this shard's streams."""
        sources = [(kind, devices.generator_module(kind)) for kind in self.kinds]
        before = [source.get_rng_state() for _, source in sources]
        begun = []
        for (kind, source), state in zip(sources, before, strict=True):
            # Of one device: torch.manual_seed seeds all of them.
            seeder = torch.default_generator if kind == "cpu" else source
            seeder.manual_seed(self._seed(state))
            begun.append(source.get_rng_state())
        try:
            yield
        finally:
            for (kind, source), state, first in zip(sources, before, begun, strict=True):
                drawn = not torch.equal(source.get_rng_state(), first)
                source.set_rng_state(state)
                if drawn:
                    torch.empty((), device=kind).uniform_()

    def _seed(self, state: torch.Tensor) -> int:
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, salt=self.place)
        return int.from_bytes(digest.digest(), "little") >> 1

# SPDX-License-Identifier: Apache-2.0
"""torch's attention of a rank's rows to the full sequence: the methods that run it, and where they replace it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from ...collectives import transport
from ...core import devices
from ...core.errors import ConfigurationError
from .blocks import Block, accumulator
from .exchange import Exchange, ExchangedAttention, Gather, Ring
from .masks import MaskReader, Visibility
from .shard import SequenceLayout

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


class _InGroup(FunctionCtx):
    group: dist.ProcessGroup


class _Exchange(torch.autograd.Function):
    """`all_to_all_single` of equal shards along dimension 0; its gradient is exchanged in reverse."""

    @staticmethod
    def forward(ctx: _InGroup, shards: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(shards, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _InGroup, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(shards: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    shards = shards.contiguous()
    received = torch.empty_like(shards)
    transport.exchange(received, shards, group)
    return received


def split_heads(heads: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """(batch, heads, rows of this rank, width) -> (batch, heads / ranks, all rows, width)."""
    shards = heads.unflatten(1, (ranks, -1)).movedim(1, 0)
    received: torch.Tensor = _Exchange.apply(shards, group)
    return received.movedim(0, 2).flatten(2, 3)


def split_rows(heads: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """The way back: (batch, heads / ranks, all rows, width) -> (batch, heads, rows of this rank, width)."""
    shards = heads.unflatten(2, (ranks, -1)).movedim(2, 0)
    received: torch.Tensor = _Exchange.apply(shards, group)
    return received.movedim(0, 1).flatten(1, 2)


def copies_of_heads(shared: int, ranks: int) -> int:
    """To how many ranks a key head is sent, so that every rank has the key heads of its queries."""
    return math.lcm(shared, ranks) // shared


def spread_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value with all rows of this rank's heads; in one message where their widths are equal.

    Where there are fewer key heads than ranks, each is sent to all ranks that have queries for it.
    Source: S. A. Jacobs et al., "DeepSpeed Ulysses" (2023).
    """
    heads, shared = query.shape[1], key.shape[1]
    if heads % ranks:
        raise ConfigurationError(
            f"sp_size={ranks} does not divide the {heads} attention heads of a layer: each rank takes some of them. "
            "Choose a divisor, or split with cp_size, which does not split heads."
        )
    copies = copies_of_heads(shared, ranks)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] or not query.dtype == key.dtype == value.dtype:
        return tuple(split_heads(tensor, group, ranks) for tensor in (query, key, value))  # type: ignore[return-value]
    # A rank's heads of all three lie next to each other.
    joined = torch.cat([tensor.unflatten(1, (ranks, -1)) for tensor in (query, key, value)], dim=2)
    together = split_heads(joined.flatten(1, 2), group, ranks)
    query, key, value = together.split([heads // ranks, key.shape[1] // ranks, key.shape[1] // ranks], dim=1)
    return query, key, value


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


# Makes a replacement from the function that it replaces.
Wrapper = Callable[[Any], Any]

_NAME = "scaled_dot_product_attention"


def aliases(model: nn.Module) -> set[tuple[str, str]]:
    """(module, name) of each global of the modules that define a model's classes which is torch's attention."""
    sources = {source.__module__ for part in model.modules() for source in type(part).__mro__}
    return {
        (source, name)
        for source in sources
        if source in sys.modules and not source.startswith("torch.")
        for name, value in vars(sys.modules[source]).items()
        if value is plain_attention
    }


class AttentionPatch:
    """Replaces torch's attention while at least one block is open."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self.attend: Callable[..., torch.Tensor] = attend
        self.places: set[tuple[str, str]] = {(F.__name__, _NAME)}
        # Other functions that are replaced meanwhile: (module, name) -> wrapper.
        self.others: dict[tuple[str, str], Wrapper] = {}
        self._open_blocks = 0
        self._replaced: list[tuple[ModuleType, str, object]] = []

    def open(self) -> None:
        """Replace the functions when the first block opens."""
        self._open_blocks += 1
        if self._open_blocks > 1:
            return
        for source, name in self.places:
            self._replace(source, name, self._function())
        for (source, name), wrapper in self.others.items():
            former = getattr(sys.modules.get(source), name, None)
            if former is not None:
                self._replace(source, name, wrapper(former))

    def close(self) -> None:
        """Restore the functions when the last block closes."""
        self._open_blocks -= 1
        if self._open_blocks:
            return
        while self._replaced:
            module, name, value = self._replaced.pop()
            setattr(module, name, value)

    def _replace(self, source: str, name: str, value: object) -> None:
        module = sys.modules[source]
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def _function(self) -> Callable[..., torch.Tensor]:
        # A graph break in a compiled model: collectives inside an autograd function are not traced.
        if "torch._dynamo" in sys.modules and not hasattr(self.attend, "_torchdynamo_disable"):
            self.attend = torch.compiler.disable(self.attend)
        return self.attend

# SPDX-License-Identifier: Apache-2.0
"""The blocks in which sequences are split over ranks, and what they do to the models that are called in them."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...config.parallel import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from ...core.errors import ConfigurationError
from ...logging import get_logger
from ...parallelism_config import ParallelismConfig
from ..prepared import CommunicationVolume
from . import transformers_masks, transformers_models, transformers_trainer
from .attention import AttentionCall, ContextAttention, Sent, SequenceAttention, plain_attention
from .random import PartRandom
from .routing import Route, aliases
from .shard import SequenceLayout, common_length, split_in_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = get_logger(__name__)


@dataclass
class SequenceRegion:
    """One batch whose sequences are split: how long they are, what was split, and what was computed on them."""

    layout: SequenceLayout
    group: dist.ProcessGroup
    length: int
    # Tensors that were split -> what they held before; of those that are still somewhere.
    whole: WeakTensorKeyDictionary
    # Whether inputs that are not split are a mistake: not where a loader split the batch, and others are whole.
    strict: bool = True
    has_tables: bool = False
    calls: int = 0
    keep: torch.Tensor | None = None
    padded_behind: bool = False
    # Whether what rows of padding give may be used: then they see what they see in a whole sequence.
    padding_counts: bool = True
    # Sequences that are packed in rows, (positions, number of the sequence) of all columns; False where there are
    # none, None where nothing told. And whether the mask that is built next is one of packed sequences.
    packed: tuple[torch.Tensor, torch.Tensor] | Literal[False] | None = None
    # Whether a loader added positions that count every row.
    counted: bool = False
    asks_packing: bool = False
    passes: dict[int, int] = field(default_factory=dict)
    sent: Sent = field(default_factory=dict)
    _positions: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows of each sequence this rank holds."""
        return self.length // self.layout.ranks

    def whole_of(self, part: torch.Tensor) -> torch.Tensor | None:
        """What a tensor held before it was split; None for any other tensor."""
        found: torch.Tensor | None = self.whole.get(part)
        return found

    def positions(self, device: torch.device) -> torch.Tensor:
        """The places of this rank's rows in the whole sequence: (rows,)."""
        if self._positions is None or self._positions.device != device:
            self._positions = self.layout.rows(self.length, device)
        return self._positions


class ContextParallel:
    """A sequence over the ranks of a group.

    Args:
        group: the ranks that share each sequence. size: the field that asked for it, cp_size or sp_size.
        strategy: how context-parallel ranks reach each other's keys: `allgather`, or `alltoall` (round a ring).
        length: what every sequence has to have, where that was promised. device_type: where models compute.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: str,
        strategy: str | None = None,
        length: int | None = None,
        device_type: str = "cpu",
    ) -> None:
        self.group = group
        self.length = length
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.layout = SequenceLayout(size, ranks, rank, balanced=size == "cp_size")
        self.random = PartRandom(rank, device_type)
        self.attention: ContextAttention | SequenceAttention
        if size == "cp_size":
            self.attention = ContextAttention(group, self.layout, rotate=strategy == "alltoall")
        else:
            self.attention = SequenceAttention(group, self.layout, self.random)
            transformers_trainer.count_whole_batches()
        self.route = Route(self._attend)
        self.route.others.update(transformers_masks.hooks(lambda: self.region))
        if not self.layout.balanced:
            self.route.others.update(transformers_trainer.hooks())
        self._block: SequenceRegion | None = None
        # Of batches that a loader split: that of the last or present forward, and all that are not used up.
        self._batch: SequenceRegion | None = None
        self._pulled = WeakTensorKeyDictionary()
        self._last: SequenceRegion | None = None
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Of each forward that is going on: the model's id, and what closes its random streams.
        self._drawing: list[tuple[int, contextlib.ExitStack]] = []
        # Whether the last forward was on parts of sequences.
        self.was_split = False
        self._sent: Sent = {}
        self._said = False

    @property
    def region(self) -> SequenceRegion | None:
        """What is split now: by the user's block, else by a loader."""
        return self._block or self._batch

    @property
    def splitting(self) -> bool:
        """Whether a block is open, or batches of a loader are about."""
        return self._block is not None or self._batch is not None or len(self._pulled) > 0

    @classmethod
    def of_layout(cls, layout: ParallelismConfig, mesh: DeviceMesh | None) -> ContextParallel | None:
        """What drives the sequence's dimension of a layout; None where it has none."""
        if mesh is None or not (layout.cp_enabled or layout.sp_enabled):
            return None
        if layout.cp_enabled:
            options = layout.cp_handler or TorchContextParallelConfig()
            group = mesh["cp"].get_group()
            return cls(group, "cp_size", options.cp_comm_strategy, device_type=mesh.device_type)
        promised = layout.sp_handler or DeepSpeedSequenceParallelConfig()
        if promised.sp_attn_implementation not in (None, "sdpa"):
            raise ConfigurationError(
                f"sp_attn_implementation={promised.sp_attn_implementation!r} under sp_size={layout.sp_size}: models "
                "attend through torch's scaled_dot_product_attention, which takes flash kernels where there are any. "
                "Use 'sdpa' or None."
            )
        fixed = None if promised.sp_seq_length_is_variable else promised.sp_seq_length
        return cls(mesh["sp"].get_group(), "sp_size", length=fixed, device_type=mesh.device_type)

    def _check_length(self, length: int, what: str) -> None:
        if self.length not in (None, length):
            raise ConfigurationError(
                f"{what} has sequences of {length}: sp_seq_length={self.length}, sp_seq_length_is_variable=False"
            )
        self.layout.check(length, what)

    # -- blocks

    @contextlib.contextmanager
    def open(
        self, buffers: list[torch.Tensor], dimensions: list[int], no_restore: set[torch.Tensor]
    ) -> Iterator[None]:
        """A block in which `buffers` hold this rank's rows, and attention of these rows is to the whole sequence."""
        if self._block is not None:
            raise ConfigurationError("maybe_context_parallel is open already: its blocks are not nested")
        length = common_length(self.layout, buffers, dimensions, no_restore)
        self._check_length(length, "buffer 0 of maybe_context_parallel")
        with contextlib.ExitStack() as stack:
            whole = stack.enter_context(split_in_place(self.layout, buffers, dimensions, no_restore))
            self.route.open()
            stack.callback(self.route.close)
            stack.callback(self._end_block)
            self._block = self._region(length, buffers, whole)
            yield

    def _end_block(self) -> None:
        if self._block is not None:
            self._last = replace(self._block, strict=False, whole=WeakTensorKeyDictionary())
        self._block = None
        self.attention.masks.forget()

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around a backward: what is computed again in it, outside of the block, attends as it did in the block."""
        if self.region is not None or self._last is None:
            yield
            return
        with self.feed():
            self._batch = self._last
            yield

    def _region(
        self, length: int, parts: Iterable[torch.Tensor], whole: Iterable[torch.Tensor], strict: bool = True
    ) -> SequenceRegion:
        parts = list(parts)
        # Whole tensors other than numbers of tokens are not needed again: they would only take memory.
        known = WeakTensorKeyDictionary()
        for part, full in zip(parts, whole, strict=True):
            if not full.is_floating_point() and not full.is_complex():
                known[part] = full
        return SequenceRegion(self.layout, self.group, length, known, strict, has_tables=len(known) < len(parts))

    @contextlib.contextmanager
    def feed(self) -> Iterator[None]:
        """A block in which batches that `split_batch` gave are computed on."""
        self.route.open()
        try:
            yield
        finally:
            self._batch = None
            self._pulled.clear()
            self.attention.masks.forget()
            self.route.close()

    def split_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch of whole sequences: every (batch, length) tensor split, positions added.

        `labels` become `shift_labels`: row i has the label of the next row, which may be another rank's.
        """
        found = dict(batch)
        length, device, rows = _sequences(found)
        self._check_length(length, "the batch")
        counted = found.get("position_ids") is None
        if counted:
            found["position_ids"] = torch.arange(length, device=device).expand(rows, -1)
        labels = found.pop("labels", None)
        if labels is not None and found.get("shift_labels") is None:
            found["shift_labels"] = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
        split = {name: value for name, value in found.items() if _is_sequence(value, length)}
        parts = {name: self.layout.take(value, 1) for name, value in split.items()}
        self._batch = self._region(length, parts.values(), split.values(), strict=False)
        self._batch.counted = counted
        for part in parts.values():
            self._pulled[part] = self._batch
        return {**found, **parts}

    def of_inputs(self, given: Mapping[str, Any], training: bool) -> SequenceRegion | None:
        """What is split of a forward's inputs. A loop may have taken several batches from its loader, or others.

        Inputs that are copies of a batch's are known by their length, in training: an evaluation's may be whole.
        """
        if self._block is None and self._pulled and not self._drawing:
            tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
            found = [self._pulled[tensor] for tensor in tensors if tensor in self._pulled]
            if not found and training:
                sizes = {value.shape[1] for value in tensors if value.dim() > 1}
                found = [region for region in self._pulled.values() if region.rows in sizes]
            self._batch = found[0] if found else None
            self.attention.masks.forget()
        return self.region

    # -- models

    def check(self, model: nn.Module) -> None:
        """Raises PrepareError for a transformers model whose layers do not attend to the whole sequence."""
        for found in _outermost(model):
            transformers_models.check_supported(found, f"{self.layout.size}={self.layout.ranks}")

    def watch(self, model: nn.Module) -> None:
        """Have a prepared model's forward give what a rank cannot know from its rows alone; it has to attend."""
        if model in self._watched:
            return
        self._watched.add(model)
        plain = getattr(model, "_orig_mod", model)
        self.route.places |= aliases(plain)
        inner = _outermost(plain)
        for target in [model] + [found for found in inner if found is not plain]:
            known = plain if target is model else target
            hook = _Inputs(self, inspect.signature(known.forward), known if known in inner else None)
            target.register_forward_pre_hook(hook, with_kwargs=True)
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=False)
        model.register_forward_hook(self._sync_rng_state, always_call=True)

    def _sync_rng_state(self, model: nn.Module, args: Any, output: Any) -> None:
        # A hook before `_enter` may have failed.
        if self._drawing and self._drawing[-1][0] == id(model):
            self._drawing.pop()[1].close()

    def _enter(self, model: nn.Module, args: Any) -> None:
        region = self.region
        streams = contextlib.ExitStack()
        self._drawing.append((id(model), streams))
        if region is not None:
            streams.enter_context(self.random.own())
        if region is not None:
            region.passes[id(model)] = region.calls

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        region = self.region
        if region is not None and region.sent:
            # Taken here: what is computed again in the backward is another matter.
            self._sent, region.sent = region.sent, {}
        before = None if region is None else region.passes.pop(id(model), None)
        self.was_split = region is not None and before is not None and region.calls > before
        if region is None or before is None or not region.strict or region.calls > before:
            return
        size = f"{self.layout.size}={self.layout.ranks}"
        raise ConfigurationError(
            f"no attention of {type(getattr(model, '_orig_mod', model)).__name__} went through {size}: each rank "
            "would attend to its own part of the sequence only. Attend through torch.nn.functional."
            "scaled_dot_product_attention (attn_implementation='sdpa' in transformers); call a model without "
            "attention outside of the block."
        )

    def say_positions_missing(self, model: nn.Module, region: SequenceRegion) -> None:
        if self._said or region.has_tables:
            return
        self._said = True
        logger.warning(
            f"{type(model).__name__}.forward takes no position_ids: if the model counts positions by itself, every "
            "rank counts from 0. Have it take position_ids, or give its table of positions as one of the buffers."
        )

    # -- attention

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """In the place of torch's function, with its arguments."""
        region = self.region
        if region is None or (not region.strict and query.shape[-2] != region.rows):
            return plain_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        _check_shapes(query, key, value, region, enable_gqa)
        if attn_mask is not None and is_causal:
            raise ConfigurationError("scaled_dot_product_attention has an attn_mask and is_causal=True: give one")
        region.calls += 1
        flat = query.dim() == 3
        unseen = region.padded_behind and not region.padding_counts
        call = AttentionCall(attn_mask, dropout_p, is_causal, scale, region.keep, unseen, flat)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            # As torch's own function under autocast: rotated queries may be float32 beside values of low precision.
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if flat:
            return self._compute(region, query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), call).squeeze(1)
        return self._compute(region, query, key, value, call)

    def _compute(
        self, region: SequenceRegion, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        for what, (messages, sent) in self.attention.sent(query, key, value).items():
            before = region.sent.get(what, (0, 0))
            region.sent[what] = (before[0] + messages, before[1] + sent)
        return self.attention(query, key, value, call)

    def communication_volume(self, backwards: int) -> list[CommunicationVolume]:
        """What attention sends in a step of so many backwards, as in the last batch; nothing before the first."""
        return [
            CommunicationVolume(what, backwards * number, backwards * sent)
            for what, (number, sent) in self._sent.items()
        ]


class _Inputs:
    """A forward pre-hook: what has to be known of the whole sequence is added to a model's arguments."""

    def __init__(self, parallel: ContextParallel, signature: inspect.Signature, special: nn.Module | None) -> None:
        self.parallel, self.signature, self.special = parallel, signature, special
        self.takes_positions = "position_ids" in signature.parameters
        kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
        self.rest = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.parallel.splitting:
            return None
        try:
            bound = self.signature.bind_partial(*args, **kwargs)
        except TypeError:
            return None  # the forward itself says what is wrong with its arguments
        given = {**bound.arguments, **bound.arguments.get(self.rest, {})}
        region = self.parallel.of_inputs(given, model.training)
        if region is None:
            return None
        split = _split_input(given, region)
        if split is None and not region.strict:
            return None
        changed = {}
        if self.takes_positions and (given.get("position_ids") is None or region.counted):
            if split is None:
                raise ConfigurationError(
                    f"no input of {type(model).__name__} is (batch, {region.rows}, ...), as each rank holds "
                    f"{region.rows} of the {region.length} rows of a sequence: are all inputs among the buffers of "
                    "maybe_context_parallel? Where the sequence is another dimension, give position_ids too."
                )
            own = None if self.special is None else transformers_models.own_positions(self.special, given, region)
            changed["position_ids"] = region.positions(split.device).expand(split.shape[0], -1) if own is None else own
        elif not self.takes_positions and self.special is not None and not region.has_tables:
            raise ConfigurationError(
                f"{type(model).__name__}.forward takes no position_ids: it would count the positions of each rank's "
                f"rows from 0, and {region.layout.size}={region.layout.ranks} would compute something else. Train it "
                "without, or give its table of positions as one of the buffers of maybe_context_parallel."
            )
        elif not self.takes_positions and not self.rest:
            self.parallel.say_positions_missing(model, region)
        if self.special is not None:
            changed.update(transformers_models.adapt_inputs(self.special, given, region))
        if not changed:
            return None
        for name in [name for name in changed if name in bound.arguments and name not in kwargs]:
            bound.arguments[name] = changed.pop(name)
        return bound.args[: len(args)], {**kwargs, **changed}


def _split_input(given: Mapping[str, Any], region: SequenceRegion) -> torch.Tensor | None:
    """The tensor among a model's inputs that is (batch, this rank's rows, ...), else None."""
    usual = [value for name in ("input_ids", "inputs_embeds") if (value := given.get(name)) is not None]
    return next((value for value in usual or given.values() if _is_sequence(value, region.rows)), None)


def _outermost(model: nn.Module) -> list[nn.Module]:
    """The transformers models in a model that are not inside another."""
    if transformers_models.is_transformers_model(model):
        return [model]
    return [found for child in model.children() for found in _outermost(child)]


def _is_sequence(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length


def _sequences(batch: Mapping[str, Any]) -> tuple[int, torch.device, int]:
    """(length, device, batch size) of a batch's token ids (or embeddings)."""
    for name in ("input_ids", "inputs_embeds"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value.shape[1], value.device, value.shape[0]
    raise ConfigurationError(
        f"a batch with {sorted(batch)} has no input_ids (or inputs_embeds) of shape (batch, sequence, ...): its "
        "sequences cannot be split. Split the batch yourself with maybe_context_parallel."
    )


def _check_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, region: SequenceRegion, enable_gqa: bool
) -> None:
    layout = region.layout
    size = f"{layout.size}={layout.ranks}"
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        raise ConfigurationError(
            f"attention under {size} takes (batch, heads, rows, width), got {tuple(query.shape)}, {tuple(key.shape)} "
            f"and {tuple(value.shape)}"
        )
    if query.shape[-2] != key.shape[-2] or key.shape[-2] != value.shape[-2]:
        raise ConfigurationError(
            f"attention of {query.shape[-2]} queries to {key.shape[-2]} keys under {size}: only self-attention over "
            "the split sequence is driven, no cross-attention and no cache of former keys (use_cache=False)"
        )
    if query.shape[-2] != region.rows:
        raise ConfigurationError(
            f"attention over {query.shape[-2]} rows under {size}, where each rank holds {region.rows} of the "
            f"{region.length} rows of a sequence: are all of the model's inputs among the buffers of "
            "maybe_context_parallel?"
        )
    if query.shape[0] != key.shape[0] or key.shape[:-1] != value.shape[:-1]:
        raise ConfigurationError(f"attention under {size}: batches and heads of keys and values differ")
    if query.dim() == 4 and query.shape[1] != key.shape[1] and (not enable_gqa or query.shape[1] % key.shape[1]):
        raise ConfigurationError(
            f"attention with {query.shape[1]} query heads and {key.shape[1]} key heads: heads are shared with "
            "enable_gqa=True, where the second number divides the first"
        )

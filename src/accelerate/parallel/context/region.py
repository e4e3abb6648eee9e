# SPDX-License-Identifier: Apache-2.0
"""Blocks in which sequences are split over ranks, loaders that split them, and the hooks of models called in them."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...config.parallel import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from ...core.errors import ConfigurationError
from ...core.modules import class_name
from ...data_loader.prepare import skip_first_batches
from ...logging import MultiProcessAdapter, get_logger
from ...parallelism_config import ParallelismConfig
from ...torch_internals import transformers_trainer
from ...torch_internals.attention import (
    PUBLIC_NAME,
    names_of_attention,
    plain_attention,
    public_attention,
    replaced_attention,
)
from ...torch_internals.compiled import uncompiled
from ..report.figures import CommunicationVolume
from . import transformers_models
from .attention import (
    AttentionCall,
    ContextAttention,
    Sent,
    SequenceAttention,
    ShardRandom,
    SplitAttention,
)
from .requirements import REQUIREMENTS
from .shard import SequenceLayout, common_length, split_in_place

logger: MultiProcessAdapter = get_logger(__name__)


@dataclass
class SequenceRegion:
    """One batch whose sequences are split: their length, the tensors that were split, and what was computed."""

    layout: SequenceLayout
    group: dist.ProcessGroup
    length: int
    # Tensors that were split -> their former content, as long as they are alive.
    full_tensors: WeakTensorKeyDictionary
    # Whether inputs that are not split are an error. A loop over a split loader may also compute full sequences.
    strict: bool = True
    has_tables: bool = False
    calls: int = 0
    # (ranks, batch, rows): the rows of each rank that are not padding; None for all.
    keep: torch.Tensor | None = None
    # Of sequences packed in rows: (positions, number of the sequence) of all columns; False without them, None before
    # a model has its inputs.
    packed: tuple[torch.Tensor, torch.Tensor] | Literal[False] | None = None
    # Whether a loader added positions that count every row.
    counted: bool = False
    passes: dict[int, int] = field(default_factory=dict)
    sent: Sent = field(default_factory=dict)
    _positions: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows of each sequence this rank has."""
        return self.length // self.layout.ranks

    @property
    def part(self) -> str:
        """What this rank has, for messages."""
        return f"{self.layout}: each rank has {self.rows} of the {self.length} rows of a sequence"

    def full_of(self, shard: torch.Tensor) -> torch.Tensor | None:
        """The content of a tensor before it was split; None for any other tensor."""
        full: torch.Tensor | None = self.full_tensors.get(shard)
        return full

    def positions(self, device: torch.device) -> torch.Tensor:
        """The positions of this rank's rows in the full sequence: (rows,)."""
        if self._positions is None or self._positions.device != device:
            self._positions = self.layout.rows(self.length, device)
        return self._positions


class ContextParallel:
    """Splits sequences over the ranks of a group.

    Args:
        group: the ranks that share each sequence.
        size: the option that requested it, cp_size or sp_size.
        strategy: how context-parallel ranks exchange keys: `allgather` or `alltoall`.
        length: the length that every sequence must have; None for any.
        device_type: where models compute.
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
        self.layout: SequenceLayout = SequenceLayout(size, ranks, rank, balanced=size == "cp_size")
        self.random: ShardRandom = ShardRandom(rank, device_type)
        self.attention: SplitAttention
        if size == "cp_size":
            self.attention = ContextAttention(
                group, self.layout, self.random, all_to_all=strategy == "alltoall"
            )
        else:
            self.attention = SequenceAttention(group, self.layout, self.random)
            transformers_trainer.count_full_batches(_splits_heads)
        # (module, name) of what is torch's attention where no sequence is split.
        self._names: set[tuple[str, str]] = {PUBLIC_NAME}
        self._open_blocks = 0
        self._replaced = contextlib.ExitStack()
        self._block: SequenceRegion | None = None
        # Batches that a loader split: that of the last or current forward, and all that are still alive.
        self._batch: SequenceRegion | None = None
        self._loader_batches = WeakTensorKeyDictionary()
        self._last: SequenceRegion | None = None
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # For each running forward: the model's id, and what closes its random streams.
        self._running: list[tuple[int, contextlib.ExitStack]] = []
        # Whether the last forward was on split sequences.
        self.was_split: bool = False
        self._sent: Sent = {}
        # Once, of a model that takes no position_ids.
        self.has_warned: bool = False

    @property
    def region(self) -> SequenceRegion | None:
        """The batch that is split now, by the user's block or else by a loader."""
        return self._block or self._batch

    @property
    def splitting(self) -> bool:
        """Whether a block is open, or batches of a split loader are in use."""
        return self._block is not None or self._batch is not None or len(self._loader_batches) > 0

    @classmethod
    def of_layout(
        cls, layout: ParallelismConfig, mesh: dist.DeviceMesh | None
    ) -> ContextParallel | None:
        """For the cp or sp dimension of a layout; None where it has none."""
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
        if promised.sp_seq_length_is_variable:
            fixed = None
        else:
            fixed = promised.sp_seq_length
        return cls(mesh["sp"].get_group(), "sp_size", length=fixed, device_type=mesh.device_type)

    @property
    def last_group(self) -> dist.ProcessGroup | None:
        """The ranks that had other tokens of the same samples in the last forward; None if no sequence was split."""
        if self.was_split:
            return self.group
        return None

    def split_loader(self, loader: object) -> object:
        """A loader whose batches have this rank's tokens; the same one where blocks split sequences (cp_size)."""
        if self.layout.balanced:
            return loader
        return SequenceLoader(loader, self)

    def _check_length(self, length: int, what: str) -> None:
        if self.length not in (None, length):
            raise ConfigurationError(
                f"{what} has sequences of {length}: sp_seq_length={self.length}, sp_seq_length_is_variable=False"
            )
        self.layout.check(length, what)

    # -- blocks

    def _open(self) -> None:
        """Have models attend to the full sequence, from the first open block on."""
        self._open_blocks += 1
        if self._open_blocks > 1:
            return
        attend = transformers_models.untraced(self.attend)
        self._replaced.enter_context(replaced_attention(attend, self._names))
        self._replaced.enter_context(transformers_models.registered(self))
        if not self.layout.balanced:
            self._replaced.enter_context(transformers_trainer.loss_over_the_mesh())

    def _close(self) -> None:
        self._open_blocks -= 1
        if not self._open_blocks:
            self._replaced.close()

    @contextlib.contextmanager
    def open(
        self, buffers: list[torch.Tensor], dimensions: list[int], no_restore: set[torch.Tensor]
    ) -> Iterator[None]:
        """A block in which `buffers` hold this rank's rows, and these attend to the full sequence."""
        if self._block is not None:
            raise ConfigurationError(
                "maybe_context_parallel is open already: its blocks are not nested"
            )
        length = common_length(self.layout, buffers, dimensions, no_restore)
        self._check_length(length, "buffer 0 of maybe_context_parallel")
        with contextlib.ExitStack() as stack:
            full_tensors = stack.enter_context(
                split_in_place(self.layout, buffers, dimensions, no_restore)
            )
            self._open()
            stack.callback(self._close)
            stack.callback(self._end_block)
            self._block = self._region(length, buffers, full_tensors)
            yield

    def _end_block(self) -> None:
        if self._block is not None:
            self._last = replace(self._block, strict=False, full_tensors=WeakTensorKeyDictionary())
        self._block = None

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Wrapper a backward: what is computed again in it, outside of the block, attends as it did in the block."""
        if self.region is not None or self._last is None:
            yield
            return
        with self.loader_block():
            self._batch = self._last
            yield

    def _region(
        self,
        length: int,
        pieces: Iterable[torch.Tensor],
        full_tensors: Iterable[torch.Tensor],
        strict: bool = True,
    ) -> SequenceRegion:
        pieces = list(pieces)
        # Only integer tensors (token ids, labels, positions) are needed again in full.
        integers = WeakTensorKeyDictionary()
        for part, full in zip(pieces, full_tensors, strict=True):
            if not full.is_floating_point() and not full.is_complex():
                integers[part] = full
        has_tables = len(integers) < len(pieces)
        return SequenceRegion(self.layout, self.group, length, integers, strict, has_tables)

    @contextlib.contextmanager
    def loader_block(self) -> Iterator[None]:
        """A block for computing on batches that `split_batch` returned."""
        self._open()
        try:
            yield
        finally:
            self._batch = None
            self._loader_batches.clear()
            self._close()

    def split_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's rows of a batch: every (batch, length) tensor split, positions added.

        `labels` become `shift_labels`: row i has the label of the next row, which may be another rank's.
        """
        inputs = dict(batch)
        length, device, samples = _sequences(inputs)
        self._check_length(length, "the batch")
        counted = inputs.get("position_ids") is None
        if counted:
            inputs["position_ids"] = torch.arange(length, device=device).expand(samples, -1)
        labels = inputs.pop("labels", None)
        if labels is not None and inputs.get("shift_labels") is None:
            inputs["shift_labels"] = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
        split = {name: value for name, value in inputs.items() if _is_sequence(value, length)}
        pieces = {name: self.layout.take(value, 1) for name, value in split.items()}
        self._batch = self._region(length, pieces.values(), split.values(), strict=False)
        self._batch.counted = counted
        for part in pieces.values():
            self._loader_batches[part] = self._batch
        return {**inputs, **pieces}

    def of_inputs(self, inputs: Mapping[str, object], training: bool) -> SequenceRegion | None:
        """The split batch that a forward's inputs belong to. A loop may have taken several batches from its loader.

        In training, inputs that are copies of a batch's are recognized by their length. In evaluation they may be full
        sequences.
        """
        if self._block is None and self._loader_batches and not self._running:
            tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
            regions = [
                self._loader_batches[tensor] for tensor in tensors if tensor in self._loader_batches
            ]
            if not regions and training:
                sizes = {value.shape[1] for value in tensors if value.dim() > 1}
                regions = [
                    region for region in self._loader_batches.values() if region.rows in sizes
                ]
            self._batch = regions[0] if regions else None
        return self.region

    # -- models

    def check(self, model: nn.Module) -> None:
        """Raises PrepareError for a transformers model whose layers would not attend to the full sequence."""
        for part in _outermost(model):
            for check in REQUIREMENTS:
                check(part, str(self.layout))

    def __deepcopy__(self, memo: object) -> ContextParallel:
        # The hooks of a copied model refer to that of the run.
        return self

    def watch(self, model: nn.Module) -> None:
        """Add hooks to a prepared model that complete its inputs and check that it attends to the full sequence."""
        if model in self._watched:
            return
        self._watched.add(model)
        plain = uncompiled(model)
        self._names |= names_of_attention(plain)
        inner = _outermost(plain)
        for target in [model] + [part for part in inner if part is not plain]:
            called = plain if target is model else target
            hook = _Inputs(self, called, called if called in inner else None)
            target.register_forward_pre_hook(hook, with_kwargs=True)
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=False)
        model.register_forward_hook(self._end_forward, always_call=True)

    def _end_forward(self, model: nn.Module, args: object, output: object) -> None:
        # A hook before `_enter` may have failed.
        if self._running and self._running[-1][0] == id(model):
            self._running.pop()[1].close()
            error = sys.exception() if output is None else None
            # torch's errors about shapes.
            if (
                self.region is not None
                and error is not None
                and type(error) in (RuntimeError, ValueError)
            ):
                error.add_note(
                    f"{self.region.part}. A table of positions or a mask of the full length does not fit: index it "
                    "with position_ids, or give it as one of the buffers of maybe_context_parallel."
                )

    def _enter(self, model: nn.Module, args: object) -> None:
        region = self.region
        streams = contextlib.ExitStack()
        self._running.append((id(model), streams))
        if region is not None:
            streams.enter_context(self.random.seeded())
            region.passes[id(model)] = region.calls

    def _leave(self, model: nn.Module, args: object, output: object) -> None:
        region = self.region
        if region is not None and region.sent:
            # Before the backward, which may recompute the forward.
            self._sent, region.sent = region.sent, {}
        if region is None:
            before = None
        else:
            before = region.passes.pop(id(model), None)
        self.was_split = region is not None and before is not None and region.calls > before
        if region is None or before is None or not region.strict or region.calls > before:
            return
        raise ConfigurationError(
            f"no attention of {class_name(uncompiled(model))} went through {self.layout}: each rank "
            "would attend to its own part of the sequence only. Attend through torch.nn.functional."
            "scaled_dot_product_attention (attn_implementation='sdpa' in transformers); call a model without "
            "attention outside of the block."
        )

    # -- attention

    def splits(self, query: torch.Tensor) -> bool:
        """Whether a query has this rank's rows of a sequence."""
        region = self.region
        return region is not None and (region.strict or query.shape[-2] == region.rows)

    def attend(
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
        """Takes the arguments of torch's function, which it replaces."""
        region = self.region
        if region is None or not self.splits(query):
            return plain_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        _check_shapes(query, key, value, region, enable_gqa)
        query, key, value = _broadcast(query, key, value)
        if attn_mask is not None and is_causal:
            raise ConfigurationError(
                "scaled_dot_product_attention has an attn_mask and is_causal=True: give one"
            )
        region.calls += 1
        flat = query.dim() == 3
        call = AttentionCall(attn_mask, dropout_p, is_causal, scale, region.keep, flat)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            # As torch's function under autocast: rotated queries may be float32 with values of low precision.
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if flat:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        for what, (messages, sent) in self.attention.sent(query, key, value).items():
            before = region.sent.get(what, (0, 0))
            region.sent[what] = (before[0] + messages, before[1] + sent)
        with public_attention():
            out = self.attention(query, key, value, call)
        if flat:
            return out.squeeze(1)
        return out

    def communication_volume(self, backwards: int) -> list[CommunicationVolume]:
        """What attention sends in a step of so many backwards, as in the last batch; empty before the first."""
        return [
            CommunicationVolume(what, backwards * number, backwards * sent)
            for what, (number, sent) in self._sent.items()
        ]


def _splits_heads(accelerator: Any) -> bool:
    strategy = getattr(accelerator, "strategy", None)
    sequence = getattr(strategy, "sequence", None)
    return sequence is not None and not sequence.layout.balanced


class _Inputs:
    """A forward pre-hook that adds to a model's arguments what depends on the full sequence."""

    def __init__(
        self, parallel: ContextParallel, called: nn.Module, special: nn.Module | None
    ) -> None:
        self.parallel, self.name, self.special = parallel, class_name(called), special
        self.signature = inspect.signature(called.forward)
        self.takes_positions = "position_ids" in self.signature.parameters
        self.takes_mask = "attention_mask" in self.signature.parameters
        kinds = {parameter.kind: name for name, parameter in self.signature.parameters.items()}
        self.keywords = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    def __call__(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        if not self.parallel.splitting:
            return None
        try:
            bound = self.signature.bind_partial(*args, **kwargs)
        except TypeError:
            return None  # the forward itself raises for its arguments
        inputs = {**bound.arguments, **bound.arguments.get(self.keywords, {})}
        region = self.parallel.of_inputs(inputs, model.training)
        if region is None:
            return None
        # The input that is (batch, this rank's rows, ...).
        usual = [
            value
            for name in ("input_ids", "inputs_embeds")
            if (value := inputs.get(name)) is not None
        ]
        split = next(
            (value for value in usual or inputs.values() if _is_sequence(value, region.rows)), None
        )
        if split is None and not region.strict:
            return None
        changed = {}
        if self.takes_positions and (inputs.get("position_ids") is None or region.counted):
            if split is None:
                raise ConfigurationError(
                    f"no input of {self.name} is (batch, {region.rows}, ...), and {region.part}: are all inputs among "
                    "the buffers of maybe_context_parallel? Where the sequence is another dimension, give "
                    "position_ids too."
                )
            changed["position_ids"] = region.positions(split.device).expand(split.shape[0], -1)
        elif not self.takes_positions and self.special is not None and not region.has_tables:
            raise ConfigurationError(
                f"{self.name}.forward takes no position_ids: it would count the positions of each rank's "
                f"rows from 0, and {region.layout} would compute something else. Train it "
                "without, or give its table of positions as one of the buffers of maybe_context_parallel."
            )
        elif (
            not self.takes_positions
            and not self.keywords
            and not region.has_tables
            and not self.parallel.has_warned
        ):
            self.parallel.has_warned = True
            logger.warning(
                f"{self.name}.forward takes no position_ids: if the model counts positions by itself, "
                "every rank counts from 0. Have it take position_ids, or give its table of positions as one of the "
                "buffers."
            )
        if self.special is not None:
            adapted = transformers_models.adapt_inputs(self.special, inputs, split, region)
            if not self.takes_mask:
                adapted.pop("attention_mask", None)
            changed.update(adapted)
        if not changed:
            return None
        for name in [name for name in changed if name in bound.arguments and name not in kwargs]:
            bound.arguments[name] = changed.pop(name)
        return bound.args[: len(args)], {**kwargs, **changed}


def _outermost(model: nn.Module) -> list[nn.Module]:
    """The transformers models in a model that are not inside another."""
    if transformers_models.is_transformers_model(model):
        return [model]
    return [part for child in model.children() for part in _outermost(child)]


def _is_sequence(value: object, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length


def _sequences(batch: Mapping[str, object]) -> tuple[int, torch.device, int]:
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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    region: SequenceRegion,
    enable_gqa: bool,
) -> None:
    size = str(region.layout)
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        raise ConfigurationError(
            f"attention under {size} takes (batch, heads, rows, width), got {tuple(query.shape)}, {tuple(key.shape)} "
            f"and {tuple(value.shape)}"
        )
    if query.shape[-2] != key.shape[-2] or key.shape[-2] != value.shape[-2]:
        raise ConfigurationError(
            f"attention of {query.shape[-2]} queries to {key.shape[-2]} keys under {size}: only self-attention over "
            "the split sequence is supported, no cross-attention and no cache of keys (use_cache=False)"
        )
    if query.shape[-2] != region.rows:
        raise ConfigurationError(
            f"attention over {query.shape[-2]} rows, and {region.part}: are all of the model's inputs among the "
            "buffers of maybe_context_parallel?"
        )
    for dimension in range(query.dim() - 2):
        sizes = {key.shape[dimension], value.shape[dimension], 1}
        if dimension == 0:
            sizes.add(query.shape[0])
        if len(sizes) > 2:
            raise ConfigurationError(
                f"attention under {size}: batches or heads of {tuple(query.shape)}, {tuple(key.shape)} and "
                f"{tuple(value.shape)} differ"
            )
    if query.dim() == 3:
        return
    key_heads = max(key.shape[1], value.shape[1])
    # torch broadcasts one key head over the query heads.
    if key_heads not in (1, query.shape[1]) and (not enable_gqa or query.shape[1] % key_heads):
        raise ConfigurationError(
            f"attention with {query.shape[1]} query heads and {key_heads} key heads: pass enable_gqa=True, and a "
            "number of query heads that is divisible by that of key heads"
        )


def _broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of one batch size, key and value with the same heads."""
    batch = max(query.shape[0], key.shape[0], value.shape[0])
    query = query.expand(batch, *query.shape[1:])
    sizes = [batch]
    if key.dim() == 4:
        sizes.append(max(key.shape[1], value.shape[1]))
    key = key.expand(*sizes, *key.shape[-2:])
    value = value.expand(*sizes, *value.shape[-2:])
    return query, key, value


class SequenceLoader:
    """Yields this rank's rows of each batch of `loader`. Other attributes are those of the loader.

    Each batch is a mapping with `input_ids` (batch, sequence). It becomes a dict whose (batch, sequence) tensors hold
    this rank's rows, with `position_ids`, and with `shift_labels` instead of `labels`. Models that are called during
    the iteration attend to the full sequence; inputs that are not split are computed as they are.
    """

    def __init__(self, loader: Any, parallel: ContextParallel) -> None:
        self.loader = loader
        self.parallel = parallel

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.parallel.loader_block():
            for batch in self.loader:
                if not isinstance(batch, Mapping):
                    raise ConfigurationError(
                        f"a batch of sequences to split must be a mapping with input_ids, not {type(batch).__name__}: "
                        "use maybe_context_parallel for it"
                    )
                yield self.parallel.split_batch(batch)

    def without_first(self, num_batches: int) -> SequenceLoader:
        """Without the first batches, for `skip_first_batches`."""
        return SequenceLoader(skip_first_batches(self.loader, num_batches), self.parallel)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

# SPDX-License-Identifier: Apache-2.0
"""Blocks in which sequences are split over ranks, loaders that split them, and the hooks of models called in them."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...config.parallel import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from ...core.documents import FIELDS, IGNORED, Documents
from ...core.errors import ConfigurationError
from ...core.modules import class_name, untraced
from ...data_loader.prepare import skip_first_batches
from ...logging import MultiProcessAdapter, get_logger
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
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
from ..transformers_inputs import outermost, replace_arguments
from . import transformers_models
from .attention import (
    AttentionCall,
    ContextAttention,
    Sent,
    SequenceAttention,
    ShardRandom,
    SplitAttention,
)
from .first_forward import compare_first
from .shard import SequenceLayout, common_length, split_in_place

logger: MultiProcessAdapter = get_logger(__name__)


@dataclass
class SequenceRegion:
    """One batch whose sequences are split: their length, the tensors that were split, and what was computed."""

    layout: SequenceLayout
    group: dist.ProcessGroup
    length: int
    # Tensors that were split -> (their former content, the dimension of the sequence), as long as they are alive.
    full_tensors: WeakTensorKeyDictionary
    # Whether inputs that are not split are an error. A loop over a split loader may also compute full sequences.
    strict: bool = True
    # (batch, length): the rows of the sequence that are not padding; None for all.
    keep: torch.Tensor | None = None
    # Of sequences packed in rows: (positions, number of the sequence) of all columns; False without them, None before
    # a model has its inputs.
    packed: tuple[torch.Tensor, torch.Tensor] | Literal[False] | None = None
    # The documents of the sequences, if the batch has their lengths.
    documents: Documents | None = None
    # Whether a loader added positions that count every row.
    counted: bool = False
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
        full: torch.Tensor | None = self.full_tensors.get(shard, (None, 0))[0]
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
        rank = dist.get_rank(group)
        self.layout: SequenceLayout = SequenceLayout(
            size, dist.get_world_size(group), rank, balanced=size == "cp_size"
        )
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
                f"sp_attn_implementation={promised.sp_attn_implementation!r} under "
                f"sp_size={layout.sp_size}: models use torch's scaled_dot_product_attention, "
                "which uses flash kernels where they are available. Use 'sdpa' or None."
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
                f"{what} has sequences of length {length}, but sp_seq_length={self.length} and "
                "sp_seq_length_is_variable=False"
            )
        self.layout.check(length, what)

    # -- blocks

    def _open(self) -> None:
        """Have models attend to the full sequence, from the first open block on."""
        self._open_blocks += 1
        if self._open_blocks > 1:
            return
        attend = untraced(self.attend)
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
                "maybe_context_parallel is already active: its blocks cannot be nested"
            )
        length = common_length(self.layout, buffers, dimensions)
        self._check_length(length, "buffer 0 of maybe_context_parallel")
        with contextlib.ExitStack() as stack:
            full_tensors = stack.enter_context(
                split_in_place(self.layout, buffers, dimensions, no_restore)
            )
            self._open()
            stack.callback(self._close)
            stack.callback(self._end_block)
            split = WeakTensorKeyDictionary()
            for buffer, full, dimension in zip(buffers, full_tensors, dimensions, strict=True):
                split[buffer] = full, dimension
            self._block = SequenceRegion(self.layout, self.group, length, split)
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

    @contextlib.contextmanager
    def computing(self, region: SequenceRegion | None) -> Iterator[None]:
        """A block in which all forwards are on the batch of `region`; on full sequences if it is None."""
        former = self._block, self._batch, self._loader_batches, self.was_split, self._sent
        self._block, self._batch, self._loader_batches = region, None, WeakTensorKeyDictionary()
        try:
            yield
        finally:
            self._block, self._batch, self._loader_batches, self.was_split, self._sent = former

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
        documents = Documents.of_batch(inputs, samples, length, device)
        if documents is not None:
            if counted:
                inputs["position_ids"] = documents.positions
                counted = False
            if labels is not None:
                labels = documents.trained_labels(labels)
        if labels is not None and inputs.get("shift_labels") is None:
            inputs["shift_labels"] = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
        region = SequenceRegion(
            self.layout,
            self.group,
            length,
            WeakTensorKeyDictionary(),
            strict=False,
            documents=documents,
            counted=counted,
        )
        for name, value in inputs.items():
            if name not in FIELDS and _is_sequence(value, length):
                inputs[name] = part = self.layout.take(value, 1)
                self._loader_batches[part] = region
                # Only token ids, labels and positions are needed again in full.
                if not part.is_floating_point() and not part.is_complex():
                    region.full_tensors[part] = value, 1
        self._batch = region
        return inputs

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

    def __deepcopy__(self, memo: object) -> ContextParallel:
        # The hooks of a copied model refer to that of the run.
        return self

    def watch(self, model: nn.Module, precision: Precision) -> None:
        """Add hooks to a prepared model that complete its inputs and compare its first forward on split sequences."""
        if model in self._watched:
            return
        self._watched.add(model)
        plain = uncompiled(model)
        self._names |= names_of_attention(plain)
        inner = outermost(plain)
        for part in inner:
            if part is not plain:
                part.register_forward_pre_hook(_Inputs(self, part, part), with_kwargs=True)
        hook = _Inputs(self, plain, plain if plain in inner else None)
        # A trace has no values, and fp8 scales by the largest value of all rows.
        hook.compares = dist.get_backend() != dist.Backend.FAKE and precision.name != "fp8"
        # It calls the model, which FSDP2 must not have begun to gather.
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, model: nn.Module, args: object) -> None:
        streams = contextlib.ExitStack()
        self._running.append((id(model), streams))
        if self.region is not None:
            streams.enter_context(self.random.seeded())

    def _leave(self, model: nn.Module, args: object, output: object) -> None:
        # A hook before `_enter` may have failed.
        if not self._running or self._running[-1][0] != id(model):
            return
        self._running.pop()[1].close()
        region = self.region
        self.was_split = region is not None
        if region is None:
            return
        if region.sent:
            # Before the backward, which may recompute the forward.
            self._sent, region.sent = region.sent, {}
        error = sys.exception()
        # torch's errors about shapes.
        if error is not None and type(error) in (RuntimeError, ValueError):
            error.add_note(
                f"{region.part}. A table of positions or a mask of the full length does not fit: "
                "index it with position_ids, or pass it as one of the buffers of "
                "maybe_context_parallel."
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
        # Keys of another sequence (cross-attention) are not split.
        if region is None or not self.splits(query) or key.shape[-2] != query.shape[-2]:
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
        _check_shapes(query, key, value, region)
        query, key, value = _broadcast(query, key, value)
        flat = query.dim() == 3
        call = AttentionCall(
            attn_mask, dropout_p, is_causal, scale, region.keep, region.documents, flat
        )
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            # As torch's function under autocast: rotated queries may be float32 with values of low precision.
            dtype = torch.get_autocast_dtype(kind)
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        if flat:
            query = query.unsqueeze(1)
            key = key.unsqueeze(1)
            value = value.unsqueeze(1)
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

    # Whether the next forward on split sequences is compared.
    compares = False

    def __init__(
        self, parallel: ContextParallel, called: nn.Module, special: nn.Module | None
    ) -> None:
        self.parallel = parallel
        self.name: str = class_name(called)
        self.special = special
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
        split = _split_input(inputs, region.rows)
        if split is None and not region.strict:
            return None
        if self.compares:
            self.compares = False
            compare = untraced(compare_first)
            compare(self.parallel, model, region, args, kwargs)
        changed = {}
        if self.takes_positions and (inputs.get("position_ids") is None or region.counted):
            if split is None:
                raise ConfigurationError(
                    f"no input of {self.name} is (batch, {region.rows}, ...), and {region.part}: "
                    "are all inputs among the buffers of maybe_context_parallel? If the sequence "
                    "is a different dimension, also pass position_ids."
                )
            if region.documents is None:
                positions = region.positions(split.device).expand(split.shape[0], -1)
            else:
                positions = region.layout.take(region.documents.positions, 1)
            changed["position_ids"] = positions
        if self.special is not None:
            adapted = transformers_models.adapt_inputs(self.special, inputs, split, region)
            if not self.takes_mask:
                adapted.pop("attention_mask", None)
            changed.update(adapted)
        if not changed:
            return None
        return replace_arguments(bound, args, kwargs, changed)


def _split_input(inputs: Mapping[str, object], rows: int) -> torch.Tensor | None:
    """The input that is (batch, this rank's rows, ...)."""
    usual = [inputs.get("input_ids"), inputs.get("inputs_embeds")]
    values = [value for value in usual if value is not None]
    for value in values or inputs.values():
        if _is_sequence(value, rows):
            return value
    return None


def _is_sequence(value: object, length: int) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length


def _sequences(batch: Mapping[str, object]) -> tuple[int, torch.device, int]:
    """(length, device, batch size) of a batch's token ids (or embeddings)."""
    for name in ("input_ids", "inputs_embeds"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value.shape[1], value.device, value.shape[0]
    raise ConfigurationError(
        f"a batch with {sorted(batch)} does not have input_ids (or inputs_embeds) of shape "
        "(batch, sequence, ...), so its sequences cannot be split. Split the batch yourself with "
        "maybe_context_parallel."
    )


def _check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    region: SequenceRegion,
) -> None:
    size = str(region.layout)
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        raise ConfigurationError(
            f"attention under {size} takes (batch, heads, rows, width), got {tuple(query.shape)}, {tuple(key.shape)} "
            f"and {tuple(value.shape)}"
        )
    if query.shape[-2] != region.rows:
        raise ConfigurationError(
            f"attention over {query.shape[-2]} rows, and {region.part}: are all of the model's inputs among the "
            "buffers of maybe_context_parallel?"
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

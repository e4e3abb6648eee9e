# SPDX-License-Identifier: Apache-2.0
"""Packed rows: the forward of a prepared model computes each document as if it were a row of its own."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..collectives.objects import gather_each
from ..core import trees
from ..core.documents import FIELDS, Documents
from ..core.errors import ConfigurationError
from ..core.modules import class_name, untraced
from ..logging import MultiProcessAdapter, get_logger
from ..torch_internals.attention import (
    PUBLIC_NAME,
    names_of_attention,
    plain_attention,
    replaced_attention,
)
from .transformers_inputs import adapt_packed, outermost, replace_arguments
from .unwrap import extract_model_from_parallel
from .watched_forward import WatchedForward, relative_error, unchanged

if TYPE_CHECKING:
    from .context.region import ContextParallel

logger: MultiProcessAdapter = get_logger(__name__)

# Tokens of each row that the comparison of the first forward computes.
_TOKENS = 64


class DocumentAttention:
    """Attention in the packed forwards of a run, and where a backward computes it again.

    Fields:
        documents: of the batch that is computed; None for rows that are not packed.
        names: (module, name) of what is torch's attention in the models' sources.
        is_used: whether a forward was on packed rows.
    """

    def __init__(self) -> None:
        self.documents: Documents | None = None
        self.names: set[tuple[str, str]] = {PUBLIC_NAME}
        self.is_used = False
        self._is_open = False

    @contextlib.contextmanager
    def separating(self, documents: Documents | None = None) -> Iterator[None]:
        """A block in which attention separates documents; by default those of the forward that is recomputed."""
        former = self.documents, self._is_open
        self.documents, self._is_open = documents, True
        # The fused layers of nn.TransformerEncoder attend without torch's function.
        is_fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with replaced_attention(untraced(self._attend), self.names):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fused)
            self.documents, self._is_open = former

    def expect_backward(self, output: object, documents: Documents) -> None:
        """Separate documents again where the backward through an output recomputes its forward."""

        def begin(gradient: torch.Tensor) -> None:
            if self._is_open:
                self.documents = documents

        for tensor in trees.leaves(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

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
        """Takes the arguments of torch's function, which it replaces. Attention to other rows is computed as it is."""
        documents = self.documents
        if documents is not None:
            rows, length = documents.numbers.shape
            if query.shape[0] == rows and query.shape[-2] == key.shape[-2] == length:
                if attn_mask is None and dropout_p == 0.0 and takes_lengths(query):
                    return _attend_by_length(
                        query, key, value, documents, is_causal, scale, enable_gqa
                    )
                attn_mask = documents.mask(is_causal, attn_mask)
                is_causal = False
                if query.dim() == 3:
                    attn_mask = attn_mask.squeeze(1)
        return plain_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def takes_lengths(query: torch.Tensor) -> bool:
    """Whether torch has a kernel for these queries that computes documents of several lengths without a mask."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == 4
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """The attention of each document to itself. Queries are (rows, heads, length, width)."""
    # Few devices have it.
    from torch.nn.attention import varlen

    window = (-1, -1)
    if is_causal:
        window = (-1, 0)
    bounds, longest = documents.cu_seqlens, documents.longest
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output: Any = varlen.varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=window,
        enable_gqa=enable_gqa,
    )
    attended: torch.Tensor = output.unflatten(0, documents.numbers.shape).transpose(1, 2)
    return attended


class PackedRows:
    """The forward pre-hook of a prepared model that takes `seq_lens` and `cu_seqlens` out of its arguments.

    A forward that has a parameter of one of these names does everything itself.

    Args:
        attention: of the run.
        sequence: splits sequences over ranks; None if none is split.
        layout: the name of a layout that computes rows only where the model's forward takes lengths, or empty.
    """

    def __init__(
        self, attention: DocumentAttention, sequence: ContextParallel | None, layout: str
    ) -> None:
        self.attention = attention
        self.sequence = sequence
        self.layout = layout
        # A trace has no values.
        has_group = dist.is_available() and dist.is_initialized()
        self._is_compared: bool = has_group and dist.get_backend() == dist.Backend.FAKE
        self._has_names = False

    def watch(self, model: nn.Module) -> None:
        """Add the hooks to a prepared model."""
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        for part in outermost(plain):
            if part is not plain:
                part.register_forward_pre_hook(self.adapt, prepend=True, with_kwargs=True)
        # It calls the model, which FSDP2 must not have begun to gather.
        model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        """Take the lengths out of the arguments, and add what depends on them."""
        if "seq_lens" not in kwargs and "cu_seqlens" not in kwargs:
            return None
        fields = {name: kwargs[name] for name in FIELDS if name in kwargs}
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        signature = inspect.signature(plain.forward)
        parameters = signature.parameters
        kwargs = {name: value for name, value in kwargs.items() if name not in FIELDS}
        taken = [name for name in FIELDS if name in parameters]
        tokens = _tokens_of(args, kwargs, fields)
        rows, length = tokens.shape[:2]
        region = None
        if self.sequence is not None:
            positional = {str(number): value for number, value in enumerate(args)}
            region = self.sequence.of_inputs(positional | kwargs, model.training)
            if region is not None:
                length = region.length
        documents = Documents.of_batch(fields, rows, length, tokens.device)
        if documents is None:
            return args, kwargs
        if self.layout and not taken:
            raise ConfigurationError(
                f"{next(iter(fields))} of a packed batch: {self.layout} does not separate documents. Let the forward "
                f"of {class_name(plain)} take seq_lens or cu_seqlens, or choose another layout"
            )
        if not self._is_compared and model.training and torch.is_grad_enabled():
            self._is_compared = True
            untraced(self._compare_first)(model, tokens, args, kwargs, taken)
        if taken:
            converted = {"seq_lens": documents.lengths, "cu_seqlens": documents.cu_seqlens}
            return args, kwargs | {name: fields.get(name, converted[name]) for name in taken}
        if region is not None:
            region.documents = documents
            return args, kwargs
        if "position_ids" in parameters:
            inputs = signature.bind_partial(*args, **kwargs).arguments
            if inputs.get("position_ids") is None:
                kwargs["position_ids"] = documents.positions
        self._begin(model, plain, documents)
        if outermost(plain) == [plain]:
            return self.adapt(plain, args, kwargs) or (args, kwargs)
        return args, kwargs

    def _begin(self, model: nn.Module, plain: nn.Module, documents: Documents) -> None:
        """Have attention separate documents until the end of a forward."""
        attention = self.attention
        if not self._has_names:
            self._has_names = True
            attention.names |= names_of_attention(plain)
        attention.is_used = True
        separated = contextlib.ExitStack()
        separated.enter_context(attention.separating(documents))

        def end(model: nn.Module, args: object, output: object) -> None:
            handle.remove()
            attention.expect_backward(output, attention.documents or documents)
            separated.close()

        handle = model.register_forward_hook(end, always_call=True)

    def adapt(self, part: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook of each transformers model in the prepared one."""
        if self.attention.documents is None:
            return None
        bound = inspect.signature(part.forward).bind_partial(*args, **kwargs)
        changed, self.attention.documents = adapt_packed(part, bound, self.attention.documents)
        return replace_arguments(bound, args, kwargs, changed)

    # -- the first forward

    def _compare_first(
        self,
        model: nn.Module,
        tokens: torch.Tensor,
        args: tuple[object, ...],
        kwargs: dict[str, Any],
        taken: list[str],
    ) -> None:
        """Raise ConfigurationError, on every rank, if documents in a row are not computed as rows of their own.

        The first tokens of each row are computed as one row of two documents, and as two rows. The forwards run in
        evaluation mode and without gradients; afterwards the model and the random generators are as before. A model
        that fails in them, or that draws random numbers, is not compared.
        """
        rows, length = tokens.shape[:2]
        half = min(length, _TOKENS) // 2
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        is_failed, difference = False, ""

        def first(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:2] == (rows, length):
                return tensor.narrow(1, 0, 2 * half)
            return tensor

        def alone(tensor: torch.Tensor) -> torch.Tensor:
            tensor = first(tensor)
            if tensor.shape[:2] == (rows, 2 * half):
                return tensor.reshape(2 * rows, half, *tensor.shape[2:])
            if tensor.shape[:1] == (rows,):
                return tensor.repeat_interleave(2, dim=0)
            return tensor

        def forward(cut: Callable[[Any], Any], lengths: list[list[int]]) -> WatchedForward:
            inputs, named = trees.map_leaves(cut, (args, kwargs))
            mask = named.get("attention_mask")
            if mask is not None and mask.dim() == 2:
                # Padding is computed otherwise, and nothing reads it.
                named["attention_mask"] = torch.ones_like(mask)
            positions = named.get("position_ids")
            if positions is not None and positions.dim() == 2:
                index = torch.arange(positions.numel(), device=positions.device)
                named["position_ids"] = positions.min() + (index % half).view_as(positions)
            if taken or len(lengths[0]) > 1:
                named["seq_lens"] = torch.tensor(lengths)
            computed = WatchedForward()
            with contextlib.ExitStack() as stack:
                stack.enter_context(unchanged(model, {"cpu", tokens.device.type}))
                stack.enter_context(torch.no_grad())
                if "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                if self.sequence is not None:
                    stack.enter_context(self.sequence.computing(None))
                computed.watch(plain, stack)
                computed.add("the output", model(*inputs, **named))
            return computed

        try:
            if half:
                packed = forward(first, [[half, half]] * rows)
                difference = _difference(forward(alone, [[half]] * 2 * rows), packed)
        except Exception as error:
            is_failed = True
            logger.debug(f"{class_name(plain)} was not compared on packed rows: {error!r}")
        everywhere = [(is_failed, difference)]
        if dist.is_available() and dist.is_initialized():
            everywhere = gather_each(everywhere[0], operation="the first packed forward")
        differences = [text for _, text in everywhere if text]
        if not differences or any(failed for failed, _ in everywhere):
            return
        raise ConfigurationError(
            f"{class_name(plain)} computes the documents of a packed row (seq_lens, cu_seqlens) otherwise than as "
            f"rows of their own: {differences[0]}. Documents are separated in torch.nn.functional."
            "scaled_dot_product_attention, and position_ids restart where the forward takes them. What else runs "
            "along a row must know them: give the model's forward a parameter cu_seqlens or seq_lens"
        )


def _difference(alone: WatchedForward, packed: WatchedForward) -> str:
    """Where documents in one row part from the same in rows of their own; empty if the outputs are equal."""
    epsilon = max(alone.epsilon, packed.epsilon)
    first, last = "", 0.0
    for what, tensors in alone.tensors.items():
        errors = []
        for expected, actual in zip(tensors, packed.tensors.get(what, ()), strict=False):
            is_per_token = expected.dim() > 1 and expected.shape[-1] == actual.shape[-1]
            if not is_per_token or expected.numel() != actual.numel():
                continue
            error = relative_error(expected, actual.reshape(expected.shape))
            errors.append(error)
            if error > 2 * epsilon**0.5 and not first:
                first = f"{what} differs (relative error {error:.1g})"
        if errors:
            last = max(errors)
    # What other documents have changed may be left out again.
    if last < 16 * epsilon:
        return ""
    return first


def _tokens_of(
    args: tuple[object, ...], kwargs: dict[str, Any], fields: Iterable[str]
) -> torch.Tensor:
    """The argument that is (batch, length, ...)."""
    usual = [kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    for value in (*usual, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return value
    raise ConfigurationError(
        f"{next(iter(fields))} belongs to rows, and no argument of the model is a tensor (batch, length, ...)"
    )

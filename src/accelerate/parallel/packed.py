# SPDX-License-Identifier: Apache-2.0
"""Packed rows: the forward of a prepared model computes each document as if it were a row of its own."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..collectives.objects import gather_each
from ..core import trees
from ..core.documents import FIELDS, Documents
from ..core.errors import ConfigurationError
from ..core.modules import class_name, model_has_dtensor, untraced
from ..torch_internals.attention import names_of_attention
from ..torch_internals.compiled import uncompiled
from .document_attention import DocumentAttention
from .transformers_inputs import adapt_packed, outermost, replace_arguments
from .unwrap import extract_model_from_parallel
from .watched_forward import WatchedForward, difference_on_ranks, relative_error, unchanged

if TYPE_CHECKING:
    from .context.region import ContextParallel

# Tokens of each row that the comparison of the first forward computes.
_TOKENS = 64


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
        self._is_compared: bool = False
        self._is_replica: bool = True
        # Whether the ranks have yet to tell each other if their first forward is packed.
        self._is_first: bool = False

    def watch(self, model: nn.Module) -> None:
        """Add the hooks to a prepared model."""
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        if dist.is_available() and dist.is_initialized():
            self._is_replica = (
                isinstance(uncompiled(model), DistributedDataParallel)
                and self.sequence is None
                and not model_has_dtensor(model)
            )
            # A trace has no values.
            self._is_compared = dist.get_backend() == dist.Backend.FAKE
            self._is_first = not self._is_replica and not self._is_compared
        self.attention.names |= names_of_attention(plain)
        for part in outermost(plain):
            if part is not plain:
                part.register_forward_pre_hook(self.adapt, prepend=True, with_kwargs=True)
        # It calls the model, which FSDP2 must not have begun to gather.
        model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        """Take the lengths out of the arguments, and add what depends on them."""
        is_packed = "seq_lens" in kwargs or "cu_seqlens" in kwargs
        if not is_packed and not self._is_first:
            return None
        is_compared = self._is_to_compare(model, is_packed)
        if not is_packed and not is_compared:
            return None
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        signature = inspect.signature(plain.forward)
        parameters = signature.parameters
        taken = [name for name in FIELDS if name in parameters]
        if is_packed and taken and not kwargs.keys() & (set(FIELDS) - set(taken)):
            # What they mean is up to the forward: they may be the lengths of padded rows.
            return None
        fields = {name: kwargs[name] for name in FIELDS if kwargs.get(name) is not None}
        kwargs = {name: value for name, value in kwargs.items() if name not in FIELDS}
        kinds = {parameter.kind for parameter in parameters.values()}
        if "position_ids" not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            # They come with `pack`.
            kwargs.pop("position_ids", None)
        try:
            inputs = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            # The forward itself raises for its arguments.
            return args, kwargs
        tokens = _tokens_of(inputs)
        rows, length = tokens.shape[:2]
        if is_compared and not taken and not self.layout:
            untraced(self._compare_first)(model, tokens, args, kwargs)
        if not is_packed:
            return None
        region = None
        if self.sequence is not None:
            region = self.sequence.of_inputs(inputs | kwargs, model.training)
        if region is not None:
            length = region.length
        documents = Documents.of_batch(fields, rows, length, tokens.device)
        if documents is None:
            return args, kwargs | dict.fromkeys(taken)
        if self.layout and not taken:
            raise ConfigurationError(
                f"{next(iter(fields))} of a packed batch: {self.layout} does not separate "
                "documents. Add a seq_lens or cu_seqlens parameter to the forward of "
                f"{class_name(plain)}, or choose another layout"
            )
        if taken:
            forms = {"seq_lens": documents.lengths, "cu_seqlens": documents.cu_seqlens, **fields}
            return args, kwargs | {name: forms[name] for name in taken}
        if region is not None:
            region.documents = documents
            return args, kwargs
        if "position_ids" in parameters and inputs.get("position_ids") is None:
            kwargs["position_ids"] = documents.positions
        self._begin(model, documents)
        if outermost(plain) == [plain]:
            return self.adapt(plain, args, kwargs)
        return args, kwargs

    def _begin(self, model: nn.Module, documents: Documents) -> None:
        """Have attention separate documents until the end of a forward."""
        attention = self.attention
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
        documents = self.attention.documents
        if documents is None:
            return args, kwargs
        try:
            bound = inspect.signature(part.forward).bind_partial(*args, **kwargs)
        except TypeError:
            return args, kwargs
        changed, self.attention.documents = adapt_packed(part, bound, documents)
        return replace_arguments(bound, args, kwargs, changed)

    # -- the first forward

    def _is_to_compare(self, model: nn.Module, is_packed: bool) -> bool:
        """Whether this is the forward whose rows are compared.

        A replica compares its first packed one. The forward of another model is a collective, so all ranks compare
        their first one if it is packed on any of them.
        """
        if self._is_compared or not model.training or not torch.is_grad_enabled():
            return False
        self._is_compared = True
        if not self._is_first:
            return is_packed
        self._is_first = False
        return any(untraced(gather_each)(is_packed, operation="the first forward"))

    def _compare_first(
        self,
        model: nn.Module,
        tokens: torch.Tensor,
        args: tuple[object, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Raise ConfigurationError if documents in a row are not computed as rows of their own.

        The first tokens of each row are computed as one row of two documents, and as two rows. The forwards run in
        evaluation mode and without gradients; afterwards the model and the random generators are as before. A model
        that fails in them, or that draws random numbers, is not compared.
        """
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        rows, length = tokens.shape[:2]
        half = min(length, _TOKENS) // 2

        def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:2] == (rows, length):
                return tensor[:, : 2 * half]
            return tensor

        def alone(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:2] == (rows, length):
                return in_a_row(tensor).reshape(2 * rows, half, *tensor.shape[2:])
            if tensor.shape[:1] == (rows,):
                return tensor.repeat_interleave(2, dim=0)
            return tensor

        def forward(cut: Callable[[Any], Any], lengths: list[list[int]]) -> WatchedForward:
            inputs, named = trees.map_leaves(cut, (args, kwargs))
            named["seq_lens"] = torch.tensor(lengths)
            mask = named.get("attention_mask")
            if mask is not None and mask.dim() == 2:
                # Padding is computed otherwise, and nothing reads it.
                named["attention_mask"] = torch.ones_like(mask)
            positions = named.get("position_ids")
            if positions is not None and positions.dim() == 2:
                index = torch.arange(positions.numel(), device=positions.device)
                named["position_ids"] = (index % half).view_as(positions)
            computed = WatchedForward()
            with contextlib.ExitStack() as stack:
                stack.enter_context(unchanged(model, {"cpu", tokens.device.type}))
                if self.sequence is not None:
                    stack.enter_context(self.sequence.computing(None))
                called = model
                if self._is_replica:
                    # DDP's forward may synchronize buffers.
                    called = plain
                    hook = plain.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
                    stack.callback(hook.remove)
                computed.watch(plain, stack)
                computed.add("the output", called(*inputs, **named))
            return computed

        def compare() -> str:
            if half == 0:
                return ""
            packed = forward(in_a_row, [[half, half]] * rows)
            separate = forward(alone, [[half]] * 2 * rows)
            return _difference(separate, packed)

        what = f"{class_name(plain)} on packed rows"
        difference = difference_on_ranks(compare, what, is_alone=self._is_replica)
        if difference:
            raise ConfigurationError(
                f"{class_name(plain)} does not compute the documents of a packed row (seq_lens, "
                f"cu_seqlens) as it computes separate rows: {difference}. Documents are separated "
                "in torch.nn.functional.scaled_dot_product_attention, and position_ids restart "
                "if the forward takes them. All other operations along a row must know the "
                "documents: add a cu_seqlens or seq_lens parameter to the model's forward"
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


def _tokens_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The argument that is (batch, length, ...)."""
    usual = [inputs.get("input_ids"), inputs.get("inputs_embeds")]
    values: list[object] = [*usual, *trees.leaves(inputs)]
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return value
    raise ConfigurationError(
        "seq_lens and cu_seqlens describe rows, but no argument of the model is a tensor of shape (batch, length, ...)"
    )

# SPDX-License-Identifier: Apache-2.0
"""The first forward on split sequences: a short cut of its batch is computed whole and split, and compared."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...core import trees
from ...core.errors import ConfigurationError
from ...core.modules import class_name, is_wrapper_subclass
from ...torch_internals.compiled import uncompiled
from ..watched_forward import WatchedForward, difference_on_ranks, relative_error, unchanged
from .exchange import gather_rows

if TYPE_CHECKING:
    from .region import ContextParallel, SequenceRegion

_TOKENS = 64


def compare_first(
    parallel: ContextParallel,
    model: nn.Module,
    region: SequenceRegion,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise ConfigurationError, on every rank, if a model computes something else on split sequences.

    Two forwards compute a short cut of the batch, whole and split. Where their outputs differ, or cannot be compared,
    two more compare what goes into each module and what comes out. The forwards run in evaluation mode and without
    gradients; afterwards the model and the random generators are as before. A model that fails in them, or that
    draws random numbers, is not compared. Every rank calls this.

    Args:
        parallel: splits the sequences.
        model: as it is called, with its hooks.
        region: the batch that is split.
        args: of the forward.
        kwargs: of the forward.
    """
    plain: nn.Module = uncompiled(model)
    cut = _Cut(parallel, model, region, (args, kwargs))
    what = f"{class_name(plain)} under {region.layout}"
    difference = ""
    for by_module in (False, True):
        compare = functools.partial(cut.difference, by_module)
        difference = difference_on_ranks(compare, what)
        if not difference:
            return
    raise ConfigurationError(
        f"{class_name(plain)} does not compute the same under {region.layout} as on whole "
        f"sequences: on the first {cut.region.length} tokens of a batch, {difference}. Ranks see "
        "the rows of other ranks only in torch.nn.functional.scaled_dot_product_attention "
        "(attn_implementation='sdpa' in transformers). Other operations that mix rows see only "
        "their own rank's: a convolution, a recurrence, a mean, the first or last token, "
        "positions that the model counts. Pass position_ids, or a table of positions as one of "
        "the buffers of maybe_context_parallel; train models that need other rows without "
        f"{region.layout.size}"
    )


class _Cut:
    """The first tokens of a batch, which a model computes whole, and split as the batch is."""

    def __init__(
        self, parallel: ContextParallel, model: nn.Module, batch: SequenceRegion, inputs: Any
    ) -> None:
        self.parallel = parallel
        self.model = model
        self.batch = batch
        self.arguments = inputs
        self.has_labels: bool = not {"labels", "shift_labels"}.isdisjoint(inputs[1])
        layout = batch.layout
        multiple = layout.multiple
        length = min(batch.length, max(multiple, _TOKENS // multiple * multiple))
        # Tensor -> (its first tokens, the dimension of the sequence if the tensor has this rank's rows).
        self.first = WeakTensorKeyDictionary()
        # How many samples the batch has.
        self.samples = set[int]()
        for tensor, (full, dimension) in batch.full_tensors.items():
            # Ranks may have read different samples.
            part = layout.take(full.narrow(dimension, 0, length), dimension)
            self.first[tensor] = gather_rows(part, dimension, batch.group, layout), dimension
            if dimension % full.dim():
                self.samples.add(full.shape[0])
        self.region: SequenceRegion = replace(
            batch, length=length, full_tensors=WeakTensorKeyDictionary(self.first), keep=None, packed=None,
            documents=None, sent={}, _positions=None,
        )  # fmt: skip
        for tensor in trees.leaves(inputs):
            if tensor not in self.first:
                self.first[tensor] = self._first_tokens(tensor)

    def _first_tokens(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Of an argument that is not one of the tensors that were split."""
        rows = self.batch.rows
        if is_wrapper_subclass(tensor):
            return tensor, None
        if rows in tensor.shape:
            dimension = tensor.shape.index(rows)
            if tensor.shape[1:2] == (rows,):
                dimension = 1
            full = gather_rows(tensor, dimension, self.batch.group, self.batch.layout)
            return full.narrow(dimension, 0, self.region.length), dimension
        first = tensor
        for dimension, size in enumerate(tensor.shape):
            if size == self.batch.length:
                first = first.narrow(dimension, 0, self.region.length)
        return first, None

    def forward(self, is_split: bool, by_module: bool) -> WatchedForward:
        """Compute the cut; keep the output, or what goes into all modules and comes out of them."""
        region = None
        if is_split:
            region = self.region
        computed = WatchedForward()

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            first, dimension = self.first[tensor]
            if is_split and dimension is not None:
                return self.batch.layout.take(first, dimension)
            rows: torch.Tensor = first
            return rows

        def argument(tensor: torch.Tensor) -> torch.Tensor:
            if tensor in self.batch.full_tensors:
                return tensor
            return rows(tensor)

        with contextlib.ExitStack() as stack:
            stack.enter_context(unchanged(self.model, self.parallel.random.kinds))
            stack.enter_context(self.parallel.computing(region))
            # A model may have them as tables, too.
            for tensor in self.batch.full_tensors:
                stack.callback(setattr, tensor, "data", tensor.data)
                tensor.data = rows(tensor)
            if by_module:
                computed.watch(uncompiled(self.model), stack)
            args, kwargs = trees.map_leaves(argument, self.arguments)
            output = self.model(*args, **kwargs)
            if not by_module:
                computed.add("the output", output)
        return computed

    def difference(self, by_module: bool) -> str:
        """Where two forwards part; empty if the last tensors that can be compared are equal up to rounding."""
        whole = self.forward(False, by_module)
        split = self.forward(True, by_module)
        tolerance = 2 * math.sqrt(max(whole.epsilon, split.epsilon))
        first = ""
        last = math.nan
        for what, tensors in whole.tensors.items():
            parts = split.tensors.get(what, ())
            errors = [self._error(*pair) for pair in zip(tensors, parts, strict=False)]
            errors = [error for error in errors if not math.isnan(error)]
            if not errors:
                continue
            last = max(errors)
            if last > tolerance and not first:
                first = f"{what} differs (relative error {last:.1g})"
        if last > tolerance:
            return first
        if math.isnan(last) and not by_module:
            return "the output does not contain anything that can be compared"
        return ""

    def _error(self, whole: torch.Tensor, split: torch.Tensor) -> float:
        """How far this rank's part is from that of the whole tensor; NaN where they need not be equal, as losses."""
        sizes = zip(whole.shape, split.shape, strict=False)
        changed = [dimension for dimension, (size, part) in enumerate(sizes) if size != part]
        if whole.shape == split.shape:
            is_loss = whole.numel() < 2 or (self.has_labels and whole.dim() == 1)
            # Without a dimension of samples, it is a statistic over all tokens.
            if is_loss or (self.samples and whole.shape[0] not in self.samples):
                return math.nan
            return relative_error(whole, split)
        if whole.dim() != split.dim():
            return math.inf
        if len(changed) > 1:
            # Positions may have been expanded to all samples.
            return math.nan
        dimension, length = changed[0], self.region.length
        is_multiple = whole.shape[dimension] % length == 0
        if dimension == 0 and not is_multiple:
            # Tokens that the model selects.
            return math.nan
        parts = [self.region.layout.take(whole, dimension)]
        if is_multiple:
            # All samples may be in this dimension, one after the other.
            by_sample = whole.unflatten(dimension, (-1, length))
            part = self.region.layout.take(by_sample, dimension + 1)
            parts.append(part.flatten(dimension, dimension + 1))
        errors = [relative_error(part, split) for part in parts if part.shape == split.shape]
        return min(errors, default=math.inf)

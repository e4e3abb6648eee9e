# SPDX-License-Identifier: Apache-2.0
"""With `exact`, the weight of each batch. It belongs to the batch: a loss gets that of what its forward has read."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from ..core.errors import AccelerateError
from ..core.stacks import user_line
from ..core.trees import leaves
from ..logging import MultiProcessAdapter, get_logger

logger: MultiProcessAdapter = get_logger(__name__)


class WeighedBatch:
    """A batch that a prepared loader has yielded.

    Args:
        loader: the loader.
        data: the batch. The references to its tensors are weak.

    Attributes:
        weight: the loader's `batch_weight` of it.
        samples: its samples on all processes.
    """

    def __init__(self, loader: Any, data: Any) -> None:
        counts: tuple[int, ...] = loader.batch_counts
        self.weight: float = loader.batch_weight
        self.samples: int = sum(counts)
        self.loader: weakref.ref[Any] = weakref.ref(loader)
        # Of this process.
        self.local_samples: int = round(self.weight * self.samples / len(counts))
        self.references: list[weakref.ref[torch.Tensor]] = []
        for tensor in leaves(data):
            if isinstance(tensor, torch.Tensor):
                self.references.append(weakref.ref(tensor))

    def tensors(self) -> list[torch.Tensor]:
        """Those that are still in use."""
        tensors = [reference() for reference in self.references]
        return [tensor for tensor in tensors if tensor is not None]

    def lacks_samples(self) -> bool:
        """Whether all its tensors have fewer rows than the batch has samples, as if some were left out."""
        tensors = [tensor for tensor in self.tensors() if tensor.ndim]
        rows = {len(tensor) for tensor in tensors}
        sizes = {size for tensor in tensors for size in tensor.shape}
        return len(rows) == 1 and max(rows) < self.local_samples and self.local_samples not in sizes


class BatchWeights:
    """Finds the batch that a loss is of: the one whose tensors, or views of them, the forward was called with.

    If a forward got none (copies of them, or the model was not prepared), it is the only batch that is still in use.
    """

    # Hooks of prepared models, which may be copied and pickled, reach all of this process.
    _all: ClassVar[weakref.WeakSet[BatchWeights]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._batches: list[WeighedBatch] = []
        self._read_by_forward: list[WeighedBatch] = []  # since the last backward
        self._has_warned = False
        self._all.add(self)

    def watch(self, model: torch.nn.Module) -> None:
        """Look at what the forwards of a prepared model read."""
        model.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)

    def add(self, loader: Any, data: Any) -> None:
        """A loader is about to yield a batch."""
        if loader.batch_counts is None:
            return
        self._batches = [*_in_use(self._batches), WeighedBatch(loader, data)]

    def before_forward(self, inputs: Any) -> None:
        """Note which batches a forward reads."""
        self._batches = _in_use(self._batches)
        if len(self._batches) == 1:
            # The usual loop: no other one can be meant.
            self._read_by_forward = self._batches[:]
            return
        ranges = [_memory(tensor) for tensor in leaves(inputs) if isinstance(tensor, torch.Tensor)]
        for batch in self._batches:
            if batch in self._read_by_forward:
                continue
            owned = [_memory(tensor) for tensor in batch.tensors()]
            if any(_overlap(ranges, memory) for memory in owned):
                self._read_by_forward.append(batch)

    def take(self, has_items: bool, in_window: bool) -> WeighedBatch | None:
        """The batch of the loss whose backward begins; None if no prepared loader has yielded one.

        Args:
            has_items: the loss is weighted by its items, so that only a placeholder's weight matters.
            in_window: it is added to losses of other batches, in proportion to their samples.

        Raises:
            AccelerateError: several batches of different weights may be meant.
        """
        read, self._read_by_forward = self._read_by_forward, []
        candidates = _in_use(read) or read
        if not candidates:
            candidates = _in_use(self._batches) or self._batches[-1:]
        if not candidates:
            return None
        batch = candidates[-1]
        if has_items:
            return batch
        weights = {(other.weight, other.samples * in_window) for other in candidates}
        if len(weights) > 1:
            raise AccelerateError(
                f"{user_line()}: exact=True cannot determine the weight of this loss: it may "
                f"belong to any of {len(candidates)} batches, with "
                f"{', '.join(str(other.samples) for other in candidates)} samples on all "
                "processes. Call backward for each batch separately and pass the tensors of the "
                "batch to the model, or pass the number of samples to backward: "
                "accelerator.backward(loss, num_items=len(inputs))"
            )
        if not self._has_warned and batch.lacks_samples():
            self._has_warned = True
            logger.warning(
                f"{user_line()}: exact=True counts {batch.local_samples} samples in a batch whose "
                "tensors have fewer rows. If collate_fn drops samples, pass their number to "
                "backward: accelerator.backward(loss, num_items=len(inputs))"
            )
        return batch


def _in_use(batches: list[WeighedBatch]) -> list[WeighedBatch]:
    return [batch for batch in batches if batch.tensors()]


def _before_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.is_grad_enabled():
        for weights in BatchWeights._all:
            weights.before_forward((args, kwargs))


# The storage of a tensor, and the addresses of its elements: the first, and the one after the last.
Memory = tuple[int, int, int]


def _memory(tensor: torch.Tensor) -> Memory:
    try:
        storage = tensor.untyped_storage().data_ptr()
        begin = tensor.data_ptr()
    except RuntimeError:
        # Inside of a transform of torch.func a tensor has no storage; a sparse one has several.
        return 0, 0, 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return storage, begin, begin + (last + 1) * tensor.element_size()


def _overlap(ranges: list[Memory], memory: Memory) -> bool:
    storage, begin, end = memory
    if not storage:
        return False
    return any(other == storage and first < end and begin < last for other, first, last in ranges)

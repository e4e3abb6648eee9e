# SPDX-License-Identifier: Apache-2.0
"""A batch sampler whose batches have equally many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from ..core.errors import ConfigurationError
from .packing import Integers, checked_lengths
from .samplers import EpochSampler

# If the sizes of batches differ by more than this share of their mean, those of a step are made similar.
_TOLERANCE = 0.05
# So many processes are expected to read the batches of a step.
_SHARDS = 64


class TokenBatchSampler(EpochSampler, Sampler[list[int]]):
    """Batches of documents with nearly equal numbers of tokens, at most `tokens_per_batch`.

    All batches of an epoch have nearly the same size, so those of a step are balanced on any number of processes, and
    with any number of accumulation steps. The order depends only on the arguments and the epoch, so a run can
    continue in the middle of an epoch on a different number of processes.

    Without `set_epoch` the epoch increases by one after each complete pass. A prepared loader sets it.

    Args:
        lengths: the tokens of each document.
        tokens_per_batch: the maximum number of tokens in a batch of one process.
        multiple_of: the number of batches is a multiple of it. If it is the number of processes, no batch is repeated
            in the last step. None: 64, or the largest power of two for which batches are at most 3% smaller.
        shuffle: draw a new order in each epoch.
        seed: of the order, together with the epoch.

    Raises:
        ConfigurationError: a document is empty or longer than `tokens_per_batch`, or there are too few documents for
            `multiple_of`.

    Example:
        sampler = TokenBatchSampler(lengths, tokens_per_batch=8192)
        loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=join_documents))
    """

    def __init__(
        self,
        lengths: Sequence[int] | Integers | torch.Tensor,
        tokens_per_batch: int,
        *,
        multiple_of: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.lengths: Integers = checked_lengths(lengths, "TokenBatchSampler")
        self.tokens_per_batch = tokens_per_batch
        self.multiple_of = multiple_of
        self.shuffle = shuffle
        self.initial_seed = seed
        self.seed_agreed = True
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > tokens_per_batch:
            raise ConfigurationError(
                f"TokenBatchSampler: document {longest} has {self.lengths[longest]} tokens, but a "
                f"batch holds at most {tokens_per_batch}"
            )
        # So many batches are enough in every epoch: the sizes that `_distribute` finds for the exact lengths do not
        # depend on the order of documents that have the same length.
        count = -(-int(self.lengths.sum()) // tokens_per_batch)
        documents = np.arange(len(self.lengths))
        largest = tokens_per_batch + 1
        while largest > tokens_per_batch:
            self._count: int = self._rounded(count)
            _, sizes = self._distribute(documents, 1)
            largest = max(sizes)
            count = max(self._count + 1, self._count * largest // tokens_per_batch)

    def _rounded(self, count: int) -> int:
        documents = len(self.lengths)
        if self.multiple_of is None:
            count = min(count, documents)
            multiple = _SHARDS
            while -count % multiple > min(0.03 * count, documents - count):
                multiple //= 2
        else:
            multiple = self.multiple_of
        count += -count % multiple
        if count > documents:
            raise ConfigurationError(
                f"TokenBatchSampler: {documents} documents are too few for {count} batches, a multiple of {multiple}"
            )
        return count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._batches()
        self.set_epoch(self.epoch + 1)

    def _batches(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.initial_seed)
        if self.shuffle:
            generator.manual_seed(self.initial_seed + self.epoch)
        documents = _permutation(len(self.lengths), generator)
        # Documents of similar lengths change places. If that makes a batch too large, only more similar ones do.
        for width in (self.tokens_per_batch // 64, self.tokens_per_batch // 512, 1):
            batches, sizes = self._distribute(documents, max(1, width))
            if max(sizes) <= self.tokens_per_batch:
                break
        order = _permutation(self._count, generator)
        if max(sizes) - min(sizes) > _TOLERANCE * sum(sizes) / self._count:
            order = self._grouped(order, np.array(sizes), generator)
        return [batches[index] for index in order.tolist()]

    def _grouped(self, order: Integers, sizes: Integers, generator: torch.Generator) -> Integers:
        """A random order with batches of similar sizes side by side: the blocks of the sorted order are shuffled."""
        multiple = self.multiple_of or 1
        block = multiple * max(1, _SHARDS // multiple)
        ranks = np.argsort(np.argsort(sizes))
        blocks = ranks // block
        # The block that is not full stays the last one.
        places = np.arange(self._count // block + 1)
        places[:-1] = _permutation(self._count // block, generator)
        in_order = places[blocks[order]]
        return order[np.argsort(in_order, kind="stable")]

    def _distribute(self, documents: Integers, width: int) -> tuple[list[list[int]], list[int]]:
        """Give each document, the longest first, to the batch with the fewest tokens.

        Documents whose lengths are in the same interval of `width` come in the given order.

        Returns:
            The batches, and the tokens of each.
        """
        classes = self.lengths[documents] // width
        longest_first = documents[np.argsort(-classes, kind="stable")]
        lengths = self.lengths[longest_first] * self._count
        batches: list[list[int]] = [[] for _ in range(self._count)]
        # A heap of tokens * count + batch, since integers are compared faster than tuples.
        heap = list(range(self._count))
        for document, length in zip(longest_first.tolist(), lengths.tolist(), strict=True):
            smallest = heap[0]
            batches[smallest % self._count].append(document)
            heapq.heapreplace(heap, smallest + length)
        sizes = [0] * self._count
        for entry in heap:
            sizes[entry % self._count] = entry // self._count
        return batches, sizes


def _permutation(length: int, generator: torch.Generator) -> Integers:
    order: Integers = torch.randperm(length, generator=generator).numpy()
    return order

# SPDX-License-Identifier: Apache-2.0
"""Iterable datasets on several processes: each reads all samples and keeps its slice of every global batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .position import SplitProgress
from .shard import check_divisible
from .steps import ReadPlan, ShardSplit


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of `dataset` that process `process_index` of `num_processes` reads.

    All processes must read the samples in the same order. The epoch is passed to the dataset's `set_epoch`. Without
    that method, the dataset's `generator`, if any, is seeded with the epoch.

    Args:
        dataset: the dataset of all processes.
        batch_size: the samples of one process in a step.
        drop_last: drop an incomplete last global batch.
        num_processes: the number of shards.
        process_index: which shard this is: of each `batch_size * num_processes` consecutive samples, process `i`
            takes the `i`-th `batch_size`.
        split_batches: the global batch has `batch_size` samples, and each process takes a slice.
        even_batches: fill the last global batch with the first samples.
        exact: repeat no sample. A process without samples in the last global batch yields its first sample as a
            placeholder.

    Raises:
        PrepareError: `split_batches` with a batch size that is not a multiple of `num_processes`.

    Example:
        list(IterableDatasetShard(stream_of_0_to_5, batch_size=2, num_processes=2, process_index=1))  # [2, 3, 0, 1]
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        exact: bool = False,
    ) -> None:
        check_divisible(batch_size, num_processes, split_batches, False, type(self).__name__)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.exact = exact
        self.epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        # This process's samples, including the samples that fill the last batch.
        plan = self.plan()
        return len(plan) * (plan.stride // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        for step in self.plan().steps(self.open()):
            yield from step.data

    def plan(self) -> ReadPlan:
        """The dataset, and how it is split, according to the present attributes."""
        cut = ShardSplit(
            self.num_processes,
            self.process_index,
            self.split_batches,
            self.even_batches,
            self.exact,
        )
        return ReadPlan(self.dataset, True, self.batch_size, self.drop_last, cut)

    def open(self) -> Iterator[Any]:
        """An iterator over the samples of one pass, of all processes."""
        # With `exact` the order is that of a plain run: all ranks share the generator's state and do not seed it.
        generator = getattr(self.dataset, "generator", None)
        if (
            isinstance(generator, torch.Generator)
            and not hasattr(self.dataset, "set_epoch")
            and not self.exact
        ):
            generator.manual_seed(self.epoch)
        return iter(self.dataset)


class Remainder(IterableDataset[Any]):
    """What is left of a dataset whose shards were read side by side: the rest of each shard, one after the other.

    Args:
        dataset: a dataset with `shard` and `set_epoch`.
        split: the number of shards, and the samples read of each.
        epoch: the epoch of the pass.
    """

    def __init__(self, dataset: Any, split: SplitProgress, epoch: int) -> None:
        self.dataset = dataset
        self.split = split
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.split.shards):
            shard = self.dataset.shard(num_shards=self.split.shards, index=index)
            shard.set_epoch(self.epoch)
            yield from itertools.islice(shard, self.split.read, None)


def open_stream(dataset: Any) -> Iterator[Any]:
    """The samples of an iterable dataset; of a shard, those of all processes."""
    if isinstance(dataset, IterableDatasetShard):
        return dataset.open()
    return iter(dataset)

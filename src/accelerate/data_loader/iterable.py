# SPDX-License-Identifier: Apache-2.0
"""Iterable datasets between processes: each reads the whole stream and keeps its own part of every global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .shard import check_part
from .steps import ReadPlan, ShardSplit


class IterableDatasetShard(IterableDataset):
    """The samples of `dataset` that process `process_index` of `num_processes` reads.

    Of each `batch_size * num_processes` consecutive samples, process `i` takes the `i`-th `batch_size`; with
    `split_batches` the global batch has `batch_size` samples, and each process takes a part. The last global batch is
    completed with the first samples (`even_batches`), falls as it falls (`exact`: a process without samples yields
    the first one of it as a placeholder), or is left out (`drop_last`). All processes must see the stream in the same
    order: a dataset with `set_epoch` is told the epoch, one with a `generator` has it seeded with the epoch.

    Raises PrepareError for `split_batches` where `batch_size` is no multiple of `num_processes`.

    Example:
        list(IterableDatasetShard(stream_of_0_to_5, batch_size=2, num_processes=2, process_index=1))  # [2, 3, 0, 1]
    """

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        exact: bool = False,
    ) -> None:
        check_part(batch_size, num_processes, split_batches, False, type(self).__name__)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.exact = exact
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        # The API counts this process's samples with those that complete the last batch.
        plan = self.plan()
        return len(plan) * (plan.stride // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        for samples, _, _ in self.plan().steps(self.open()):
            yield from samples

    def plan(self) -> ReadPlan:
        """The stream and this process's cut of it, as the attributes now say."""
        cut = ShardSplit(self.num_processes, self.process_index, self.split_batches, self.even_batches, self.exact)
        return ReadPlan(self.dataset, True, self.batch_size, self.drop_last, cut)

    def open(self) -> Iterator[Any]:
        """The stream of one pass."""
        # With `exact` the order is the plain run's: the generator goes on from where it is, on all ranks alike.
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch") and not self.exact:
            generator.manual_seed(self.epoch)
        return iter(self.dataset)


def open_stream(dataset: Any) -> Iterator[Any]:
    """The samples of an iterable dataset; of the whole one where it is a shard."""
    return dataset.open() if isinstance(dataset, IterableDatasetShard) else iter(dataset)

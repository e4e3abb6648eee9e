# SPDX-License-Identifier: Apache-2.0
"""The batches of one shard: a batch sampler that splits another one between the processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from ..core.errors import PrepareError
from .samplers import SkipBatchSampler
from .steps import ReadPlan, ShardSplit


class BatchSamplerShard(BatchSampler):
    """The batches of `batch_sampler` that process `process_index` of `num_processes` reads.

    Args:
        batch_sampler: the batch sampler of all processes.
        num_processes: the number of shards.
        process_index: which shard this is.
        split_batches: each batch is split between the processes. Otherwise batch `i` goes to process
            `i % num_processes`.
        even_batches: fill the last step with samples from the start of the epoch, so that every process has equally
            many batches of the same length.
        exact: repeat no sample. A process without samples in the last step gets the step's first sample as a
            placeholder, so that all processes make equally many steps.

    Raises:
        PrepareError: `split_batches` with a batch size that is not a multiple of `num_processes`. With `exact` the
            batch sampler may have no batch size: each of its batches is a global batch and is split equally.

    Example:
        list(BatchSamplerShard(BatchSampler(range(6), 2, False), num_processes=2, process_index=1))
        # [[2, 3], [0, 1]]
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        exact: bool = False,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.exact = exact
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))
        check_divisible(self.batch_size, num_processes, split_batches, exact, type(self).__name__)

    @property
    def total_length(self) -> int:
        """The batches of all processes together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.plan())

    def __iter__(self) -> Iterator[Any]:
        plan = self.plan()
        return (step.data for step in plan.steps(plan.open()))

    def plan(self) -> ReadPlan:
        """The order that these batches come from, and how it is split, according to the present attributes."""
        cut = ShardSplit(
            self.num_processes,
            self.process_index,
            self.split_batches,
            self.even_batches,
            self.exact,
        )
        return order_of(self.batch_sampler, cut)


def check_divisible(
    batch_size: int | None, shards: int, split: bool, exact: bool, who: str
) -> None:
    """Raise PrepareError where batches of `batch_size` cannot be split into `shards` equal slices."""
    if not split or shards == 1 or (exact and batch_size is None):
        return
    if batch_size is None:
        raise PrepareError(
            f"{who}: split_batches=True splits each batch into {shards} slices, and this loader has no batch size. "
            "Give the DataLoader a `batch_size`, its batch sampler a `batch_size`, or use split_batches=False."
        )
    if batch_size % shards:
        raise PrepareError(
            f"{who}: split_batches=True splits each batch into {shards} slices (one for each process), and the batch "
            f"size {batch_size} is not a multiple of {shards}. Use one that is, another number of processes, or "
            "split_batches=False."
        )


def order_of(batch_sampler: Any, cut: ShardSplit) -> ReadPlan:
    """The order behind a batch sampler: single samples for torch's `BatchSampler`, batches for any other."""
    if isinstance(batch_sampler, SkipBatchSampler):
        inner = order_of(batch_sampler.batch_sampler, cut)
        inner.skip += batch_sampler.skip_batches * (
            inner.size if inner.of_samples and inner.size else 1
        )
        return inner
    size = getattr(batch_sampler, "batch_size", None)
    drop_last = bool(getattr(batch_sampler, "drop_last", False))
    if (
        isinstance(batch_sampler, BatchSampler)
        and type(batch_sampler).__iter__ is BatchSampler.__iter__
    ):
        return ReadPlan(batch_sampler.sampler, True, size, drop_last, cut)
    return ReadPlan(batch_sampler, False, size, drop_last, cut)


def plan_of(batch_sampler: Any) -> ReadPlan:
    """The plan of any batch sampler; all batches of one that is not a shard are read."""
    if isinstance(batch_sampler, SkipBatchSampler):
        plan = plan_of(batch_sampler.batch_sampler)
        plan.skip += batch_sampler.skip_batches * plan.stride
        return plan
    if type(batch_sampler) is BatchSamplerShard:
        return batch_sampler.plan()
    return order_of(batch_sampler, ShardSplit())

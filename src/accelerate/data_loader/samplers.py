# SPDX-License-Identifier: Apache-2.0
"""The samplers and datasets that this package puts into loaders, and functions that find and replace samplers."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

from ..core.errors import PrepareError
from .steps import ReadPlan, ShardSplit, SplitProgress


class EpochSampler:
    """A sampler whose order follows from its seed and the epoch, so that a position needs no other state."""

    initial_seed: int
    epoch: int = 0
    # All ranks are known to have this seed.
    seed_agreed: bool

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


class SeedableRandomSampler(EpochSampler, RandomSampler):
    """Shuffles with the seed `data_seed + epoch`, so that the order of an epoch does not depend on earlier draws.

    Without `set_epoch` the epoch increases by one after each complete pass.

    Args:
        *args: those of torch's `RandomSampler`.
        **kwargs: those of torch's `RandomSampler`, and `data_seed` (by default torch's initial seed).

    Example:
        sampler = SeedableRandomSampler(dataset, data_seed=42)
        sampler.set_epoch(3)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.generator: torch.Generator | None
        self.seed_agreed = data_seed is not None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


class SkipBatchSampler(BatchSampler):
    """The batches of `batch_sampler` without the first `skip_batches`, whose indices are drawn but not used."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield batch

    @property
    def total_length(self) -> int:
        """The number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __getattr__(self, name: str) -> Any:
        # The attributes of the wrapped sampler: batch_size, drop_last, sampler, ...
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def innermost(batch_sampler: Any) -> Any:
    """The user's batch sampler inside those of this package."""
    while _is_wrapper(batch_sampler):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler


def _is_wrapper(batch_sampler: Any) -> bool:
    return "batch_sampler" in getattr(batch_sampler, "__dict__", {})


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices that a loader (prepared or not) uses, or None."""
    batch_sampler = dataloader.batch_sampler
    if batch_sampler is None:
        return innermost(dataloader.sampler)
    return getattr(innermost(batch_sampler), "sampler", None)


def with_sampler(batch_sampler: Any, sampler: Sampler[int]) -> Any:
    """A copy of `batch_sampler` that draws from `sampler`. The original is not changed."""
    fresh = copy.copy(batch_sampler)
    if _is_wrapper(fresh):
        fresh.batch_sampler = with_sampler(fresh.batch_sampler, sampler)
    else:
        fresh.sampler = sampler
    return fresh


def shuffles_plainly(sampler: Any) -> bool:
    """Whether `sampler` is torch's random sampler, and not a subclass with another order."""
    return (
        isinstance(sampler, RandomSampler)
        and not isinstance(sampler, SeedableRandomSampler)
        and type(sampler).__iter__ is RandomSampler.__iter__
    )


def epoch_listeners(*roots: Any) -> list[Any]:
    """The objects with a `set_epoch` among `roots` and the samplers inside them, each once."""
    objects: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        candidate = waiting.pop(0)
        if candidate is None or id(candidate) in objects:
            continue
        objects[id(candidate)] = candidate
        attributes = getattr(candidate, "__dict__", {})
        waiting.append(attributes.get("batch_sampler"))
        waiting.append(attributes.get("sampler"))
    return [
        candidate
        for candidate in objects.values()
        if callable(getattr(candidate, "set_epoch", None))
    ]


# For samplers and datasets that loaders have told an epoch: which one, and how far their user is ahead of the loader.
_TOLD: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def tell_epoch(listener: Any, epoch: int, overrule: bool = False) -> None:
    """Call `set_epoch` of a sampler or dataset. If its user has set another epoch, that one stays and counts on.

    Args:
        listener: the sampler or dataset. What its user sets is seen if it has an attribute `epoch`.
        epoch: the loader's epoch.
        overrule: replace the user's epoch.
    """
    try:
        told, ahead = _TOLD.get(listener, (0, 0))
    except TypeError:  # neither hashable nor weakly referenced
        listener.set_epoch(epoch)
        return
    present = getattr(listener, "epoch", None)
    if overrule or not isinstance(present, int) or present < 0:
        ahead = 0
    elif present != told:
        ahead = present - epoch
    if ahead == 0 or present == told:
        listener.set_epoch(epoch + ahead)
    _TOLD[listener] = epoch + ahead, ahead


class BatchSamplerShard(BatchSampler):
    """The batches of `batch_sampler` that process `process_index` of `num_processes` reads.

    Args:
        batch_sampler: the batch sampler of all processes.
        num_processes: the number of shards.
        process_index: which shard this is.
        split_batches: each batch is split between the processes. Otherwise batch `i` goes to process
            `i % num_processes`.
        even_batches: fill the last step with samples from the start of the epoch, so that every process has the
            same number of batches of the same length.
        exact: do not repeat samples. A process without samples in the last step gets the step's first sample
            as a placeholder, so that all processes make the same number of steps.

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
        check_divisible(self.batch_size, _cut_of(self), type(self).__name__)

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
        return order_of(self.batch_sampler, _cut_of(self))


def _cut_of(shard: BatchSamplerShard | IterableDatasetShard) -> ShardSplit:
    return ShardSplit(
        shard.num_processes,
        shard.process_index,
        shard.split_batches,
        shard.even_batches,
        shard.exact,
    )


def check_divisible(batch_size: int | None, cut: ShardSplit, who: str) -> None:
    """Raise PrepareError where batches of `batch_size` cannot be split into equal slices, one for each shard."""
    if not cut.split or cut.shards == 1:
        return
    if batch_size is None and not cut.exact:
        raise PrepareError(
            f"{who}: split_batches=True splits each batch into {cut.shards} slices, but this "
            "loader does not have a batch size. Give the DataLoader or its batch sampler a "
            "`batch_size`, or use split_batches=False."
        )
    if batch_size is not None and batch_size % cut.shards:
        raise PrepareError(
            f"{who}: split_batches=True splits each batch into {cut.shards} slices (one for each "
            f"process), but the batch size {batch_size} is not a multiple of {cut.shards}. Change "
            "the batch size or the number of processes, or use split_batches=False."
        )


def order_of(batch_sampler: Any, cut: ShardSplit) -> ReadPlan:
    """The order behind a batch sampler: single samples for torch's `BatchSampler`, batches for any other."""
    if isinstance(batch_sampler, SkipBatchSampler):
        plan = order_of(batch_sampler.batch_sampler, cut)
        batch = 1
        if plan.of_samples and plan.size:
            batch = plan.size
        plan.skip += batch_sampler.skip_batches * batch
        return plan
    size = getattr(batch_sampler, "batch_size", None)
    drop_last = bool(getattr(batch_sampler, "drop_last", False))
    is_torch = getattr(type(batch_sampler), "__iter__", None) is BatchSampler.__iter__
    if is_torch:
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
        exact: do not repeat samples. A process without samples in the last global batch yields its first sample as a
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
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.exact = exact
        self.epoch: int = 0
        check_divisible(batch_size, _cut_of(self), type(self).__name__)

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
        return ReadPlan(self.dataset, True, self.batch_size, self.drop_last, _cut_of(self))

    def open(self) -> Iterator[Any]:
        """An iterator over the samples of one pass, of all processes."""
        # With `exact` the order is that of a plain run: all ranks share the generator's state and do not seed it.
        generator = getattr(self.dataset, "generator", None)
        seeds = not self.exact and not hasattr(self.dataset, "set_epoch")
        if seeds and isinstance(generator, torch.Generator):
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

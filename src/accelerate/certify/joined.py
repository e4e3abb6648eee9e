# SPDX-License-Identifier: Apache-2.0
"""Loaders of a process that reads in each step what several data shards read, joined in order to one batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..core.errors import PrepareError
from ..core.trees import leaves
from ..data_loader.assign import NO_BATCH
from ..data_loader.batch_source import BatchSource, altered, as_is, is_iterable, is_native
from ..data_loader.dispatch import DataLoaderDispatcher
from ..data_loader.loader import DataLoaderShard, PreparedLoader
from ..data_loader.order import (
    Order,
    RecordedOrder,
    States,
    capture,
    draw_worker_seed,
    preserved,
    restore,
)
from ..data_loader.rows import join_rows, rows_of
from ..data_loader.split import SplitLoader, filled_step, samples_in
from ..data_loader.steps import ReadPlan, ShardSplit, ShardStep, StreamPosition


class ShardGenerators:
    """The states of the random generators in the process of each shard.

    They differ from the first shard on which a data set or a `collate_fn` draws. What the loop draws moves the
    generators of all shards that have the state of the first one.

    Args:
        shards: their number.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._states: list[States] = []
        self._worker_seed: int | None = None

    def begin_pass(self) -> None:
        """Draw the seed of workers as the process of each shard does whose state is not that of the first one."""
        with preserved():
            for i, state in enumerate(self._states):
                if state != self._states[0]:
                    restore(state)
                    draw_worker_seed(None)
                    self._states[i] = capture()

    def each(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        """The function of the value of each shard, called with the generators of that shard."""
        present = capture()
        info = get_worker_info()
        if not self._states or (info is not None and info.seed != self._worker_seed):
            # A worker process begins with a seed that all shards share.
            self._states = [present] * self.shards
        if info is not None:
            self._worker_seed = info.seed
        first = self._states[0]
        states = [present if state == first else state for state in self._states]
        results = []
        for i, value in enumerate(values):
            restore(states[i])
            results.append(function(value))
            states[i] = capture()
        restore(states[0])
        self._states = states
        return results


class JoinedBatches(Dataset[Any]):
    """A data set that gives the batch of a step from the indices, or the samples, of each shard in it.

    Args:
        loader: whose data set and `collate_fn` are used.
        generators: of the shards.
    """

    def __init__(self, loader: DataLoader[Any], generators: ShardGenerators) -> None:
        self.dataset: Any = loader.dataset
        self.generators = generators
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._is_batched = loader.batch_sampler is not None or loader.batch_size is not None

    def __getattr__(self, name: str) -> Any:
        # What a `worker_init_fn` reads of the data set. A copy in a worker process has none yet.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, parts: list[tuple[Any, bool]]) -> Any:
        return self.collate(parts, self._samples)

    __getitems__ = __getitem__

    def _samples(self, indices: Any) -> Any:
        if not self._is_batched:
            return self.dataset[indices]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]

    def collate(self, parts: list[tuple[Any, bool]], read: Callable[[Any], Any] = as_is) -> Any:
        """The joined batch of what each shard reads, and whether it is more than a placeholder."""
        samples: list[Any] = []

        def batch(part: tuple[Any, bool]) -> Any:
            samples.append(read(part[0]))
            return self._collate(samples[-1])

        batches = self.generators.each(batch, parts)
        counted = [i for i, (_, is_counted) in enumerate(parts) if is_counted] or [0]
        try:
            return joined([batches[i] for i in counted])
        except PrepareError:
            if not self._is_batched:
                raise
            # Of another length, or with numbers for all of a batch: together they are padded to one length.
            return self._collate([sample for i in counted for sample in samples[i]])


def joined(batches: list[Any]) -> Any:
    """Batches of one step as one.

    Raises:
        PrepareError: they cannot be joined.
    """
    if len(batches) == 1:
        return batches[0]
    reason = "values for all of a batch differ"
    try:
        numbers = [list(map(float, leaves(batch, _is_number))) for batch in batches]
        if all(values == numbers[0] for values in numbers):
            return join_rows(batches, [rows_of(batch, None) for batch in batches])
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error)
    raise PrepareError(
        f"accelerate certify: the batches that {len(batches)} processes read in one step cannot be joined to one "
        f"({reason}). Pad them to one length, or compare with a layout as the reference: --reference ddp:2"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, int | float)


@dataclass
class JoinedPlan(ReadPlan):
    """A plan in which each process reads several consecutive shards of a step. `cut` counts processes.

    Fields:
        joined: the shards that a process reads.
    """

    joined: int = 1

    @property
    def _batches_in_step(self) -> int:
        if self.cut.split:
            return 1
        return self.cut.shards * self.joined

    def steps(self, stream: Iterator[Any], start: int = 0) -> Iterator[ShardStep]:
        """The steps of this process: what each of its shards reads, and whether it is more than a placeholder."""
        first = self.cut.index * self.joined
        shards = []
        for index, elements in enumerate(itertools.tee(stream, self.joined), first):
            cut = dataclasses.replace(self.cut, shards=self.cut.shards * self.joined, index=index)
            plan = ReadPlan(
                self.stream,
                self.of_samples,
                self.size,
                self.drop_last,
                cut,
                self.skip,
                self.counted,
            )
            shards.append(plan.steps(elements, start))
        return map(self.join, itertools.zip_longest(*shards))

    def join(self, steps: tuple[ShardStep | None, ...]) -> ShardStep:
        """The step of this process from those of its shards. None: a shard has no step left."""
        present = [step for step in steps if step is not None]
        counts = present[0].counts
        first = self.cut.index * self.joined
        parts = []
        for index, step in enumerate(steps, first):
            # Without samples, `exact` reads a placeholder.
            is_placeholder = self.cut.exact and counts is not None and not counts[index]
            if step is not None:
                parts.append((step.data, not is_placeholder))
        if counts is not None:
            counts = self.counts(counts)
        return ShardStep(parts, counts, present[0].position)

    def counts(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The samples that each process has in a step, from those of each shard."""
        starts = range(0, len(counts), self.joined)
        return tuple(sum(counts[start : start + self.joined]) for start in starts)


class _Joined(PreparedLoader):
    """A loader that joins shards.

    Args (of `around`):
        generators: those of the shards that this process reads.
        process, processes: which of the processes this is, that read all shards together.
    """

    generators: ShardGenerators
    process: int
    processes: int

    def _configure(self, **options: Any) -> None:
        for name in ("generators", "process", "processes"):
            setattr(self, name, options.pop(name))
        super()._configure(**options)

    def options(self) -> dict[str, Any]:
        """The arguments with which `around` makes another loader like this one."""
        names = ("generators", "process", "processes")
        return {**super().options(), **{name: getattr(self, name) for name in names}}

    def plan(self) -> ReadPlan:
        """The order of the samples, and how it is split between processes that read several shards."""
        plan = super().plan()
        cut = dataclasses.replace(plan.cut, shards=self.processes, index=self.process)
        return JoinedPlan(
            plan.stream,
            plan.of_samples,
            plan.size,
            plan.drop_last,
            cut,
            plan.skip,
            plan.counted,
            self.generators.shards,
        )

    def _share(self, plan: ReadPlan, order: Order) -> None:
        super()._share(plan, order)
        if isinstance(order, RecordedOrder):
            order.at_once = True


class JoinedLoader(_Joined, DataLoaderShard):
    """The loader of a process that reads the steps of several shards."""

    def _open_source(self) -> BatchSource:
        base = self.base_dataloader
        batches = JoinedBatches(base, self.generators)
        if is_iterable(base):
            return BatchSource(altered(base, collate_fn=batches.collate))
        return BatchSource(altered(base, dataset=batches, collate_fn=as_is))

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        if self.base_dataloader.generator is None and not order.resumes:
            self.generators.begin_pass()
        return super()._open(plan, order, start)


class JoinedDispatcher(_Joined, DataLoaderDispatcher):
    """The loader that one process reads for all shards, which are slices of what it reads."""

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        shards = DataLoaderDispatcher.plan(self)
        for step in self.assigned(shards, order, start)():
            batches = []
            for i, batch in enumerate(step.batches):
                is_placeholder = self.cut.exact and step.counts is not None and not step.counts[i]
                if batch is not NO_BATCH and not is_placeholder:
                    batches.append(batch)
            counts = step.counts
            if counts is not None:
                counts = (sum(counts),)
            yield ShardStep(joined(batches), counts, step.position, step.final)


class JoinedSplitLoader(_Joined, SplitLoader):
    """The loader of a process that reads the shards of a data set which splits itself."""

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        if self.unsplit is None or start.consumed:
            raise PrepareError(
                "accelerate certify: a dataset that was split for the processes, and the rest of an epoch of one, are "
                "read by as many processes. Compare with a layout as the reference: --reference ddp:2"
            )
        opened = self.generators.each(self._open_shard, range(self.cut.shards))
        steps = self._equalized(opened, self.cut.even, plan.drop_last)
        skipped = plan.skip // plan.stride
        for number, step in enumerate(itertools.islice(steps, skipped, None), skipped + 1):
            step.position = StreamPosition(number * plan.stride)
            yield step

    def _open_shard(self, shard: int) -> Iterator[ShardStep]:
        dataset = self.unsplit.shard(num_shards=self.cut.shards, index=shard)
        dataset.set_epoch(self.iteration)
        source = BatchSource(altered(self.base_dataloader, dataset=dataset))
        plan = dataclasses.replace(SplitLoader.plan(self), cut=ShardSplit(), skip=0)
        return source.open(plan, self._new_order(), StreamPosition())

    def _equalized(
        self, shards: list[Iterator[ShardStep]], even: bool, drop_last: bool
    ) -> Iterator[ShardStep]:
        """The joined steps, as `equalized` fills those of one process."""
        heads: list[ShardStep] = []
        while True:
            steps = self.generators.each(lambda shard: next(shard, None), shards)
            present = [step for step in steps if step is not None]
            if not present or (drop_last and len(present) < len(steps)):
                return
            heads = heads or [dataclasses.replace(step) for step in present]
            counts = [samples_in(step) for step in present]
            if even and not drop_last:
                present = [
                    filled_step(step, max(counts), head)
                    for step, head in zip(steps, heads, strict=True)
                ]
            ends = [step is None or step.last for step in steps]
            last = all(ends) or (drop_last and any(ends))
            data = joined([step.data for step in present])
            yield ShardStep(data, (sum(counts),), 0, last)


def join_shards(
    loader: Any, process: int, processes: int, generators: ShardGenerators
) -> DataLoader[Any]:
    """A loader with what several shards read.

    Args:
        loader: the prepared loader of the first shard that this process reads.
        process: which of the processes this is, that read all shards together.
        processes: their number.
        generators: those of the shards that this process reads.

    Raises:
        PrepareError: only the processes of the layout itself can read this loader's shards.
    """
    kinds: dict[type, Any] = {DataLoaderShard: JoinedLoader}
    if processes == 1:
        kinds[DataLoaderDispatcher] = JoinedDispatcher
        kinds[SplitLoader] = JoinedSplitLoader
    kind = kinds.get(type(loader))
    if kind is None or not is_native(loader.base_dataloader):
        shards = processes * generators.shards
        raise PrepareError(
            f"accelerate certify: {processes} process(es) cannot read this {type(loader).__name__} as {shards} do. "
            "Compare with a layout as the reference that has as many data shards: --reference ddp:2"
        )
    options = {"process": process, "processes": processes, "generators": generators}
    prepared: DataLoader[Any] = kind.around(loader.base_dataloader, **loader.options(), **options)
    return prepared

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
from ..data_loader.split import SplitLoader, samples_in
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
        worker = get_worker_info()
        is_new_worker = worker is not None and worker.seed != self._worker_seed
        if is_new_worker or not self._states:
            # A worker process begins with a seed that all shards share.
            self._states = [present] * self.shards
        if worker is not None:
            self._worker_seed = worker.seed
        first = self._states[0]
        results = []
        for i, value in enumerate(values):
            state = self._states[i]
            if state == first:
                state = present
            restore(state)
            results.append(function(value))
            self._states[i] = capture()
        restore(self._states[0])
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
        return self.collate(parts, self._read)

    __getitems__ = __getitem__

    def _read(self, indices: Any) -> Any:
        if not self._is_batched:
            return self.dataset[indices]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]

    def collate(self, parts: list[tuple[Any, bool]], read: Callable[[Any], Any] = as_is) -> Any:
        """The joined batch of what each shard reads, and whether it is more than a placeholder."""

        def read_part(part: tuple[Any, bool]) -> tuple[Any, Any]:
            samples = read(part[0])
            return samples, self._collate(samples)

        batches = []
        samples: list[Any] = []
        pairs = self.generators.each(read_part, parts)
        for (samples_of_shard, batch), (_, is_counted) in zip(pairs, parts, strict=True):
            if is_counted:
                batches.append(batch)
                samples.append(samples_of_shard)
        if not batches:
            return pairs[0][1]
        try:
            return joined(batches)
        except PrepareError:
            if not self._is_batched:
                raise
            # Of another length, or with numbers for all of a batch: together they are padded to one length.
            return self._collate(list(itertools.chain.from_iterable(samples)))


def joined(batches: list[Any]) -> Any:
    """Batches of one step as one.

    Raises:
        PrepareError: they cannot be joined.
    """
    if len(batches) == 1:
        return batches[0]
    reason = "values for an entire batch differ"
    try:
        numbers = [list(map(float, leaves(batch, _is_number))) for batch in batches]
        if all(values == numbers[0] for values in numbers):
            return join_rows(batches, [rows_of(batch, None) for batch in batches])
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error)
    raise PrepareError(
        f"accelerate certify: the batches that {len(batches)} processes read in one step cannot "
        f"be joined ({reason}). Pad them to one length, or use a layout as the reference: "
        "--reference ddp:2"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, int | float)


@dataclass
class JoinedPlan(ReadPlan):
    """A plan of a process that reads a step of all shards.

    Fields:
        joined: their number.
    """

    joined: int = 1

    @property
    def _batches_in_step(self) -> int:
        if self.cut.split:
            return 1
        return self.joined

    def steps(self, stream: Iterator[Any], start: int = 0) -> Iterator[ShardStep]:
        """The joined steps: what each shard reads, and whether it is more than a placeholder."""
        steps = []
        for index, elements in enumerate(itertools.tee(stream, self.joined)):
            cut = dataclasses.replace(self.cut, shards=self.joined, index=index)
            plan = dataclasses.replace(self, cut=cut)
            steps.append(ReadPlan.steps(plan, elements, start))
        return map(self._join, itertools.zip_longest(*steps))

    def _join(self, steps: tuple[ShardStep | None, ...]) -> ShardStep:
        # A shard may have no step left.
        present = [step for step in steps if step is not None]
        parts = [(step.data, True) for step in present]
        counts = present[0].counts
        if counts is not None:
            if self.cut.exact:
                # A shard without samples reads a placeholder.
                pairs = zip(present, counts, strict=False)
                parts = [(step.data, count > 0) for step, count in pairs]
            counts = (sum(counts),)
        return ShardStep(parts, counts, present[0].position)


class _Joined(PreparedLoader):
    """A loader that joins shards, whose generators `around` takes as the argument `generators`."""

    generators: ShardGenerators

    def _configure(self, **options: Any) -> None:
        self.generators = options.pop("generators")
        super()._configure(**options)

    def options(self) -> dict[str, Any]:
        """The arguments with which `around` makes another loader like this one."""
        return {**super().options(), "generators": self.generators}

    def plan(self) -> ReadPlan:
        """The order of the samples, whose steps this process reads entirely."""
        plan = super().plan()
        plan.cut = dataclasses.replace(plan.cut, shards=1, index=0)
        fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        return JoinedPlan(**fields, joined=self.generators.shards)

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
        plan_of_shards = DataLoaderDispatcher.plan(self)
        for step in self.assigned(plan_of_shards, order, start)():
            batches = step.batches
            counts = step.counts
            if counts is not None:
                if self.cut.exact:
                    # A shard without samples has a placeholder.
                    batches = [batch for batch, count in zip(batches, counts, strict=True) if count]
                counts = (sum(counts),)
            batches = [batch for batch in batches if batch is not NO_BATCH]
            yield ShardStep(joined(batches), counts, step.position, step.final)


class JoinedSplitLoader(_Joined, SplitLoader):
    """The loader of a process that reads the shards of a data set which splits itself."""

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        if self.unsplit is None or start.consumed:
            raise _unreadable("a dataset that was split for the processes, or the rest of an epoch")
        opened = self.generators.each(self._open_shard, range(self.generators.shards))
        position = 0
        is_last = False
        while not is_last:
            steps = self.generators.each(lambda shard: next(shard, None), opened)
            if None in steps:
                return
            ends = [step.last for step in steps]
            is_last = any(ends)
            counts = [samples_in(step) for step in steps]
            is_uneven = len(set(counts)) > 1 or is_last != all(ends)
            if is_uneven and not plan.drop_last:
                raise _unreadable("the end of an epoch whose shards have different lengths")
            position += plan.stride
            if position > plan.skip:
                data = joined([step.data for step in steps])
                yield ShardStep(data, (sum(counts),), StreamPosition(position), is_last)

    def _open_shard(self, shard: int) -> Iterator[ShardStep]:
        dataset = self.unsplit.shard(num_shards=self.generators.shards, index=shard)
        dataset.set_epoch(self.iteration)
        source = BatchSource(altered(self.base_dataloader, dataset=dataset))
        plan = SplitLoader.plan(self)
        plan.cut = ShardSplit()
        plan.skip = 0
        return source.open(plan, self._new_order(), StreamPosition())


_KINDS: dict[type, Any] = {
    DataLoaderShard: JoinedLoader,
    DataLoaderDispatcher: JoinedDispatcher,
    SplitLoader: JoinedSplitLoader,
}


def join_shards(loader: Any, generators: ShardGenerators) -> DataLoader[Any]:
    """A loader with what all shards read.

    Args:
        loader: the prepared loader of the first shard.
        generators: of the shards.

    Raises:
        PrepareError: only the processes of the layout itself can read this loader's shards.
    """
    kind = _KINDS.get(type(loader))
    base = loader.base_dataloader
    if kind is None or not is_native(base):
        raise _unreadable(f"this {type(loader).__name__}")
    prepared: DataLoader[Any] = kind.around(base, **loader.options(), generators=generators)
    return prepared


def _unreadable(what: str) -> PrepareError:
    return PrepareError(
        f"accelerate certify: {what} can be read only by as many processes as the layout has data "
        "shards. Use a reference layout with the same number: --reference ddp:2"
    )

# SPDX-License-Identifier: Apache-2.0
"""The batches of one epoch from a torch loader, with the counts and position of each step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from ..core.errors import PrepareError
from .fetch import Fetch, map_fetch, pinned
from .iterable import IterableDatasetShard, open_stream
from .order import Order, ReplayedOrder, draw_worker_seed
from .position import StreamPosition, WorkerRandom
from .random_states import preserved
from .samplers import innermost
from .shard import plan_of
from .steps import ReadPlan, ShardSplit, ShardStep, is_generator, mark_last
from .workers import (
    MapWorker,
    Meter,
    StreamWorker,
    WorkerStart,
    altered,
    as_is,
    keeps_state,
    opened,
    unwrapped,
)


def stateful_class() -> type[DataLoader[Any]] | None:
    """The class `StatefulDataLoader` of torchdata; None where torchdata has not been imported."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return None if module is None else module.StatefulDataLoader


def has_state(loader: DataLoader[Any]) -> bool:
    """Whether the position of `loader` includes the state of its dataset."""
    kind = stateful_class()
    return kind is not None and isinstance(loader, kind) and keeps_state(unwrapped(loader.dataset))


def is_native(loader: DataLoader[Any]) -> bool:
    """Whether `loader` is iterated by torch's or torchdata's own code, which can be replaced."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return False
    return any(
        type(loader).__iter__ is kind.__iter__
        for kind in (DataLoader, stateful_class())
        if kind is not None
    )


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether the dataset is iterable, and not map-style."""
    return isinstance(loader.dataset, IterableDataset)


def plan_for(loader: DataLoader[Any], skip_batches: int = 0) -> ReadPlan:
    """The order that `loader` reads, and how its samplers or dataset split it."""
    if is_iterable(loader):
        plan = _plan_of_stream(loader)
    elif loader.batch_sampler is not None:
        plan = plan_of(loader.batch_sampler)
    else:
        # The dataset gets what the sampler yields: batches where that is a batch sampler.
        plan = plan_of(loader.sampler)
        if not isinstance(innermost(loader.sampler), BatchSampler):
            plan.counted, plan.size = False, None
    plan.skip += skip_batches * plan.stride
    return plan


def _plan_of_stream(loader: DataLoader[Any]) -> ReadPlan:
    dataset: Any = loader.dataset
    size = loader.batch_size
    if isinstance(dataset, IterableDatasetShard):
        plan = dataset.plan()
        if size is None:
            # The elements of the dataset are batches, and each goes to one shard.
            return ReadPlan(dataset.dataset, False, None, plan.drop_last, plan.cut, counted=False)
        if plan.stride == size * dataset.num_processes:
            return plan
    return ReadPlan(
        dataset, size is not None, size, loader.drop_last, ShardSplit(), counted=size is not None
    )


class BatchSource:
    """Reads a loader epoch by epoch. Keeps the loader with the workers where they are persistent."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._kept: tuple[Any, Any] | None = None

    @property
    def workers(self) -> int:
        """The number of processes that read an iterable dataset."""
        return max(1, self.loader.num_workers)

    def open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        """The batches of one pass from `start` on. Draws at once what torch's loader draws in `__iter__`."""
        loader = self.loader
        if not is_native(loader):
            return self._foreign(plan, order, start)
        if is_iterable(loader):
            if loader.num_workers:
                read = self._streamed
            else:
                read = self._stream_in_process
            return read(plan, order, start)
        if loader.num_workers == 0:
            return self._map_in_process(plan, order, start)
        if loader.in_order:
            return self._metered(plan, order, start)
        return self._foreign(plan, order, start)

    # -- in this process

    def _map_in_process(
        self, plan: ReadPlan, order: Order, start: StreamPosition
    ) -> Iterator[ShardStep]:
        loader: Any = self.loader
        if start.inner is not None:
            loader.dataset.load_state_dict(start.inner[0])
        stream = order.open(plan.open, plan.opens_lazily, start.consumed)
        if not order.resumes:
            draw_worker_seed(loader.generator)
        fetch = pinned(
            loader, map_fetch(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)
        )
        steps = plan.read(stream, start.consumed)
        if has_state(loader):
            return _fetched_with_state(steps, fetch, loader.dataset)
        return _fetched(steps, fetch)

    def _stream_in_process(
        self, plan: ReadPlan, order: Order, start: StreamPosition
    ) -> Iterator[ShardStep]:
        loader = self.loader
        if not order.resumes:
            draw_worker_seed(loader.generator)
        fetch = pinned(loader, loader.collate_fn)
        if start.inner is not None or has_state(loader):
            return _streamed_with_state(loader, plan, start, fetch)
        lazily = is_generator(unwrapped(loader.dataset))
        stream = order.open(lambda: open_stream(loader.dataset), lazily, start.consumed)
        return _fetched(plan.read(stream, start.consumed), fetch)

    # -- in worker processes

    def _metered(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        reader = [plan.cut.index, plan.cut.shards]
        start = dataclasses.replace(start, random=self._known_random(start.random, reader))
        engine, meter = self._with_meter(plan, order, start, in_workers=True)
        with self._seeded(order):
            batches = iter(engine)
        return _metered_batches(batches, meter, start, self.workers, reader)

    def _seeded(self, order: Order) -> contextlib.AbstractContextManager[None]:
        """A context in which torch draws the seed of workers; that of a resumed pass was drawn when it began."""
        if order.resumes:
            return preserved(("torch",))
        return contextlib.nullcontext()

    def _known_random(self, found: WorkerRandom | None, reader: list[int]) -> WorkerRandom | None:
        """The generators with which workers have to start; None where torch's are right, or nothing is known."""
        if found is None and self._kept is not None and self._kept[1].first:
            # Persistent workers of a pass that began with another worker than 0 are started again.
            meter = self._kept[1]
            found, self._kept = meter.random if meter.random_known else None, None
        if found is not None and len(found.states) == self.workers and found.reader == reader:
            return found
        return None

    def _with_meter(
        self, plan: ReadPlan, order: Order, start: StreamPosition, in_workers: bool = False
    ) -> tuple[Any, Meter]:
        loader = self.loader
        if self._kept is not None and start.inner is None and start.random is None:
            engine, meter = self._kept
        else:
            meter = Meter(loader)
            changes: dict[str, Any] = {
                "sampler" if loader.batch_sampler is None else "batch_sampler": meter
            }
            if in_workers:
                changes["dataset"] = MapWorker(loader, has_state(loader), start)
                changes["collate_fn"] = as_is
                changes["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
            if start.random is not None:
                # The seed that torch draws for the workers is not used.
                changes["generator"] = torch.Generator()
            engine = altered(loader, **changes)
            meter.random = start.random
            meter.first = 0 if start.random is None else start.random.turn
            if loader.persistent_workers:
                self._kept = (engine, meter)
            else:
                self._kept = None
        meter.arm(plan, order, start.consumed)
        return engine, meter

    def _streamed(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        loader = self.loader
        # The first batches are skipped here: which worker they come from is only known afterwards.
        steps = plan.skip // plan.stride if start.workers is None else 0
        plan = dataclasses.replace(plan, skip=0)
        key = (plan.cut, plan.size, start)
        if self._kept is None or self._kept[1] != key:
            engine = altered(
                loader,
                dataset=StreamWorker(loader, plan, start, has_state(loader)),
                batch_sampler=None,
                batch_size=None,
                drop_last=False,
                collate_fn=as_is,
                worker_init_fn=WorkerStart(loader.worker_init_fn),
            )
            self._kept = (engine, key) if loader.persistent_workers else None
        else:
            engine = self._kept[0]
        assert isinstance(order, ReplayedOrder)
        with order.applied():
            batches = iter(engine)
        return itertools.islice(_streamed_batches(batches, start, self.workers), steps, None)

    # -- loaders with a custom `__iter__`

    def _foreign(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        loader = self.loader
        begin = max(start.consumed, plan.skip)
        batches: Iterator[Any]
        if isinstance(order, ReplayedOrder) and is_iterable(loader):
            with order.applied():
                batches = iter(loader)
            steps = begin // plan.stride
            return _looking_ahead(itertools.islice(batches, steps, None), plan, steps * plan.stride)
        engine, meter = self._with_meter(plan, order, start)
        with self._seeded(order):
            batches = iter(engine)
        if plan.cut.shards > 1:
            batches = _checked_batches(batches, meter, loader)
        return _looking_ahead(batches, plan, begin)


def _fetched(steps: Iterator[ShardStep], fetch: Fetch) -> Iterator[ShardStep]:
    for step in steps:
        step.data = fetch(step.data)
        yield step


def _fetched_with_state(
    steps: Iterator[ShardStep], fetch: Fetch, dataset: Any
) -> Iterator[ShardStep]:
    for step in _fetched(steps, fetch):
        step.position = place = _as_place(step.position)
        place.inner = [dataset.state_dict()]
        yield step


def _streamed_with_state(
    loader: DataLoader[Any], plan: ReadPlan, start: StreamPosition, fetch: Fetch
) -> Iterator[ShardStep]:
    own = unwrapped(loader.dataset)

    def steps() -> Iterator[ShardStep]:
        for step in _fetched(opened(loader.dataset, plan, start), fetch):
            assert isinstance(step.position, int)
            step.position = StreamPosition(step.position, (step.position,), 0, [own.state_dict()])
            yield step

    return mark_last(steps())


def _metered_batches(
    batches: Iterator[Any], meter: Meter, start: StreamPosition, workers: int, reader: list[int]
) -> Iterator[ShardStep]:
    """The batches of a loader whose indices come from `meter`, with the steps that it has recorded."""
    random, inner = meter.random, list(start.inner or [None] * workers)
    # If the pass is not completed, persistent workers have drawn for batches that nobody has received.
    known, meter.random_known = meter.random_known, False
    for batch, worker, state, seed, changed in batches:
        step = meter.log.popleft()
        step.data = batch
        step.position = place = _as_place(step.position)
        if state is not None:
            inner[worker] = state
            place.inner = list(inner)
        if known:
            states = [{}] * workers if random is None else list(random.states)
            states[worker] = {**states[worker], **changed}
            place.random = random = WorkerRandom(seed, states, (worker + 1) % workers, reader)
        del batch
        yield step
    meter.random, meter.random_known = None if random is None else random._replace(turn=0), known


def _as_place(position: StreamPosition | int) -> StreamPosition:
    if isinstance(position, int):
        return StreamPosition(position)
    return position


def _streamed_batches(
    batches: Iterator[Any], start: StreamPosition, workers: int
) -> Iterator[ShardStep]:
    read = list(start.workers or [0] * workers)
    states = list(start.inner or [None] * workers)

    def steps() -> Iterator[ShardStep]:
        for batch, counts, position, worker, state in batches:
            read[worker], states[worker] = position, state
            inner = None if state is None else list(states)
            place = StreamPosition(sum(read), tuple(read), (worker + 1) % workers, inner)
            # Pinning makes lists of tuples.
            step = ShardStep(batch, None if counts is None else tuple(counts), place)
            del batch
            yield step

    return mark_last(steps())


def _looking_ahead(batches: Iterator[Any], plan: ReadPlan, begin: int) -> Iterator[ShardStep]:
    return mark_last(
        ShardStep(batch, None, begin + plan.stride * number)
        for number, batch in enumerate(batches, 1)
    )


def _checked_batches(
    batches: Iterator[Any], meter: Meter, loader: DataLoader[Any]
) -> Iterator[Any]:
    """`batches`, which must come from `meter`. Otherwise every shard would read all data."""
    for batch in batches:
        if not meter.started:
            raise PrepareError(
                f"{type(loader).__name__} does not use its `batch_sampler`, so its batches cannot be split between "
                "processes. Let the main process read it (dispatch_batches=True), or pass a torch DataLoader to "
                "`prepare`."
            )
        yield batch

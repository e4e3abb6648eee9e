# SPDX-License-Identifier: Apache-2.0
"""The batches of one epoch from a torch loader, with the counts and position of each step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from ..core import trees
from ..core.errors import PrepareError
from ..core.messages import warn
from .order import (
    Order,
    ReplayedOrder,
    States,
    capture,
    draw_worker_seed,
    keeps_state,
    preserved,
    restore,
)
from .samplers import IterableDatasetShard, innermost, open_stream, plan_of
from .steps import (
    ReadPlan,
    ShardSplit,
    ShardStep,
    StreamPosition,
    WorkerRandom,
    as_stream_position,
    is_generator,
    mark_last,
)

Fetch = Callable[[Any], Any]


def map_fetch(dataset: Any, collate: Fetch, batched: bool) -> Fetch:
    """A function from indices (one index where the loader does not batch) to a batch of a map-style dataset."""
    if not batched:
        return lambda index: collate(dataset[index])
    is_torch = collate is default_collate and type(dataset) is TensorDataset
    if is_torch and all(map(_is_plain, dataset.tensors)):
        return _rows_of(dataset.tensors)
    if getattr(dataset, "__getitems__", None):
        return lambda indices: collate(dataset.__getitems__(indices))
    return lambda indices: collate([dataset[index] for index in indices])


def _is_plain(tensor: torch.Tensor) -> bool:
    # Picking rows of these gives bit for bit what stacking samples gives.
    is_strided = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_strided and tensor.is_contiguous()


def _rows_of(tensors: tuple[torch.Tensor, ...]) -> Fetch:
    def fetch(indices: list[Any]) -> Any:
        if type(indices[0]) is int:
            rows = torch.tensor(indices)
            return [tensor[rows] for tensor in tensors]
        return default_collate([tuple(tensor[index] for tensor in tensors) for index in indices])

    return fetch


def pinned(loader: Any, fetch: Fetch) -> Fetch:
    """`fetch`, followed by pinning where the loader requests it."""
    if pin_device(loader) is None:
        return fetch
    return lambda wanted: pin_memory(fetch(wanted))


def pin_memory(batch: Any) -> Any:
    """`batch` with its tensors, and objects with a `pin_memory` of their own, in pinned memory."""
    return trees.map_leaves(
        lambda leaf: leaf.pin_memory(), batch, lambda value: hasattr(value, "pin_memory")
    )


def pin_device(loader: Any) -> str | None:
    """The kind of device to pin memory for, or None where the loader does not pin or this machine cannot."""
    if not loader.pin_memory:
        return None
    if not torch.accelerator.is_available():
        warn("pin_memory=True has no effect without an accelerator: memory is not pinned.")
        return None
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    if kind == "mps":
        warn("pin_memory=True is not supported on MPS: memory is not pinned.")
        return None
    return kind


def altered(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of `loader`, of the same class, with some attributes changed."""
    fresh = copy.copy(loader)
    # Without torch's check, which protects a loader in use: this one is new.
    fresh.__dict__.update(changes, _iterator=None)
    return fresh


def as_is(batch: Any) -> Any:
    """The collate function for batches that are collated already."""
    return batch


class Meter(Sampler[Any]):
    """A batch sampler that yields the indices of a plan's steps and records the steps."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.log: deque[ShardStep] = deque()
        self.started: bool = False
        # The generators of the workers (None: as torch seeds them), and the worker that read the first batch.
        self.random: WorkerRandom | None = None
        self.random_known: bool = True
        self.first: int = 0

    def arm(self, plan: ReadPlan, order: Order, consumed: int) -> None:
        """Set what the next pass reads."""
        self.plan = plan
        self.order = order
        self.consumed = consumed
        self.started = False

    def __len__(self) -> int:
        return len(dataclasses.replace(self.plan, skip=max(self.plan.skip, self.consumed)))

    def __iter__(self) -> Iterator[Any]:
        log: deque[ShardStep] = deque()
        self.log = log
        self.started = True
        stream = self.order.open(self.plan.open, self.plan.opens_lazily, self.consumed)
        steps = self.plan.read(stream, self.consumed)

        # What is before this is done by the call, before the first batch is requested.
        def recorded() -> Iterator[Any]:
            for step in steps:
                log.append(step)
                yield step.data

        return recorded()


class MapWorker(Dataset[Any]):
    """A map-style dataset in a worker process.

    It returns each batch with the worker's number, the state of the dataset after it (None for one without), the seed
    of all workers, and the states of the global generators that have changed since the worker's last batch.

    Args:
        loader: the loader.
        has_state: whether the dataset has a state.
        start: the position from which the workers continue.
    """

    def __init__(self, loader: DataLoader[Any], has_state: bool, start: StreamPosition) -> None:
        self.dataset: Any = loader.dataset
        self.has_state = has_state
        self.states: Any = start.inner
        self.random: WorkerRandom | None = start.random
        self.turn: int = 0
        if start.random is not None:
            self.turn = start.random.turn
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn
        self.batched: bool = loader.batch_sampler is not None
        self.fetch: Fetch | None = None
        self.seed: int = 0
        self._last: States = {}

    def seed_generators(self, worker: int, base_seed: int) -> int:
        """Seed this worker's generators as torch does, where a pass is continued with its seed. Returns the seed."""
        if self.random is None:
            self.seed = base_seed
        else:
            self.seed = self.random.seed
            random.seed(self.seed + worker)
            torch.manual_seed(self.seed + worker)
            words = [worker, self.seed & 0xFFFFFFFF, self.seed >> 32, 0]
            sequence = np.random.SeedSequence(words)
            np.random.seed(sequence.generate_state(4))
        self._last = capture()
        return self.seed + worker

    def restore_generators(self, worker: int) -> None:
        """Set this worker's generators to the states that they had at the position."""
        if self.random is not None:
            restore(self.random.states[worker])
            self._last = capture()

    def __getitems__(self, indices: Any) -> tuple[Any, int, Any, int, States]:
        worker = worker_number()
        if self.fetch is None:
            self.fetch = map_fetch(self.dataset, self.collate, self.batched)
            if self.states is not None and self.states[worker] is not None:
                self.dataset.load_state_dict(self.states[worker])
        batch = self.fetch(indices)
        before = self._last
        self._last = capture()
        changed = {kind: state for kind, state in self._last.items() if state != before[kind]}
        dataset_state = None
        if self.has_state:
            dataset_state = self.dataset.state_dict()
        return batch, worker, dataset_state, self.seed, changed

    __getitem__ = __getitems__


class StreamWorker(IterableDataset[Any]):
    """The batches of one shard of an iterable dataset, collated in the worker, each with its step's counts.

    Yields `(batch, counts, position in this worker's stream, worker, state of the dataset)`.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: ReadPlan, start: StreamPosition, has_state: bool
    ) -> None:
        self.dataset: Dataset[Any] = loader.dataset
        self.turn: int = start.turn
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn
        self.plan = plan
        self.start = start
        self.has_state = has_state

    def __iter__(self) -> Iterator[tuple[Any, Any, Any, int, Any]]:
        worker = worker_number()
        dataset = unwrapped(self.dataset)
        state = None
        for step in opened(self.dataset, self.plan, self.start, worker):
            if self.has_state:
                state = dataset.state_dict()
            # A plain tuple: torch's workers send it, and pin what is in it.
            yield self.collate(step.data), step.counts, step.position, worker, state


def opened(
    dataset: Any, plan: ReadPlan, start: StreamPosition, worker: int = 0
) -> Iterator[ShardStep]:
    """The steps of a stream from `start` on, by the dataset's state if it has one, else by reading up to there."""
    consumed = 0
    if start.workers is not None:
        consumed = start.workers[worker]
    if start.inner is None or start.inner[worker] is None:
        yield from plan.steps(open_stream(dataset), consumed)
        return
    unwrapped(dataset).load_state_dict(start.inner[worker])
    unskipped = dataclasses.replace(plan, skip=0)
    for step in unskipped.steps(open_stream(dataset)):
        assert isinstance(step.position, int)
        step.position += consumed
        yield step


def unwrapped(dataset: Any) -> Any:
    """The user's dataset inside those of this package."""
    while isinstance(dataset, (IterableDatasetShard, StreamWorker, MapWorker)):
        dataset = dataset.dataset
    return dataset


def worker_number() -> int:
    """The number of this worker process; 0 in the main process."""
    info = get_worker_info()
    if info is None:
        return 0
    return info.id


class WorkerStart:
    """The `worker_init_fn`: it corrects the dataset and the worker's number in `get_worker_info`.

    Torch begins every pass with worker 0, but a pass that resumes in the middle of an epoch must begin with another
    worker. The numbers by which a dataset splits itself are rotated, so that batches come in the epoch's order. The
    random generators of a map-style dataset's worker get the states that they had.
    """

    def __init__(self, user_function: Any) -> None:
        self.user_function = user_function

    def __call__(self, worker: int) -> None:
        """Set the rotated number and the unwrapped dataset in the worker's info, then call the user's function."""
        info = get_worker_info()
        assert info is not None
        reader: Any = info.dataset
        base_seed = info.seed - info.id
        rotated = (info.id + reader.turn) % info.num_workers
        # Torch forbids users to change this object.
        object.__setattr__(info, "dataset", unwrapped(reader))
        object.__setattr__(info, "id", rotated)
        draws = isinstance(reader, MapWorker)
        if draws:
            object.__setattr__(info, "seed", reader.seed_generators(rotated, base_seed))
        if self.user_function is not None:
            self.user_function(rotated)
        if draws:
            reader.restore_generators(rotated)


def stateful_class() -> type[DataLoader[Any]] | None:
    """The class `StatefulDataLoader` of torchdata; None where torchdata has not been imported."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return getattr(module, "StatefulDataLoader", None)


def has_state(loader: DataLoader[Any]) -> bool:
    """Whether the position of `loader` includes the state of its dataset."""
    kind = stateful_class()
    return kind is not None and isinstance(loader, kind) and keeps_state(unwrapped(loader.dataset))


def is_native(loader: DataLoader[Any]) -> bool:
    """Whether `loader` is iterated by torch's or torchdata's own code, which can be replaced."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return False
    stateful = stateful_class() or DataLoader
    return type(loader).__iter__ in (DataLoader.__iter__, stateful.__iter__)


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
    batches = size is not None
    return ReadPlan(dataset, batches, size, loader.drop_last, ShardSplit(), counted=batches)


class BatchSource:
    """Reads a loader epoch by epoch. Keeps the loader with the workers where they are persistent."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        # With the loader: its meter, or what a stream was opened with.
        self._persistent: tuple[Any, Any] | None = None

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
                return self._streamed(plan, order, start)
            return self._stream_in_process(plan, order, start)
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
        fetch = map_fetch(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)
        steps = _fetched(plan.read(stream, start.consumed), pinned(loader, fetch))
        if has_state(loader):
            return _with_state(steps, loader.dataset, is_stream=False)
        return steps

    def _stream_in_process(
        self, plan: ReadPlan, order: Order, start: StreamPosition
    ) -> Iterator[ShardStep]:
        loader = self.loader
        dataset = unwrapped(loader.dataset)
        if not order.resumes:
            draw_worker_seed(loader.generator)
        fetch = pinned(loader, loader.collate_fn)
        if start.inner is not None or has_state(loader):
            steps = _fetched(opened(loader.dataset, plan, start), fetch)
            steps = _with_state(steps, dataset, is_stream=True)
            return mark_last(steps)
        lazily = is_generator(dataset)
        stream = order.open(lambda: open_stream(loader.dataset), lazily, start.consumed)
        return _fetched(plan.read(stream, start.consumed), fetch)

    # -- in worker processes

    def _metered(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        reader = [plan.cut.index, plan.cut.shards]
        generators = self._worker_generators(start.random, reader)
        start = dataclasses.replace(start, random=generators)
        engine, meter = self._with_meter(plan, order, start, in_workers=True)
        with self._seeded(order):
            batches = iter(engine)
        return _metered_batches(batches, meter, start, self.workers, reader)

    def _seeded(self, order: Order) -> contextlib.AbstractContextManager[None]:
        """A context in which torch draws the seed of workers; that of a resumed pass was drawn when it began."""
        if order.resumes:
            return preserved(("torch",))
        return contextlib.nullcontext()

    def _worker_generators(
        self, saved: WorkerRandom | None, reader: list[int]
    ) -> WorkerRandom | None:
        """The generators with which workers have to start; None where torch's are right, or nothing is known."""
        if saved is None and self._persistent is not None and self._persistent[1].first:
            # Persistent workers of a pass that began with another worker than 0 are started again.
            meter = self._persistent[1]
            self._persistent = None
            if meter.random_known:
                saved = meter.random
        if saved is None or len(saved.states) != self.workers or saved.reader != reader:
            return None
        return saved

    def _with_meter(
        self, plan: ReadPlan, order: Order, start: StreamPosition, in_workers: bool = False
    ) -> tuple[Any, Meter]:
        if self._persistent is not None and start.inner is None and start.random is None:
            engine, meter = self._persistent
        else:
            meter = Meter(self.loader)
            engine = self._altered_by(meter, start, in_workers)
            self._keep(engine, meter)
        meter.arm(plan, order, start.consumed)
        return engine, meter

    def _altered_by(self, meter: Meter, start: StreamPosition, in_workers: bool) -> DataLoader[Any]:
        loader = self.loader
        changes: dict[str, Any] = {}
        if loader.batch_sampler is None:
            changes["sampler"] = meter
        else:
            changes["batch_sampler"] = meter
        if in_workers:
            changes["dataset"] = MapWorker(loader, has_state(loader), start)
            changes["collate_fn"] = as_is
            changes["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
        if start.random is not None:
            # The seed that torch draws for the workers is not used.
            changes["generator"] = torch.Generator()
            meter.random = start.random
            meter.first = start.random.turn
        return altered(loader, **changes)

    def _keep(self, engine: DataLoader[Any], opened_with: Any) -> None:
        """Keep a loader whose workers are persistent for the next pass."""
        self._persistent = None
        if self.loader.persistent_workers:
            self._persistent = (engine, opened_with)

    def _streamed(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        loader = self.loader
        # The first batches are skipped here: which worker they come from is only known afterwards.
        skipped = 0
        if start.workers is None:
            skipped = plan.skip // plan.stride
        plan = dataclasses.replace(plan, skip=0)
        opened_with = (plan.cut, plan.size, start)
        if self._persistent is not None and self._persistent[1] == opened_with:
            engine = self._persistent[0]
        else:
            engine = altered(
                loader,
                dataset=StreamWorker(loader, plan, start, has_state(loader)),
                batch_sampler=None,
                batch_size=None,
                drop_last=False,
                collate_fn=as_is,
                worker_init_fn=WorkerStart(loader.worker_init_fn),
            )
            self._keep(engine, opened_with)
        assert isinstance(order, ReplayedOrder)
        with order.applied():
            batches = iter(engine)
        steps = mark_last(_worker_steps(batches, start, self.workers))
        return itertools.islice(steps, skipped, None)

    # -- loaders with a custom `__iter__`

    def _foreign(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        loader = self.loader
        position = max(start.consumed, plan.skip)
        batches: Iterator[Any]
        if isinstance(order, ReplayedOrder) and is_iterable(loader):
            with order.applied():
                batches = iter(loader)
            skipped = position // plan.stride
            position = skipped * plan.stride
            batches = itertools.islice(batches, skipped, None)
        else:
            engine, meter = self._with_meter(plan, order, start)
            with self._seeded(order):
                batches = iter(engine)
            if plan.cut.shards > 1:
                batches = _checked_batches(batches, meter, loader)
        positions = itertools.count(position + plan.stride, plan.stride)
        pairs = zip(batches, positions, strict=False)
        return mark_last(ShardStep(batch, None, position) for batch, position in pairs)


def _fetched(steps: Iterator[ShardStep], fetch: Fetch) -> Iterator[ShardStep]:
    for step in steps:
        step.data = fetch(step.data)
        yield step


def _with_state(steps: Iterator[ShardStep], dataset: Any, is_stream: bool) -> Iterator[ShardStep]:
    for step in steps:
        position = as_stream_position(step.position)
        if is_stream:
            position.workers = (position.consumed,)
        position.inner = [dataset.state_dict()]
        step.position = position
        yield step


def _metered_batches(
    batches: Iterator[Any], meter: Meter, start: StreamPosition, workers: int, reader: list[int]
) -> Iterator[ShardStep]:
    """The batches of a loader whose indices come from `meter`, with the steps that it has recorded."""
    generators = meter.random
    inner = list(start.inner or [None] * workers)
    # If the pass is not completed, persistent workers have drawn for batches that nobody has received.
    is_known = meter.random_known
    meter.random_known = False
    for batch, worker, dataset_state, seed, changed in batches:
        step = meter.log.popleft()
        step.data = batch
        position = as_stream_position(step.position)
        step.position = position
        if dataset_state is not None:
            inner[worker] = dataset_state
            position.inner = list(inner)
        if is_known:
            if generators is None:
                states: list[States] = [{}] * workers
            else:
                states = list(generators.states)
            states[worker] = {**states[worker], **changed}
            generators = WorkerRandom(seed, states, (worker + 1) % workers, reader)
            position.random = generators
        del batch
        yield step
    if generators is not None:
        generators = generators._replace(turn=0)
    meter.random = generators
    meter.random_known = is_known


def _worker_steps(
    batches: Iterator[Any], start: StreamPosition, workers: int
) -> Iterator[ShardStep]:
    read = list(start.workers or [0] * workers)
    states = list(start.inner or [None] * workers)
    for batch, counts, position, worker, state in batches:
        read[worker] = position
        states[worker] = state
        inner = None
        if state is not None:
            inner = list(states)
        if counts is not None:
            counts = tuple(counts)  # pinning makes lists of tuples
        total = StreamPosition(sum(read), tuple(read), (worker + 1) % workers, inner)
        step = ShardStep(batch, counts, total)
        del batch
        yield step


def _checked_batches(
    batches: Iterator[Any], meter: Meter, loader: DataLoader[Any]
) -> Iterator[Any]:
    """`batches`, which must come from `meter`. Otherwise every shard would read all data."""
    for batch in batches:
        if not meter.started:
            raise PrepareError(
                f"{type(loader).__name__} does not use its `batch_sampler`, so its batches cannot "
                "be split between processes. Let the main process read all batches "
                "(dispatch_batches=True), or pass a torch DataLoader to `prepare`."
            )
        yield batch

# SPDX-License-Identifier: Apache-2.0
"""Loading in torch's worker processes: what they read follows a plan, and they return their positions."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from .fetch import Fetch, map_fetch
from .iterable import IterableDatasetShard, open_stream
from .order import Order
from .position import StreamPosition, WorkerRandom
from .random_states import States, capture, restore
from .steps import ReadPlan, ShardStep


def altered(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of `loader`, of the same class, with some attributes changed."""
    fresh = copy.copy(loader)
    # Without torch's check, which protects a loader in use: this one is new.
    fresh.__dict__.update(changes, _iterator=None)
    return fresh


def as_is(batch: Any) -> Any:
    """The collate function for batches that are collated already."""
    return batch


def keeps_state(thing: Any) -> bool:
    """Whether `thing` has `state_dict` and `load_state_dict`."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


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
        return _recorded(self.plan.read(stream, self.consumed), log)


def _recorded(steps: Iterator[ShardStep], log: deque[ShardStep]) -> Iterator[Any]:
    for step in steps:
        log.append(step)
        yield step.data


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
        self.turn: int = 0 if start.random is None else start.random.turn
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
        if self.random is not None:
            random.seed(self.seed + worker)
            torch.manual_seed(self.seed + worker)
            words = [worker, self.seed & 0xFFFFFFFF, self.seed >> 32, 0]
            np.random.seed(np.random.SeedSequence(words).generate_state(4))
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
        before, self._last = self._last, capture()
        changed = {kind: state for kind, state in self._last.items() if state != before[kind]}
        return (
            batch,
            worker,
            self.dataset.state_dict() if self.has_state else None,
            self.seed,
            changed,
        )

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
        own = unwrapped(self.dataset)
        for step in opened(self.dataset, self.plan, self.start, worker):
            state = own.state_dict() if self.has_state else None
            # A plain tuple: torch's workers send it, and pin what is in it.
            yield self.collate(step.data), step.counts, step.position, worker, state


def opened(
    dataset: Any, plan: ReadPlan, place: StreamPosition, worker: int = 0
) -> Iterator[ShardStep]:
    """The steps of a stream from `place` on, by the dataset's state if it has one, else by reading up to there."""
    start = 0 if place.workers is None else place.workers[worker]
    if place.inner is None or place.inner[worker] is None:
        yield from plan.steps(open_stream(dataset), start)
        return
    unwrapped(dataset).load_state_dict(place.inner[worker])
    for step in dataclasses.replace(plan, skip=0).steps(open_stream(dataset)):
        assert isinstance(step.position, int)
        step.position += start
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

# SPDX-License-Identifier: Apache-2.0
"""Loading in worker processes: torch's own workers, told what to read by a plan, and telling what they have read."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from .fetch import Fetch, map_fetch
from .iterable import IterableDatasetShard, open_stream
from .order import Order
from .position import StreamPosition
from .steps import ReadPlan


def altered(loader: DataLoader, **changes: Any) -> Any:
    """A copy of `loader` (of its own class, with its own extras) with other attributes."""
    fresh = copy.copy(loader)
    # Past torch's guard: it protects a loader in use, and this one is new.
    fresh.__dict__.update(changes, _iterator=None)
    return fresh


def as_is(batch: Any) -> Any:
    """The collate function of batches that are collated already."""
    return batch


def keeps_state(thing: Any) -> bool:
    """Whether `thing` can tell and take up its own position."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class Meter(Sampler):
    """Gives torch's loader the indices of a plan's steps, and notes what else is known of each."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.log: deque[tuple[Any, StreamPosition | int, bool]] = deque()
        self.asked = False

    def arm(self, plan: ReadPlan, order: Order, start: int) -> None:
        """What the next pass reads."""
        self.plan = copy.copy(plan)
        self.plan.skip = max(plan.skip, start)
        self.order = order
        self.asked = False

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        log: deque[tuple[Any, StreamPosition | int, bool]] = deque()
        self.log = log
        self.asked = True
        stream = self.order.open(self.plan.open, self.plan.opens_lazily)
        return _noted(self.order.paced(self.plan.read(stream, ahead=self.order.looks_ahead)), log)


def _noted(steps: Iterator[Any], log: deque[tuple[Any, StreamPosition | int, bool]]) -> Iterator[Any]:
    for indices, counts, position, last in steps:
        log.append((counts, position, last))
        yield indices


class MapWorker(Dataset):
    """A map-style dataset that keeps a state: its batches, each with the worker's number and the state after it."""

    def __init__(self, loader: DataLoader, states: list[Any] | None) -> None:
        self.dataset: Any = loader.dataset
        self.turn = 0
        self.states = states
        self.collate = loader.collate_fn
        self.batched = loader.batch_sampler is not None
        self.fetch: Fetch | None = None

    def __getitems__(self, indices: Any) -> tuple[Any, int, Any]:
        worker = worker_number()
        if self.fetch is None:
            self.fetch = map_fetch(self.dataset, self.collate, self.batched)
            if self.states is not None and self.states[worker] is not None:
                self.dataset.load_state_dict(self.states[worker])
        return self.fetch(indices), worker, self.dataset.state_dict()

    __getitem__ = __getitems__


class StreamWorker(IterableDataset):
    """The batches of one shard of a stream, collated where they are read, each with what is known of its step.

    Yields `(batch, counts, position in this worker's stream, worker, state of the dataset)`.
    """

    def __init__(self, loader: DataLoader, plan: ReadPlan, start: StreamPosition, has_state: bool) -> None:
        self.dataset = loader.dataset
        self.turn = start.turn
        self.collate = loader.collate_fn
        self.plan = plan
        self.start = start
        self.has_state = has_state

    def __iter__(self) -> Iterator[tuple[Any, Any, int, int, Any]]:
        worker = worker_number()
        own = unwrapped(self.dataset)
        for items, counts, position in opened(self.dataset, self.plan, self.start, worker):
            state = own.state_dict() if self.has_state else None
            yield self.collate(items), counts, position, worker, state


def opened(dataset: Any, plan: ReadPlan, place: StreamPosition, worker: int = 0) -> Iterator[Any]:
    """The steps of a stream from `place` on: by the dataset's own state where there is one, else by reading."""
    start = 0 if place.workers is None else place.workers[worker]
    if place.inner is None or place.inner[worker] is None:
        yield from plan.steps(open_stream(dataset), start)
        return
    unwrapped(dataset).load_state_dict(place.inner[worker])
    for items, counts, position in dataclasses.replace(plan, skip=0).steps(open_stream(dataset)):
        yield items, counts, position + start


def unwrapped(dataset: Any) -> Any:
    """The user's own dataset."""
    while isinstance(dataset, (IterableDatasetShard, StreamWorker, MapWorker)):
        dataset = dataset.dataset
    return dataset


def worker_number() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class WorkerStart:
    """What a worker does first: it shows the user's own dataset in `get_worker_info`, and takes its number.

    Torch begins every pass with worker 0, and a pass that goes on in the middle of an epoch begins with another one:
    the numbers by which a dataset parts itself are turned, so that batches come in the order of the whole epoch.
    """

    def __init__(self, user_function: Any) -> None:
        self.user_function = user_function

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        turned = (info.id + info.dataset.turn) % info.num_workers  # type: ignore[attr-defined]
        # Past the guard of torch's object, which is there for users.
        object.__setattr__(info, "dataset", unwrapped(info.dataset))
        object.__setattr__(info, "id", turned)
        if self.user_function is not None:
            self.user_function(turned)

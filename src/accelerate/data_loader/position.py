# SPDX-License-Identifier: Apache-2.0
"""The position of a loader in its epoch: how much of the global order all shards together have read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.errors import CheckpointError

FORMAT = 2


class SplitProgress(NamedTuple):
    """How far a dataset was read of which each process reads its own shard.

    Fields:
        shards: the number of shards.
        read: the samples read of each shard.
        workers: the worker processes that read a shard.
    """

    shards: int
    read: int
    workers: int


class WorkerRandom(NamedTuple):
    """The random generators of the worker processes that read a map-style dataset.

    Fields:
        seed: from which torch derives the seed of each worker.
        states: for each worker the states of the generators that have drawn since then.
        turn: the worker that reads the next batch.
        reader: the shard that the workers read, and the number of shards.
    """

    seed: int
    states: list[dict[str, Any]]
    turn: int
    reader: list[int]


@dataclass(slots=True)
class StreamPosition:
    """A position in the order of one epoch.

    Fields:
        consumed: samples (or batches, see `ReadPlan.unit`) that all shards together have read.
        workers: for an iterable dataset, the samples that each worker has read (one number without workers).
        turn: the worker that yields the next batch.
        inner: the states of a dataset with a `state_dict`, one for each worker.
        split: how much of each shard was read, where each process reads its own shard of the dataset. `consumed`
            beyond that are samples of the remainder, which was then read as one stream.
        random: the generators of the workers of a map-style dataset.
    """

    consumed: int = 0
    workers: tuple[int, ...] | None = None
    turn: int = 0
    inner: list[Any] | None = None
    split: SplitProgress | None = None
    random: WorkerRandom | None = None


@dataclass(slots=True)
class Position:
    """The contents of a loader's `state_dict`.

    Fields:
        epoch: the loader's epoch.
        unit: what `stream.consumed` counts.
        total: the length of the order; None where it is not known.
        stream: the position in the epoch.
        order: the states that the epoch's order follows from, or its elements; None between epochs.
        generators: between epochs, the states of the loader's generators and its sampler's seed.
        sampler: the class of the sampler that draws the order; None for an iterable dataset.
        ended: whether the last batch of the epoch was read, and its pass had not ended.
    """

    epoch: int
    unit: str
    total: int | None
    stream: StreamPosition = field(default_factory=StreamPosition)
    order: dict[str, Any] | None = None
    generators: dict[str, Any] | None = None
    sampler: str | None = None
    ended: bool = False

    @property
    def in_epoch(self) -> bool:
        """Whether the position is in the middle of an epoch."""
        return self.order is not None

    def to_dict(self) -> dict[str, Any]:
        """The position as numbers, strings, lists, bytes and tensors of integers."""
        stream = self.stream
        optional: dict[str, Any] = {
            "inner": stream.inner,
            "order": self.order,
            "own": self.generators or None,
            "sampler": self.sampler,
            "ended": self.ended or None,
        }
        if stream.workers is not None:
            optional["workers"] = list(stream.workers)
            optional["turn"] = stream.turn
        if stream.split is not None:
            optional["parts"] = list(stream.split)
        if stream.random is not None:
            optional["worker_random"] = stream.random._asdict()
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "unit": self.unit,
            "total": self.total,
            "consumed": stream.consumed,
            **{name: value for name, value in optional.items() if value is not None},
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Position:
        """The position in a `state_dict`. Raises CheckpointError for anything else."""
        try:
            if state["format"] != FORMAT:
                raise CheckpointError(
                    f"the state of this data loader has format {state['format']}, and this version reads {FORMAT}: "
                    "load it with the version that wrote it"
                )
            stream = StreamPosition(
                int(state["consumed"]), turn=state.get("turn", 0), inner=state.get("inner")
            )
            if state.get("workers") is not None:
                stream.workers = tuple(state["workers"])
            if state.get("parts") is not None:
                stream.split = SplitProgress(*state["parts"])
            if state.get("worker_random") is not None:
                stream.random = WorkerRandom(**state["worker_random"])
            return cls(
                int(state["epoch"]),
                state["unit"],
                state["total"],
                stream,
                state.get("order"),
                state.get("own"),
                state.get("sampler"),
                bool(state.get("ended", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"this is not the state of a prepared data loader ({type(error).__name__}: {error}); "
                "it has the keys format, epoch, unit, total and consumed"
            ) from error

    def check_fits(self, unit: str, total: int | None, workers: int | None) -> None:
        """Raise CheckpointError where a loader with such an order cannot continue from this position."""
        if not self.in_epoch:
            return
        if self.unit != unit:
            raise CheckpointError(
                f"the state counts {self.unit} of the epoch and this loader {unit}: it was saved with another kind of "
                "batch sampler"
            )
        if self.total is not None and total is not None and self.total != total:
            raise CheckpointError(
                f"the state was saved in the middle of an epoch over {self.total} {unit}, and this loader has "
                f"{total}: with another dataset or sampler the rest of that epoch is not defined. Use the former "
                "ones, or load a checkpoint that was saved between two epochs"
            )
        saved_workers = self.stream.workers
        if workers is None or saved_workers is None:
            return
        if len(saved_workers) != workers:
            raise CheckpointError(
                f"the state was saved with {len(saved_workers)} worker(s), each with its shard of an iterable "
                f"dataset, and this loader has {workers}: set num_workers={len(saved_workers)} for this epoch"
            )


def as_stream_position(position: StreamPosition | int) -> StreamPosition:
    """A position that may have more fields than how much was consumed."""
    if isinstance(position, int):
        return StreamPosition(position)
    return position


def consumed_at(position: StreamPosition | int) -> int:
    """How much was consumed at a position."""
    if isinstance(position, int):
        return position
    return position.consumed


def total_of(plan: Any) -> int | None:
    """The length of a plan's order, or None where it has none."""
    try:
        return int(plan.total())
    except (TypeError, NotImplementedError):
        return None

# SPDX-License-Identifier: Apache-2.0
"""Which shard reads what: one order of samples or batches, split into global steps, and each step into shards.

The position of a loader in its epoch is how much of the global order all shards together have read.
"""

from __future__ import annotations

import collections
import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

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
                    f"the state of this data loader has format {state['format']}, but this "
                    f"version reads {FORMAT}: load it with the version that wrote it"
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
                f"the state counts {self.unit} of the epoch, but this loader counts {unit}: the "
                "state was saved with a different kind of batch sampler"
            )
        if self.total is not None and total is not None and self.total != total:
            raise CheckpointError(
                f"the state was saved in the middle of an epoch over {self.total} {unit}, but "
                f"this loader has {total}: with a different dataset or sampler, the rest of that "
                "epoch is undefined. Use the same dataset and sampler, or load a checkpoint that "
                "was saved between two epochs"
            )
        saved_workers = self.stream.workers
        if workers is None or saved_workers is None:
            return
        if len(saved_workers) != workers:
            raise CheckpointError(
                f"the state was saved with {len(saved_workers)} worker(s), each with its shard of "
                f"an iterable dataset, but this loader has {workers}: set "
                f"num_workers={len(saved_workers)} for this epoch"
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


@dataclass(slots=True)
class ShardStep:
    """One step of one shard, from the order to the batch: each stage of a loader fills in what it knows.

    Fields:
        data: what this shard reads: indices or samples, then the batch.
        counts: the samples that each shard really has in the step, in shard order; None where that is not known.
        position: how much of the order all shards together have read after it.
        last: it is this shard's last one.
    """

    data: Any
    counts: tuple[int, ...] | None
    position: int | StreamPosition
    last: bool = False


@dataclass(frozen=True, slots=True)
class ShardSplit:
    """How the global order is split between the shards.

    Fields:
        shards: the number of shards.
        index: which shard this is.
        split: a batch of the order is the global batch, and each shard takes a slice; otherwise each takes a batch.
        even: an incomplete last step is filled with samples from the start of the epoch.
        exact: no sample is repeated. A shard without samples in the last step reads one placeholder, so that all
            shards make equally many steps.
    """

    shards: int = 1
    index: int = 0
    split: bool = False
    even: bool = False
    exact: bool = False

    @property
    def repeats(self) -> bool:
        """Whether an incomplete last step is filled."""
        return self.even and not self.exact


@dataclass(slots=True)
class ReadPlan:
    """The order of one epoch, and how it is split.

    Fields:
        stream: the order: a sampler (of indices), an iterable dataset (of samples), or a batch sampler (of batches).
        of_samples: the stream yields single samples, which are batched here; otherwise it yields batches.
        size: samples in one batch of the order, before it is split; None where its batches differ.
        drop_last: an incomplete last step is dropped.
        cut: how a step is split between the shards.
        skip: how much of the stream is skipped at the start of every epoch, in samples or batches.
        counted: the length of a batch is the number of its samples; otherwise that number is not known.
    """

    stream: Iterable[Any]
    of_samples: bool
    size: int | None
    drop_last: bool
    cut: ShardSplit
    skip: int = 0
    counted: bool = True

    @property
    def unit(self) -> str:
        """What the position in the stream counts."""
        if self.of_samples:
            return "samples"
        return "batches"

    @property
    def _batches_in_step(self) -> int:
        if self.cut.split:
            return 1
        return self.cut.shards

    @property
    def stride(self) -> int:
        """How much of the stream one full global step reads."""
        if self.of_samples and self.size is not None:
            return self._batches_in_step * self.size
        return self._batches_in_step

    @property
    def global_batch(self) -> int | None:
        """Samples in a full global step; None where that is not a fixed number."""
        if self.size is None:
            return None
        return self._batches_in_step * self.size

    def open(self) -> Iterator[Any]:
        """An iterator over the stream. Batches of indices are copied, since some are read before one is used."""
        stream = iter(self.stream)
        if self.of_samples or not self.counted:
            return stream
        return map(_copied_indices, stream)

    @property
    def opens_lazily(self) -> bool:
        """Whether nothing is drawn before the first element is requested, as torch does where it batches samples."""
        return self.of_samples or is_generator(self.stream)

    def read(self, stream: Iterator[Any], start: int = 0) -> Iterator[ShardStep]:
        """The steps of this shard from a position on, of which the last one is marked: read one step ahead."""
        return mark_last(self.steps(stream, start))

    def steps(self, stream: Iterator[Any], start: int = 0) -> Iterator[ShardStep]:
        """The steps of this shard from position `start` of `stream` on (never before `skip`)."""
        start = max(start, self.skip)
        if self.of_samples:
            return sample_steps(stream, self.stride, self.cut, self.drop_last, start)
        if self.cut.shards == 1 and not self.cut.repeats:
            return single_steps(stream, start, self.counted)
        if self.cut.split:
            return split_steps(stream, self.size, self.cut, self.drop_last, start)
        return batch_steps(stream, self, start)

    def total(self) -> int:
        """The length of the stream. Raises TypeError where it has none."""
        return len(self.stream)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """The steps of this shard in one epoch. Raises TypeError where the stream has no length."""
        length = max(0, self.total() - self.skip)
        steps, incomplete = divmod(length, self.stride)
        if incomplete and not self.drop_last:
            cut = self.cut
            begin = self.stride // cut.shards * cut.index
            steps += cut.even or cut.exact or incomplete > begin
        return steps

    def last_size(self, start: int = 0) -> int:
        """Samples in the last global step, for a pass from `start`: 0 where it is full, -1: not known or dropped."""
        if self.drop_last or not self.of_samples:
            return -1
        try:
            return max(0, self.total() - max(self.skip, start)) % self.stride
        except TypeError:
            return -1


def mark_last(steps: Iterator[ShardStep]) -> Iterator[ShardStep]:
    """`steps` with the last one marked. The next step is read before the present one is yielded."""
    present = next(steps, None)
    while present is not None:
        following = next(steps, None)
        present.last = following is None
        yield present
        present = following


def _copied_indices(batch: Any) -> Any:
    # A batch sampler may refill one list, or yield an iterator.
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, (list, Iterator)):
        return list(batch)
    return batch


def is_generator(stream: Any) -> bool:
    """Whether iterating `stream` runs none of its code before the first element is requested."""
    return inspect.isgeneratorfunction(getattr(type(stream), "__iter__", None))


def real_counts(samples: int, part: int, shards: int) -> tuple[int, ...]:
    """How many of `samples` consecutive samples each of `shards` slices of length `part` gets, in order."""
    return tuple(min(part, max(0, samples - part * shard)) for shard in range(shards))


def completed(items: list[Any], size: int, start: list[Any]) -> list[Any]:
    """`items` filled up to `size` with items of `start`, repeated as often as necessary."""
    return items + list(itertools.islice(itertools.cycle(start), size - len(items)))


def sample_steps(
    stream: Iterator[Any], size: int, cut: ShardSplit, drop_last: bool, start: int
) -> Iterator[ShardStep]:
    """Steps of `size` consecutive samples, of which each shard gets a consecutive slice."""
    part = size // cut.shards
    low = part * cut.index
    high = low + part
    full = (part,) * cut.shards
    filling = size if cut.repeats else 0
    head = _read_up_to(stream, start, filling)
    position = start
    while True:
        group = list(itertools.islice(stream, size))
        if len(group) < size:
            break
        if len(head) < filling:
            head = (head + group)[:filling]
        position += size
        yield ShardStep(group[low:high], full, position)
    if not group or drop_last:
        return
    position += len(group)
    counts = real_counts(len(group), part, cut.shards)
    if cut.repeats:
        group = completed(group, size, (head + group)[:size])
    yield from _shard_of(group[low:high], group, counts, position, cut)


def _read_up_to(stream: Iterator[Any], start: int, filling: int) -> list[Any]:
    """Skip the elements before `start`, but for the first ones of the epoch, which fill its last step."""
    head = list(itertools.islice(stream, min(start, filling)))
    discard(stream, start - len(head))
    return head


def _shard_of(
    batch: Any, first: Any, counts: tuple[int, ...] | None, position: int, cut: ShardSplit
) -> Iterator[ShardStep]:
    """The step of a shard that has `batch`; without samples and with `exact`, one of `first` as a placeholder."""
    if len(batch):
        yield ShardStep(batch, counts, position)
    elif cut.exact:
        yield ShardStep(first[:1], counts, position)


def single_steps(stream: Iterator[Any], start: int, counted: bool = True) -> Iterator[ShardStep]:
    """The steps of a single shard: every batch unchanged."""
    discard(stream, start)
    counts = None
    for position, batch in enumerate(stream, start + 1):
        if counted:
            counts = (len(batch),)
        yield ShardStep(batch, counts, position)


def batch_steps(stream: Iterator[Any], plan: ReadPlan, start: int) -> Iterator[ShardStep]:
    """Steps of one batch for each shard, from consecutive batches, which may differ in length."""
    cut = plan.cut
    shards = cut.shards
    size = plan.size if plan.counted else None
    filling = shards if cut.repeats else 0
    head = _read_up_to(stream, start, filling)
    position = start
    counts = None
    group = list(itertools.islice(stream, shards))
    while group:
        is_full = len(group) == shards
        if plan.drop_last and not is_full:
            return
        following = []
        if is_full:
            following = list(itertools.islice(stream, shards))
        if len(head) < filling:
            head = (head + group)[:filling]
        position += len(group)
        if plan.counted:
            counts = lengths_of(group, shards)
        if not following and cut.repeats and not plan.drop_last:
            group = completed_batches(group, shards, size, head)
        if cut.index < len(group):
            yield ShardStep(group[cut.index], counts, position)
        elif cut.exact:
            yield ShardStep(group[0][:1], counts, position)
        group = following


def split_steps(
    stream: Iterator[Any], size: int | None, cut: ShardSplit, drop_last: bool, start: int
) -> Iterator[ShardStep]:
    """Steps of one batch, split into slices of the same length, which grow with a batch longer than `size`."""
    head = _read_up_to(stream, start, int(cut.repeats))
    for position, batch in enumerate(stream, start + 1):
        if cut.repeats and not head:
            head = [batch]
        length = len(batch)
        full = max(size or 0, length)
        if drop_last and length < full:
            continue
        part = -(-full // cut.shards)
        counts = real_counts(length, part, cut.shards)
        filled = part * cut.shards
        if cut.repeats and length < filled:
            batch = completed(list(batch), filled, list(head[0]))
        low = part * cut.index
        own = batch[low : low + part]
        yield from _shard_of(own, batch, counts, position, cut)


def lengths_of(group: list[Any], shards: int) -> tuple[int, ...] | None:
    """The number of samples in each batch of a step; None where one is not a list of indices."""
    if not all(hasattr(batch, "__len__") for batch in group):
        return None
    return (*map(len, group), *[0] * (shards - len(group)))


def completed_batches(
    group: list[Any], shards: int, size: int | None, head: list[Any]
) -> list[Any]:
    """A last step with a batch for every shard, filled with samples or batches from the start of the epoch."""
    if size is None:
        return completed(group, shards, head)
    samples = itertools.cycle(itertools.chain.from_iterable(head))
    filled = [list(batch) for batch in group]
    # Only the last batch of a sampler is incomplete; shorter ones before it are intended.
    filled[-1] += itertools.islice(samples, max(0, size - len(filled[-1])))
    while len(filled) < shards:
        filled.append(list(itertools.islice(samples, size)))
    return filled


def discard(stream: Iterator[Any], count: int | None = None) -> None:
    """Skip `count` elements, or all of them."""
    collections.deque(itertools.islice(stream, count), maxlen=0)

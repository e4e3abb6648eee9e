# SPDX-License-Identifier: Apache-2.0
"""The steps of one rank, read once and as the file grows, and reduced to what a screen can show."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..core.errors import ConfigurationError
from ..core.files import open_regular
from ..telemetry.records import (
    FLAG_FIRST,
    FLAG_SKIPPED,
    HEADER_SIZE,
    PHASES,
    STEP,
    StepsHeader,
    read_header,
)

# The values of a record, in the order of the columns of all arrays here.
COLUMNS = tuple(name for name in STEP.names or () if STEP[name] == np.dtype("<f4"))
COLUMN = {name: number for number, name in enumerate(COLUMNS)}
# A record has the sum of these over its steps, and the mean or the last value of the others.
SUMS = ("samples", "tokens")
# Steps of a block, whose minimum, maximum and sum stay in memory. Views of wider buckets need no file.
BLOCK = 64
# Durations of a record, in seconds, and how long none of them is.
DURATIONS = ("seconds", *PHASES, "longest")
LONGEST = 1e9
# Records that are read at a time: they fit in the cache of a core.
CHUNK = 1 << 14
# A file with more jumps back to earlier steps than any run restarts is damaged.
RESTARTS = 10_000
# A record further ahead of the one before it is damaged: blocks for all steps between would not fit in memory.
MOST_AHEAD = 1 << 24

Array = np.ndarray[Any, np.dtype[Any]]
# What merges two values of each array of buckets.
_MERGES = (np.fmin, np.fmax, np.add, np.add, np.fmax, np.add)


@dataclass
class Buckets:
    """Values of a rank in neighbouring buckets of steps: arrays of shape (buckets, columns), NaN where there is none.

    Bucket `i` holds the steps from `(first + i) * width + 1` to `(first + i + 1) * width`.
    """

    first: int
    width: int
    low: Array
    high: Array
    total: Array
    """Sums over steps. Those of `SUMS` are sums over records."""
    weight: Array
    """Steps whose value is known."""
    time: Array
    """Seconds since 1970 of the last record, of shape (buckets,)."""
    skipped: Array
    """Steps that the optimizer skipped, of shape (buckets,)."""

    @classmethod
    def empty(cls, first: int, width: int, count: int) -> Buckets:
        """Buckets without a value."""
        shape = (count, len(COLUMNS))
        return cls(
            first,
            width,
            low=np.full(shape, np.nan, "f4"),
            high=np.full(shape, np.nan, "f4"),
            total=np.zeros(shape),
            weight=np.zeros(shape),
            time=np.full(count, np.nan),
            skipped=np.zeros(count),
        )

    def __len__(self) -> int:
        return len(self.time)

    def arrays(self) -> tuple[Array, ...]:
        """All arrays, in the order of the fields."""
        return self.low, self.high, self.total, self.weight, self.time, self.skipped

    def mean(self, name: str) -> Array:
        """The mean over steps of a column; NaN where no step has a value."""
        column = COLUMN[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.total[:, column] / self.weight[:, column])

    def add(self, ids: Array, others: Buckets) -> None:
        """Merge the buckets `others`, whose numbers are `ids`: ascending, without gaps in the arrays of `self`."""
        rows = ids - self.first
        for merge, array, other in zip(_MERGES, self.arrays(), others.arrays(), strict=True):
            array[rows] = merge(array[rows], other)


@dataclass
class Segment:
    """Neighbouring records of a file whose steps ascend."""

    start: int
    """The number of the first record."""
    stop: int
    """The number of the record behind the last."""
    first: int
    """The first step."""
    last: int


class RankSteps:
    """The file of steps of one rank. `refresh` reads what is new; `view` reduces a range of steps to buckets.

    Args:
        path: the file.

    Raises:
        ConfigurationError: the file is not one of telemetry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note: str | None = None
        """What is wrong with the file behind the last record that is shown."""
        self._open_file()

    def _open_file(self) -> None:
        header, record = read_header(self.path)
        self.header: StepsHeader = header
        self.record = record
        self.count: int = 0
        """Records read."""
        self.last: np.void | None = None
        """The newest record."""
        # Ranges of valid records, whose steps ascend. A resumed run repeats steps, and the later record is valid.
        self._segments: list[Segment] = []
        self._blocks = Buckets.empty(0, BLOCK, 0)
        self._size = 0  # blocks in use
        self._mark: tuple[Any, ...] = ()

    @property
    def last_step(self) -> int:
        """The step of the newest record, 0 if there is none."""
        if self.last is None:
            return 0
        return int(self.last["step"])

    @property
    def first_step(self) -> int:
        """The first step that the records cover, 1 if there is none."""
        if self._segments:
            return self._segments[0].first
        return 1

    def refresh(self) -> bool:
        """Read the records that were written since the last call.

        The file is opened anew: a shared file system then shows what another machine has written.

        Returns:
            Whether there are new records.
        """
        with open(self.path, "rb", buffering=0, opener=open_regular) as file:
            if self.count and self._mark != self._identify(file):
                # The records were merged, or the file was replaced.
                self._open_file()
            before = self.count
            self.note = None
            available = (os.fstat(file.fileno()).st_size - HEADER_SIZE) // self.record.itemsize
            # One buffer for all chunks: the kernel zeroes each page of a new one.
            buffer = bytearray(max(0, min(CHUNK, available - self.count)) * self.record.itemsize)
            while self.count < available:
                wanted = min(CHUNK, available - self.count)
                records = self._read(file, self.count, self.count + wanted, buffer)
                good = _good(records, self.last_step)
                self._append(file, records[:good])
                if good < wanted:
                    # Zeros at the end are not written yet.
                    if records["steps"][good:].any():
                        where = f"{self.path.name} is damaged at record {self.count}"
                        self.note = f"{where}: it is shown up to step {self.last_step}"
                    break
            if self.count > before:
                self._mark = self._identify(file)
        return self.count > before

    def _identify(self, file: IO[bytes]) -> tuple[Any, ...]:
        """What changes if records move: the file, and the first and the last record that were read."""
        status = os.fstat(file.fileno())
        ends = [self._read(file, number, number + 1).tobytes() for number in (0, self.count - 1)]
        return (status.st_dev, status.st_ino, *ends)

    def _read(
        self, file: IO[bytes], start: int, stop: int, buffer: bytearray | None = None
    ) -> Array:
        size = self.record.itemsize
        file.seek(HEADER_SIZE + start * size)
        wanted = (stop - start) * size
        buffer = bytearray(wanted) if buffer is None else buffer
        with memoryview(buffer)[:wanted] as view:
            read = 0
            while read < wanted and (more := file.readinto(view[read:])):  # type: ignore[attr-defined]
                read += more
        return np.frombuffer(buffer, self.record, read // size)

    def _append(self, file: IO[bytes], records: Array) -> None:
        if not len(records):
            return
        steps = records["step"].astype(np.int64)
        breaks = np.flatnonzero(np.diff(steps) <= 0) + 1
        if len(breaks) + len(self._segments) > RESTARTS:
            raise ConfigurationError(
                f"{self.path} is damaged: its steps go back {len(breaks)} times within {len(records)} records"
            )
        for part in np.split(records, breaks):
            first = int(part["step"][0]) - int(part["steps"][0]) + 1
            if not self._segments or first <= self._segments[-1].last:
                self._cut(file, first)
                self._segments.append(Segment(self.count, self.count, first, first))
            self.count += len(part)
            self._segments[-1].stop = self.count
            self._segments[-1].last = int(part["step"][-1])
            self._add_blocks(part)
        self.last = records[-1].copy()

    def _cut(self, file: IO[bytes], step: int) -> None:
        """Forget the records of `step` and of later ones: the run has resumed before it."""
        while self._segments and self._segments[-1].first >= step:
            self._segments.pop()
        first = (step - 1) // BLOCK
        self._reset_blocks(first)
        if not self._segments:
            return
        last = self._segments[-1]
        if last.last >= step:
            last.stop = self._find(file, last, step)
            last.last = step - 1
        records = self._records(file, first * BLOCK + 1, step - 1)
        if len(records):
            self._add_blocks(records)

    def _find(self, file: IO[bytes], segment: Segment, step: int) -> int:
        """The number of the first record of a segment whose step is at least `step`."""
        low = segment.start
        high = segment.stop
        if high - low == segment.last - segment.first + 1:
            # A record for each step, the usual case.
            return min(max(low + step - segment.first, low), high)
        while low < high:
            middle = (low + high) // 2
            if int(self._read(file, middle, middle + 1)["step"][0]) < step:
                low = middle + 1
            else:
                high = middle
        return low

    def _records(self, file: IO[bytes], start: int, stop: int) -> Array:
        """The valid records of the steps from `start` to `stop`."""
        parts = []
        for segment in self._segments:
            if segment.first <= stop and segment.last >= start:
                first = self._find(file, segment, start)
                parts.append(self._read(file, first, self._find(file, segment, stop + 1)))
        if parts:
            return np.concatenate(parts)
        return np.empty(0, self.record)

    def _reset_blocks(self, first: int) -> None:
        """Empty the blocks from number `first` on."""
        size = first - self._blocks.first
        if not self._size or size < 0:
            self._blocks = Buckets.empty(first, BLOCK, 256)
            self._size = 0
        elif size < self._size:
            nothing = Buckets.empty(first, BLOCK, self._size - size)
            for array, value in zip(self._blocks.arrays(), nothing.arrays(), strict=True):
                array[size : self._size] = value
            self._size = size

    def _add_blocks(self, records: Array) -> None:
        blocks = self._blocks
        ids = _buckets_of(records, BLOCK)
        needed = int(ids[-1]) - blocks.first + 1
        if needed > len(blocks):
            self._blocks = Buckets.empty(blocks.first, BLOCK, max(needed, 2 * len(blocks)))
            for array, value in zip(self._blocks.arrays(), blocks.arrays(), strict=True):
                array[: self._size] = value[: self._size]
        self._size = max(self._size, needed)
        self._blocks.add(*reduced(records, ids))

    def view(self, start: int, stop: int, width: int) -> Buckets:
        """Reduce the steps from `start` to `stop` to buckets of `width` steps.

        Args:
            start: the first step. Its bucket is complete.
            stop: the last step, likewise.
            width: steps of a bucket, a power of 2.
        """
        first = (start - 1) // width
        end = (stop - 1) // width + 1
        buckets = Buckets.empty(first, width, end - first)
        if width < BLOCK:
            with open(self.path, "rb", buffering=0, opener=open_regular) as file:
                records = self._records(file, first * width + 1, end * width)
            if len(records):
                buckets.add(*reduced(records, _buckets_of(records, width)))
            return buckets
        blocks_of_bucket = width // BLOCK
        blocks = self._blocks
        low = max(first * blocks_of_bucket, blocks.first)
        high = min(end * blocks_of_bucket, blocks.first + self._size)
        if low < high:
            ids, starts = np.unique(np.arange(low, high) // blocks_of_bucket, return_index=True)
            shown = slice(low - blocks.first, high - blocks.first)
            arrays = [
                merge.reduceat(array[shown], starts, axis=0)
                for merge, array in zip(_MERGES, blocks.arrays(), strict=True)
            ]
            buckets.add(ids, Buckets(int(ids[0]), width, *arrays))
        return buckets

    def steps_per_record(self, start: int, stop: int) -> float:
        """How many of the steps from `start` to `stop` a record covers, on average."""
        records = steps = 0
        with open(self.path, "rb", buffering=0, opener=open_regular) as file:
            for segment in self._segments:
                first = max(segment.first, start)
                last = min(segment.last, stop)
                if first <= last:
                    records -= self._find(file, segment, first)
                    records += self._find(file, segment, last + 1)
                    steps += last - first + 1
        if records:
            return steps / records
        return 1.0

    def begins_between(self, first: int, last: int) -> bool:
        """Whether a process made its first step between these."""
        with open(self.path, "rb", buffering=0, opener=open_regular) as file:
            records = self._records(file, first, min(last, first + BLOCK))
        return bool((records["flags"] & FLAG_FIRST).any())

    def steps_at(self, times: Array) -> Array:
        """The steps that were reached at these times (seconds since 1970), about, as fractions."""
        block_times = self._blocks.time[: self._size]
        blocks = np.flatnonzero(~np.isnan(block_times))
        ends = block_times[blocks]
        steps = ((blocks + self._blocks.first + 1) * BLOCK).astype("f8")
        steps[-1] = self.last_step
        begin = np.fmin(self.header.started, ends[0])
        if not np.isfinite(begin):
            begin = ends[0]
        reached: Array = np.interp(times, [begin, *ends], [self.first_step - 1, *steps])
        return reached


def _matrix(records: Array) -> Array:
    """The columns of records, of shape (records, columns); a view where the file has them side by side."""
    fields: Any = records.dtype.fields
    first = fields["seconds"][1]
    offsets = [fields[name][1] for name in COLUMNS if name in fields]
    shape = (len(records), len(COLUMNS))
    side_by_side = range(first, first + 4 * len(COLUMNS), 4)
    if offsets == list(side_by_side):
        strides = (records.dtype.itemsize, 4)
        return np.ndarray(shape, "<f4", records.data.cast("B"), first, strides)
    matrix = np.full(shape, np.nan, "f4")
    for column, name in enumerate(COLUMNS):
        if name in fields:
            matrix[:, column] = records[name]
    return matrix


def _buckets_of(records: Array, width: int) -> Array:
    """The number of the bucket of each record."""
    return np.asarray((records["step"].astype(np.int64) - 1) // width)


_PER_RECORD = [COLUMN[name] for name in SUMS]


@np.errstate(over="ignore", invalid="ignore")
def reduced(records: Array, ids: Array) -> tuple[Array, Buckets]:
    """Reduce records to one bucket for each number in `ids`, which ascends.

    Returns:
        The different numbers, and their buckets.
    """
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
    # Reductions along rows of a C-contiguous array are several times as fast as down its columns.
    values = np.ascontiguousarray(_matrix(records).T)
    steps = records["steps"].astype("f4")
    weighted = values
    if (steps != 1).any():
        weighted = values * steps
        weighted[_PER_RECORD] = values[_PER_RECORD]
    total = np.add.reduceat(weighted, starts, axis=1)
    weight = np.tile(np.add.reduceat(steps, starts), (len(COLUMNS), 1))
    is_incomplete = np.isnan(total).any(axis=1)
    for column in np.flatnonzero(is_incomplete):
        is_known = ~np.isnan(values[column])
        known_values = np.where(is_known, weighted[column], 0)
        known_steps = np.where(is_known, steps, 0)
        total[column] = np.add.reduceat(known_values, starts)
        weight[column] = np.add.reduceat(known_steps, starts)
    skipped = (records["flags"] & FLAG_SKIPPED).astype("f8")
    numbers = ids[starts]
    buckets = Buckets(
        int(numbers[0]),
        0,
        low=np.fmin.reduceat(values, starts, axis=1).T,
        high=np.fmax.reduceat(values, starts, axis=1).T,
        total=total.T,
        weight=weight.T,
        time=np.fmax.reduceat(records["time"], starts),
        skipped=np.add.reduceat(skipped, starts),
    )
    return numbers, buckets


def _good(records: Array, last_step: int) -> int:
    """The number of records before the first that is not written or impossible.

    Args:
        records: of the file.
        last_step: the step of the record before them, 0 if there is none.
    """
    steps = records["step"].astype(np.int64)
    covered = records["steps"].astype(np.int64)
    time = records["time"]
    with np.errstate(invalid="ignore"):
        is_good = (covered > 0) & (covered <= steps) & (time > 0) & (time < 1e12)
        for name in DURATIONS:
            if name in (records.dtype.names or ()):
                # One that is not known is NaN.
                is_good &= ~(np.abs(records[name]) >= LONGEST)
    before: Any = last_step
    if not last_step:
        # The first record of a run may have any step.
        before = steps[:1] - covered[:1]
    ahead = np.maximum(covered, np.diff(steps, prepend=before))
    is_good &= ahead <= MOST_AHEAD
    if is_good.all():
        return len(is_good)
    return int(np.argmin(is_good))

# SPDX-License-Identifier: Apache-2.0
"""The steps of one rank, read once and as the file grows, and reduced to what a screen can show."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
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

# The values of a record, in the order of the columns of all arrays here. They are the end of a record.
COLUMNS = tuple(name for name in STEP.names or () if STEP[name] == np.dtype("<f4"))
COLUMN = {name: number for number, name in enumerate(COLUMNS)}
# A record has the sum of these over its steps, and the mean or the last value of the others.
SUMS = ("samples", "tokens")
_PER_RECORD = [COLUMN[name] for name in SUMS]
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
    """Values of neighboring steps, reduced: arrays of shape (..., buckets, columns), NaN where there is none."""

    low: Array
    high: Array
    total: Array
    """Sums over steps. Those of `SUMS` are sums over records."""
    weight: Array
    """Steps whose value is known."""
    time: Array
    """Seconds since 1970 of the last record, of shape (..., buckets)."""
    skipped: Array
    """Steps that the optimizer skipped, of shape (..., buckets)."""

    @classmethod
    def empty(cls, count: int) -> Buckets:
        """Buckets without a value."""
        shape = (count, len(COLUMNS))
        return cls(
            low=np.full(shape, np.nan, "f4"),
            high=np.full(shape, np.nan, "f4"),
            total=np.zeros(shape),
            weight=np.zeros(shape),
            time=np.full(count, np.nan),
            skipped=np.zeros(count),
        )

    def arrays(self) -> tuple[Array, ...]:
        """All arrays, in the order of the fields."""
        return self.low, self.high, self.total, self.weight, self.time, self.skipped

    def lowest(self, name: str) -> Array:
        """A column of `low`."""
        return np.asarray(self.low[..., COLUMN[name]])

    def highest(self, name: str) -> Array:
        """A column of `high`."""
        return np.asarray(self.high[..., COLUMN[name]])

    def sum(self, name: str) -> Array:
        """A column of `total`."""
        return np.asarray(self.total[..., COLUMN[name]])

    def steps(self, name: str) -> Array:
        """A column of `weight`."""
        return np.asarray(self.weight[..., COLUMN[name]])

    @np.errstate(divide="ignore", invalid="ignore")
    def mean(self, name: str) -> Array:
        """The mean over steps of a column; NaN where no step has a value."""
        return np.asarray(self.sum(name) / self.steps(name))

    def merge(self, rows: Array, others: Buckets) -> None:
        """Merge other buckets into those with the numbers `rows`, which differ."""
        for merge, array, other in zip(_MERGES, self.arrays(), others.arrays(), strict=True):
            array[rows] = merge(array[rows], other)


@dataclass
class Segment:
    """Neighboring records of a file whose steps ascend."""

    start: int
    """The number of the first record."""
    stop: int
    """The number of the record behind the last."""
    first: int
    """The first step."""
    last: int


class RankSteps:
    """The file of steps of one rank. `refresh` reads what is new.

    Args:
        path: the file.
        newest: records at the end of the file with which to begin. Default: all.

    Raises:
        ConfigurationError: the file is not one of telemetry.
    """

    def __init__(self, path: Path, newest: int | None = None) -> None:
        self.path = path
        self.note: str | None = None
        """What is wrong with the file behind the last record that is shown."""
        self._newest = newest
        self._open_file()

    def _open_file(self) -> None:
        header, record = read_header(self.path)
        self.header: StepsHeader = header
        self.record = record
        self.count: int = 0
        """Records read, or left out because they are old."""
        self.last: np.void | None = None
        """The newest record."""
        self.last_step: int = 0
        """That of the newest record, 0 if there is none."""
        self.first_steps: list[tuple[float, np.void]] = []
        """The first record of each process, valid or not, and the time of the record before it; NaN without one."""
        self.repeated: float = 0.0
        """Seconds of the steps that a resumed run has made again, without saves."""
        # Ranges of valid records, whose steps ascend. A resumed run repeats steps, and the later record is valid.
        self._segments: list[Segment] = []
        self._blocks = Buckets.empty(0)
        self._first_block = 0
        self._block_count = 0
        self._mark: tuple[Any, ...] = ()

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
            if self.last is not None and self._mark != self._identify(file):
                # The records were merged, or the file was replaced.
                self._open_file()
            self.note = None
            available = (os.fstat(file.fileno()).st_size - HEADER_SIZE) // self.record.itemsize
            if self.last is None and self._newest is not None:
                self._leave_out(file, available - self._newest)
            before = self.count
            while self.count < available:
                wanted = min(CHUNK, available - self.count)
                records = self._read(file, self.count, self.count + wanted)
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

    def _leave_out(self, file: IO[bytes], count: int) -> None:
        """Do not read the first `count` records, unless only reading them tells where the record of a step is."""
        if count <= 0:
            return
        first = self._read(file, 0, 1)[0]
        last = self._read(file, count - 1, count)[0]
        first_step = int(first["step"])
        last_step = int(last["step"])
        if first["steps"] == 1 and last_step - first_step + 1 == count:
            self.count = count
            self._segments.append(Segment(0, count, first_step, last_step))
            self._first_block = last_step // BLOCK
            self.last = last.copy()
            self.last_step = last_step

    def _identify(self, file: IO[bytes]) -> tuple[Any, ...]:
        """What changes if records move: the file, and the first and the last record that were read."""
        status = os.fstat(file.fileno())
        first = self._read(file, self._segments[0].start, self._segments[0].start + 1)
        last = self._read(file, self.count - 1, self.count)
        return status.st_dev, status.st_ino, first.tobytes(), last.tobytes()

    def _read(self, file: IO[bytes], start: int, stop: int) -> Array:
        """Records of the file, as those of this version."""
        size = self.record.itemsize
        file.seek(HEADER_SIZE + start * size)
        data = file.read((stop - start) * size)
        records = np.frombuffer(data, self.record, len(data) // size)
        if self.record == STEP:
            return records
        converted = np.zeros(len(records), STEP)
        for name in STEP.names or ():
            if name in (self.record.names or ()):
                converted[name] = records[name]
            elif name in COLUMN:
                converted[name] = np.nan
        return converted

    def _append(self, file: IO[bytes], records: Array) -> None:
        if not len(records):
            return
        steps = records["step"].astype(np.int64)
        breaks = np.flatnonzero(np.diff(steps) <= 0) + 1
        if len(breaks) + len(self._segments) > RESTARTS:
            raise ConfigurationError(
                f"{self.path} is damaged: its steps go backward {len(breaks)} times within "
                f"{len(records)} records"
            )
        for row in np.flatnonzero(records["flags"] & FLAG_FIRST).tolist():
            before = self.last
            if row:
                before = records[row - 1]
            time_before = math.nan if before is None else float(before["time"])
            self.first_steps.append((time_before, records[row].copy()))
        for part in np.split(records, breaks):
            first = int(part["step"][0]) - int(part["steps"][0]) + 1
            if not self._segments or first <= self._segments[-1].last:
                self._cut(file, first)
                self._segments.append(Segment(self.count, self.count, first, first))
            self.count += len(part)
            segment = self._segments[-1]
            segment.stop = self.count
            segment.last = int(part["step"][-1])
            self._add_blocks(part)
        self.last = records[-1].copy()
        self.last_step = int(steps[-1])

    def _cut(self, file: IO[bytes], step: int) -> None:
        """Forget the records of `step` and of later ones: the run has resumed before it."""
        if self._segments:
            repeated = self._records(file, step, self._segments[-1].last)
            seconds = repeated["seconds"] - np.nan_to_num(repeated["checkpoint"])
            self.repeated += float(np.nansum(seconds * repeated["steps"]))
        while self._segments and self._segments[-1].first >= step:
            self._segments.pop()
        block = (step - 1) // BLOCK
        if not self._segments:
            self._blocks = Buckets.empty(0)
            self._first_block = block
            self._block_count = 0
            return
        # The block of the step is made anew.
        self._first_block = min(self._first_block, block)
        count = min(self._block_count, block - self._first_block)
        blocks = Buckets.empty(len(self._blocks.time))
        for array, former in zip(blocks.arrays(), self._blocks.arrays(), strict=True):
            array[:count] = former[:count]
        self._blocks = blocks
        self._block_count = count
        segment = self._segments[-1]
        if segment.last >= step:
            segment.stop = self._find(file, segment, step)
            segment.last = step - 1
        records = self._records(file, block * BLOCK + 1, step - 1)
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

    def records(self, start: int, stop: int) -> Array:
        """The valid records of the steps from `start` to `stop`."""
        with open(self.path, "rb", buffering=0, opener=open_regular) as file:
            return self._records(file, start, stop)

    def _records(self, file: IO[bytes], start: int, stop: int) -> Array:
        parts = []
        for segment in self._segments:
            if segment.first <= stop and segment.last >= start:
                first = self._find(file, segment, start)
                parts.append(self._read(file, first, self._find(file, segment, stop + 1)))
        return _joined(parts)

    def _add_blocks(self, records: Array) -> None:
        rows = bucket_numbers(records, BLOCK) - self._first_block
        needed = int(rows[-1]) + 1
        if needed > len(self._blocks.time):
            blocks = Buckets.empty(2 * needed)
            for array, former in zip(blocks.arrays(), self._blocks.arrays(), strict=True):
                array[: len(former)] = former
            self._blocks = blocks
        self._block_count = max(self._block_count, needed)
        self._blocks.merge(*reduced(records, rows))

    def blocks(self, start: int, stop: int) -> tuple[Array, Buckets]:
        """The blocks with the numbers from `start` to `stop` - 1, as far as there are some, and their numbers."""
        low = max(start, self._first_block)
        high = max(low, min(stop, self._first_block + self._block_count))
        rows = slice(low - self._first_block, high - self._first_block)
        return np.arange(low, high), Buckets(*(array[rows] for array in self._blocks.arrays()))

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
        records = self.records(first, min(last, first + BLOCK))
        return bool((records["flags"] & FLAG_FIRST).any())

    def steps_at(self, times: Array) -> Array:
        """The steps that were reached at these times (seconds since 1970), about, as fractions."""
        block_times = self._blocks.time[: self._block_count]
        blocks = np.flatnonzero(~np.isnan(block_times))
        ends = block_times[blocks]
        steps = ((blocks + self._first_block + 1) * BLOCK).astype("f8")
        steps[-1] = self.last_step
        begin = np.fmin(self.header.started, ends[0])
        if not np.isfinite(begin):
            begin = ends[0]
        reached: Array = np.interp(times, [begin, *ends], [self.first_step - 1, *steps])
        return reached


def reduce_steps(files: Sequence[RankSteps], start: int, stop: int, width: int) -> Buckets:
    """Reduce the steps from `start` to `stop` of some ranks to buckets.

    Args:
        files: the files of the ranks.
        start: the first step. Its bucket is complete.
        stop: the last step, likewise.
        width: steps of a bucket, a power of 2. The last step of a bucket is a multiple of it.

    Returns:
        Arrays of shape (ranks, buckets) and (ranks, buckets, columns).
    """
    first = (start - 1) // width
    count = (stop - 1) // width + 1 - first
    buckets = Buckets.empty(len(files) * count)
    rows = [np.empty(0, int)]
    records = []
    blocks = [Buckets.empty(0)]
    size = width // BLOCK
    for number, file in enumerate(files):
        if size == 0:
            part = file.records(first * width + 1, (first + count) * width)
            numbers = bucket_numbers(part, width)
            records.append(part)
        else:
            numbers, block = file.blocks(first * size, (first + count) * size)
            numbers //= size
            blocks.append(block)
        rows.append(numbers - first + number * count)
    all_rows = np.concatenate(rows)
    if len(all_rows):
        if size == 0:
            all_rows, parts = reduced(_joined(records), all_rows)
        else:
            all_rows, parts = _reduced_blocks(blocks, all_rows)
        for array, part in zip(buckets.arrays(), parts.arrays(), strict=True):
            array[all_rows] = part
    shape = (len(files), count)
    return Buckets(*(array.reshape(*shape, *array.shape[1:]) for array in buckets.arrays()))


def _joined(parts: Sequence[Array]) -> Array:
    """Records of several arrays. NumPy would compare the fields of each array with those of the next."""
    if len(parts) == 1:
        return parts[0]
    raw = np.dtype((np.void, STEP.itemsize))
    return np.concatenate([np.empty(0, raw), *(part.view(raw) for part in parts)]).view(STEP)


def _reduced_blocks(blocks: Sequence[Buckets], numbers: Array) -> tuple[Array, Buckets]:
    """Reduce blocks to one bucket for each different number in `numbers`, which ascends."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    merged = []
    for merge, *arrays in zip(_MERGES, *(block.arrays() for block in blocks), strict=True):
        merged.append(merge.reduceat(np.concatenate(arrays), starts, axis=0))
    return numbers[starts], Buckets(*merged)


def bucket_numbers(records: Array, width: int) -> Array:
    """The number of the bucket of each record."""
    return np.asarray((records["step"].astype(np.int64) - 1) // width)


@np.errstate(over="ignore", invalid="ignore")
def reduced(records: Array, numbers: Array) -> tuple[Array, Buckets]:
    """Reduce records to one bucket for each different number in `numbers`, which ascends.

    Returns:
        The different numbers, and their buckets.
    """
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    # Reductions along rows of a C-contiguous array are several times as fast as down its columns.
    floats = records.view("<f4").reshape(len(records), -1)
    values = np.ascontiguousarray(floats[:, -len(COLUMNS) :].T)
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
    buckets = Buckets(
        low=np.fmin.reduceat(values, starts, axis=1).T,
        high=np.fmax.reduceat(values, starts, axis=1).T,
        total=total.T,
        weight=weight.T,
        time=np.fmax.reduceat(records["time"], starts),
        skipped=np.add.reduceat(skipped, starts),
    )
    return numbers[starts], buckets


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

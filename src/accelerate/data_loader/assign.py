# SPDX-License-Identifier: Apache-2.0
"""Split the batches that one process has read into one batch for each shard and step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .rows import can_join, has_rows, join_rows, repeat_rows, rows_of, take_rows
from .steps import ReadPlan, ShardSplit, ShardStep, StreamPosition, completed, real_counts

SliceFunction = Callable[..., Any]

# In place of a batch, for a shard that has none in a step. A batch itself may be None.
NO_BATCH: Any = object()


@dataclass(slots=True)
class AssignedStep:
    """One step of all shards.

    Fields:
        batches: each shard's batch; `NO_BATCH` where it has none.
        counts: the samples of each shard, without repetitions and placeholders.
        position: the position after the step.
        last: for each shard, whether it is its last step.
        final: no step follows for any shard.
    """

    batches: list[Any]
    counts: tuple[int, ...] | None
    position: StreamPosition | int
    last: list[bool]
    final: bool


class BatchAssigner:
    """Assigns batches to shards, step by step.

    Each shard gets a batch as it was collated, or a slice of every batch where `plan.cut.split`. The batches of an
    incomplete last step are joined and split equally, unless they are padded to different lengths. They are filled
    with the first rows of the epoch where `plan.cut.even`, and nothing is repeated where `plan.cut.exact`.

    Args:
        plan: how the order is split.
        slice_fn: slices a batch, called as `(batch, slice, process_index=, num_processes=)`. Every step is joined
            first then.

    Attributes:
        first: reads the first batch of the epoch, where the batches begin later.
    """

    def __init__(self, plan: ReadPlan, slice_fn: SliceFunction | None = None) -> None:
        self.cut: ShardSplit = plan.cut
        self.size: int | None = plan.size
        self.drop_last: bool = plan.drop_last
        self.slice_fn = slice_fn
        self.first: Callable[[], ShardStep | None] | None = None
        self.head: tuple[Any, int] | None = None

    def steps(self, batches: Iterator[ShardStep]) -> Iterator[AssignedStep]:
        """The steps of all shards from the batches that one process reads."""
        steps = self._assigned(batches)
        is_uneven = not self.cut.even and not self.cut.exact
        ends_early = self.drop_last and not self.cut.split
        if not (is_uneven or ends_early):
            yield from steps
            return
        # The step after it shows whether a step is a shard's last one.
        present = next(steps, None)
        while present is not None:
            following = next(steps, None)
            if following is None:
                present.last = [True] * self.cut.shards
                present.final = True
            else:
                present.last = [batch is NO_BATCH for batch in following.batches]
                present.final = False
            yield present
            present = following

    def _assigned(self, batches: Iterator[ShardStep]) -> Iterator[AssignedStep]:
        shards = self.cut.shards
        size = 1 if self.cut.split else shards
        while True:
            group = list(itertools.islice(batches, size))
            if not group:
                return
            if self.drop_last and len(group) < size:
                return
            final = group[-1]
            last = final.last
            batches_read = [step.data for step in group]
            rows = [_rows(step) for step in group]
            slices, counts = self.assign(batches_read, rows, last)
            yield AssignedStep(slices, counts, final.position, [last] * shards, last)

    def assign(
        self, group: list[Any], rows: list[int | None], last: bool
    ) -> tuple[list[Any], tuple[int, ...] | None]:
        """Each shard's batch in one step, and the number of samples in each."""
        cut = self.cut
        counted = [count for count in rows if count is not None]
        if len(counted) < len(rows):
            # Batches whose rows cannot be counted are assigned without being split.
            if self.head is None:
                self.head = (group, 0)
            return self._unsplit(group, self.head[0]), None
        if self.head is None and self.first is None:
            self.head = (group[0], counted[0])
        if self.slice_fn is None:
            is_full = len(group) == cut.shards and not cut.split
            if is_full and (cut.exact or not last or len(set(counted)) == 1):
                return group, tuple(counted)
            is_joined = cut.split or not cut.exact
            if is_joined and not self._can_split(group, counted):
                first, _ = self._start(group, counted)
                batches = self._unsplit(group, [first])
                return batches, self._padded(counted)
            if is_joined and len(group) > 1 and not can_join(group, counted):
                return self._unjoined(group, counted), self._padded(counted)
        if cut.exact:
            return self._without_repeats(group, counted)
        return self._evenly(group, counted)

    def _can_split(self, group: list[Any], rows: list[int]) -> bool:
        if not all(map(has_rows, group, rows)):
            return False
        if self.cut.repeats and sum(rows) % self.cut.shards:
            return has_rows(*self._start(group, rows))
        return True

    def _unsplit(self, group: list[Any], head: list[Any]) -> list[Any]:
        """A batch for each shard as it was collated, also in the last step."""
        shards = self.cut.shards
        if self.cut.split:
            raise ValueError(
                "split_batches=True splits each batch, but a batch of this loader cannot be "
                "split into samples: it does not contain tensors or lists with one element per "
                "sample, or it contains a tensor of a different length, a sparse or nested "
                "tensor, or a PackedSequence. Use split_batches=False, dispatch_batches=False, "
                "or slice_fn_for_dispatch"
            )
        if self.cut.even:
            return completed(group, shards, head)
        return completed(group, shards, [NO_BATCH])

    def _unjoined(self, group: list[Any], rows: list[int]) -> list[Any]:
        """As `_unsplit`, for batches padded to different lengths. With `cut.even`, all get the rows of the longest."""
        if not self.cut.even:
            return completed(group, self.cut.shards, [NO_BATCH])
        longest = max(rows)
        filled = []
        for batch, count in zip(group, rows, strict=True):
            filled.append(repeat_rows(batch, count, longest))
        return completed(filled, self.cut.shards, filled)

    def _padded(self, rows: list[int]) -> tuple[int, ...]:
        return tuple(completed(rows, self.cut.shards, [0]))

    def _start(self, group: list[Any], rows: list[int]) -> tuple[Any, int]:
        """The first batch of the epoch, which fills the last step, and its rows."""
        if self.head is None and self.first is not None:
            step = self.first()
            if step is not None:
                self.head = (step.data, _rows(step) or 0)
        return self.head or (group[0], rows[0])

    def _without_repeats(
        self, group: list[Any], rows: list[int]
    ) -> tuple[list[Any], tuple[int, ...]]:
        shards = self.cut.shards
        length = rows[0]
        placeholder = group[0]
        if has_rows(placeholder, length):
            placeholder = take_rows(placeholder, length, 0, 1)
        if not self.cut.split:
            return completed(group, shards, [placeholder]), self._padded(rows)
        full = max(self.size or 0, length)
        part = -(-full // shards)
        counts = real_counts(length, part, shards)
        slices = self._slices(group, rows, part)
        return self._with_samples(slices, counts, placeholder), counts

    def _evenly(self, group: list[Any], rows: list[int]) -> tuple[list[Any], tuple[int, ...]]:
        shards = self.cut.shards
        total = sum(rows)
        part = -(-total // shards)
        counts = real_counts(total, part, shards)
        missing = part * shards - total
        if missing and self.cut.even:
            first, length = self._start(group, rows)
            if not can_join([group[0], first], [rows[0], length]):
                # Padded to other lengths than the first batch.
                first, length = group[0], rows[0]
            filling = repeat_rows(first, length, missing)
            slices = self._slices([*group, filling], [*rows, missing], part)
            return slices, counts
        slices = self._slices(group, rows, part)
        return self._with_samples(slices, counts, NO_BATCH), counts

    def _with_samples(self, slices: list[Any], counts: tuple[int, ...], empty: Any) -> list[Any]:
        """The slices, with `empty` for the last shards, which have no samples."""
        filled = len(counts) - counts.count(0)
        return completed(slices[:filled], self.cut.shards, [empty])

    def _slices(self, group: list[Any], rows: list[int], part: int) -> list[Any]:
        """Consecutive slices of `part` rows of the joined batches, one for each shard."""
        shards = self.cut.shards
        slices = [slice(part * shard, part * (shard + 1)) for shard in range(shards)]
        if self.slice_fn is None:
            return [join_rows(group, rows, cut.start, cut.stop) for cut in slices]
        joined = join_rows(group, rows)
        return [
            self.slice_fn(joined, cut, process_index=shard, num_processes=shards)
            for shard, cut in enumerate(slices)
        ]


def _rows(step: ShardStep) -> int | None:
    if step.counts:
        return rows_of(step.data, step.counts[0])
    return rows_of(step.data, None)

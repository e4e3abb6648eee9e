# SPDX-License-Identifier: Apache-2.0
"""Split the batches that one process has read into one batch for each shard and step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .position import StreamPosition
from .rows import has_rows, join_rows, repeat_rows, rows_of, take_rows
from .steps import ReadPlan, ShardSplit, ShardStep, completed, real_counts

SliceFunction = Callable[..., Any]

# In place of a batch, for a shard that has none in a step. A batch itself may be None.
NO_BATCH: Any = object()


@dataclass(slots=True)
class AssignedStep:
    """One step of all shards.

    Fields:
        batches: each shard's batch; `NO_BATCH` where it has none.
        counts: the samples of each shard, without repetitions and placeholders.
        place: the position after the step.
        last: for each shard, whether it is its last step.
        final: no step follows for any shard.
    """

    batches: list[Any]
    counts: tuple[int, ...] | None
    place: StreamPosition | int
    last: list[bool]
    final: bool


class BatchAssigner:
    """Assigns batches to shards, step by step.

    Each shard gets a batch as it was collated, or a slice of every batch where `plan.cut.split`. The batches of an
    incomplete last step are joined and split equally. They are filled with the first rows of the epoch where
    `plan.cut.even`, and nothing is repeated where `plan.cut.exact`.

    Args:
        plan: how the order is split.
        slice_fn: slices a batch, called as `(batch, slice, process_index=, num_processes=)`. Every step is joined
            first then.
        first: reads the first batch of the epoch, where the batches begin later.
    """

    def __init__(
        self,
        plan: ReadPlan,
        slice_fn: SliceFunction | None = None,
        first: Callable[[], ShardStep | None] | None = None,
    ) -> None:
        self.cut: ShardSplit = plan.cut
        self.size: int | None = plan.size
        self.drop_last: bool = plan.drop_last
        self.slice_fn = slice_fn
        self.first = first
        self.head: tuple[Any, int] | None = None

    def steps(self, batches: Iterator[ShardStep]) -> Iterator[AssignedStep]:
        """The steps of all shards from the batches that one process reads."""
        steps = self._assigned(batches)
        uneven = not self.cut.even and not self.cut.exact
        if not uneven and (self.cut.split or not self.drop_last):
            yield from steps
            return
        # The step after it shows whether a step is a shard's last one.
        present = next(steps, None)
        while present is not None:
            following = next(steps, None)
            if following is not None:
                ahead = following.batches
            else:
                ahead = [NO_BATCH] * self.cut.shards
            present.last = [batch is NO_BATCH for batch in ahead]
            present.final = following is None
            yield present
            present = following

    def _assigned(self, batches: Iterator[ShardStep]) -> Iterator[AssignedStep]:
        shards = self.cut.shards
        while group := list(itertools.islice(batches, 1 if self.cut.split else shards)):
            last = group[-1].last
            if self.drop_last and len(group) < (1 if self.cut.split else shards):
                return
            rows = [_rows(step) for step in group]
            slices, counts = self.assign([step.data for step in group], rows, last)
            yield AssignedStep(slices, counts, group[-1].position, [last] * shards, last)

    def assign(
        self, group: list[Any], rows: list[int | None], last: bool
    ) -> tuple[list[Any], tuple[int, ...] | None]:
        """Each shard's batch in one step, and the number of samples in each."""
        known = [count for count in rows if count is not None]
        if len(known) < len(rows):
            return self._uncounted(group)
        if self.head is None and self.first is None:
            self.head = (group[0], known[0])
        complete = len(group) == self.cut.shards and not self.cut.split
        if (
            self.slice_fn is None
            and complete
            and (self.cut.exact or not last or len(set(known)) == 1)
        ):
            return group, tuple(known)
        if (
            self.slice_fn is None
            and (self.cut.split or not self.cut.exact)
            and not self._can_split(group, known)
        ):
            return self._unsplit(group, known)
        if self.cut.exact:
            return self._without_repeats(group, known)
        return self._evenly(group, known)

    def _can_split(self, group: list[Any], rows: list[int]) -> bool:
        filled = self.cut.repeats and sum(rows) % self.cut.shards != 0
        return all(map(has_rows, group, rows)) and (
            not filled or has_rows(*self._start(group, rows))
        )

    def _uncounted(self, group: list[Any]) -> tuple[list[Any], None]:
        """Batches whose rows cannot be counted are assigned without being split."""
        if self.head is None:
            self.head = (group, 0)
        return self._unsplit_group(group, self.head[0]), None

    def _unsplit(self, group: list[Any], rows: list[int]) -> tuple[list[Any], tuple[int, ...]]:
        """Batches of known size without columns are assigned without being split, also in the last step."""
        batches = self._unsplit_group(group, [self._start(group, rows)[0]])
        return batches, (*rows, *[0] * (self.cut.shards - len(group)))

    def _unsplit_group(self, group: list[Any], head: list[Any]) -> list[Any]:
        if self.cut.split:
            raise ValueError(
                "split_batches=True splits each batch, and a batch of this loader cannot be split into samples: it "
                "has neither tensors nor lists with an element for each sample, or a tensor of another length, a "
                "sparse or nested one, or a PackedSequence. Use split_batches=False, dispatch_batches=False, or "
                "slice_fn_for_dispatch"
            )
        if self.cut.even:
            return completed(group, self.cut.shards, head)
        return group + [NO_BATCH] * (self.cut.shards - len(group))

    def _start(self, group: list[Any], rows: list[int]) -> tuple[Any, int]:
        """The first batch of the epoch, which fills the last step, and its rows."""
        if self.head is None and self.first is not None and (step := self.first()) is not None:
            self.head = (step.data, _rows(step) or 0)
        return self.head or (group[0], rows[0])

    def _without_repeats(
        self, group: list[Any], rows: list[int]
    ) -> tuple[list[Any], tuple[int, ...]]:
        shards = self.cut.shards
        if has_rows(group[0], rows[0]):
            placeholder = take_rows(group[0], rows[0], 0, 1)
        else:
            placeholder = group[0]
        if not self.cut.split:
            missing = shards - len(group)
            return group + [placeholder] * missing, (*rows, *[0] * missing)
        if self.size is None:
            length = rows[0]
        else:
            length = max(self.size, rows[0])
        part = -(-length // shards)
        counts = real_counts(rows[0], part, shards)
        slices = self._cut(group, rows, part)
        return [
            cut if count else placeholder for cut, count in zip(slices, counts, strict=True)
        ], counts

    def _evenly(self, group: list[Any], rows: list[int]) -> tuple[list[Any], tuple[int, ...]]:
        shards = self.cut.shards
        total = sum(rows)
        part = -(-total // shards)
        counts = real_counts(total, part, shards)
        missing = part * shards - total
        if missing and self.cut.even:
            group = [*group, repeat_rows(*self._start(group, rows), missing)]
            rows = [*rows, missing]
            total += missing
        slices = self._cut(group, rows, part)
        return [
            cut if part * shard < total else NO_BATCH for shard, cut in enumerate(slices)
        ], counts

    def _cut(self, group: list[Any], rows: list[int], part: int) -> list[Any]:
        """Consecutive slices of `part` rows of the joined batches, one for each shard."""
        slices = [slice(part * shard, part * (shard + 1)) for shard in range(self.cut.shards)]
        if self.slice_fn is None:
            return [join_rows(group, rows, cut.start, cut.stop) for cut in slices]
        joined = join_rows(group, rows)
        return [
            self.slice_fn(joined, cut, process_index=shard, num_processes=self.cut.shards)
            for shard, cut in enumerate(slices)
        ]


def _rows(step: ShardStep) -> int | None:
    return rows_of(step.data, step.counts[0] if step.counts else None)

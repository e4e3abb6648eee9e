# SPDX-License-Identifier: Apache-2.0
"""Dealing out what one process has read: batches in, one part a shard and step out. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .batch_source import Batch
from .position import StreamPosition
from .rows import count_rows, join_rows, repeat_rows, take_rows
from .steps import ReadPlan, ShardSplit, completed, real_counts

SliceFunction = Callable[..., Any]


@dataclass(slots=True)
class AssignedStep:
    """One step of all shards.

    Fields:
        parts: each shard's batch; None where it has none (any more).
        counts: the real samples of each. place: the place after it. last: for each shard, whether it is its last.
        final: no step follows for any of them.
    """

    parts: list[Any]
    counts: tuple[int, ...] | None
    place: StreamPosition | int
    last: list[bool]
    final: bool


class BatchAssigner:
    """Shares out batches between shards, step by step.

    Without `split`, each shard takes a batch as it was collated; with it, a part of every batch. What is left for the
    last step is joined and cut into equal parts (completed with the first rows of the epoch where `cut.even`), or
    falls as it falls (`cut.exact`). `slice_fn(batch, slice, process_index=, num_processes=)` cuts in its own way: then
    every step is joined first.
    """

    def __init__(self, plan: ReadPlan, slice_fn: SliceFunction | None = None) -> None:
        self.cut: ShardSplit = plan.cut
        self.size = plan.size
        self.drop_last = plan.drop_last
        self.slice_fn = slice_fn
        self.head: tuple[Any, int] | None = None

    def rounds(self, batches: Iterator[Batch]) -> Iterator[AssignedStep]:
        """The steps of all shards from the batches of one reader."""
        steps = self._steps(batches)
        uneven = not self.cut.even and not self.cut.exact
        if not uneven and (self.cut.split or not self.drop_last):
            yield from steps
            return
        # Whether a step is a shard's last shows in the one after it.
        present = next(steps, None)
        while present is not None:
            following = next(steps, None)
            ahead = following.parts if following is not None else [None] * self.cut.shards
            present.last = [part is None for part in ahead]
            present.final = following is None
            yield present
            present = following

    def _steps(self, batches: Iterator[Batch]) -> Iterator[AssignedStep]:
        shards = self.cut.shards
        while group := list(itertools.islice(batches, 1 if self.cut.split else shards)):
            last = group[-1][3]
            if self.drop_last and len(group) < (1 if self.cut.split else shards):
                return
            rows = [counts[0] if counts else count_rows(batch) for batch, counts, _, _ in group]
            parts, counts = self.deal([batch for batch, _, _, _ in group], rows, last)
            yield AssignedStep(parts, counts, group[-1][2], [last] * shards, last)

    def deal(self, group: list[Any], rows: list[int | None], last: bool) -> tuple[list[Any], tuple[int, ...] | None]:
        """The parts of one step, and the real samples in each."""
        known = [count for count in rows if count is not None]
        if len(known) < len(rows):
            return self._uncounted(group)
        if self.head is None:
            self.head = (group[0], known[0])
        whole = len(group) == self.cut.shards and not self.cut.split
        if self.slice_fn is None and whole and (self.cut.exact or not last or len(set(known)) == 1):
            return group, tuple(known)
        if self.cut.exact:
            return self._without_repeats(group, known)
        return self._evenly(group, known)

    def _uncounted(self, group: list[Any]) -> tuple[list[Any], None]:
        """Batches whose rows cannot be counted go round whole."""
        if self.cut.split:
            raise ValueError(
                "split_batches=True cuts each batch, and this loader's batches hold neither tensors nor lists whose "
                "rows could be counted: use split_batches=False"
            )
        if self.head is None:
            self.head = (group, 0)
        missing = self.cut.shards - len(group)
        if missing and self.cut.even:
            return completed(group, self.cut.shards, self.head[0]), None
        return group + [None] * missing, None

    def _without_repeats(self, group: list[Any], rows: list[int]) -> tuple[list[Any], tuple[int, ...]]:
        shards = self.cut.shards
        placeholder = take_rows(group[0], rows[0], 0, 1)
        if not self.cut.split:
            missing = shards - len(group)
            return group + [placeholder] * missing, (*rows, *[0] * missing)
        whole = rows[0] if self.size is None else max(self.size, rows[0])
        part = -(-whole // shards)
        counts = real_counts(rows[0], part, shards)
        parts = self._cut(group[0], rows[0], part)
        return [cut if count else placeholder for cut, count in zip(parts, counts, strict=True)], counts

    def _evenly(self, group: list[Any], rows: list[int]) -> tuple[list[Any], tuple[int, ...]]:
        shards = self.cut.shards
        joined, total = join_rows(group, rows), sum(rows)
        part = -(-total // shards)
        counts = real_counts(total, part, shards)
        if (missing := part * shards - total) and self.cut.even:
            assert self.head is not None
            first, length = self.head
            joined = join_rows([joined, repeat_rows(first, length, missing)], [total, missing])
            total += missing
        parts = self._cut(joined, total, part)
        return [cut if part * shard < total else None for shard, cut in enumerate(parts)], counts

    def _cut(self, batch: Any, rows: int, part: int) -> list[Any]:
        shards = range(self.cut.shards)
        if self.slice_fn is None:
            return [take_rows(batch, rows, part * shard, part * (shard + 1)) for shard in shards]
        return [
            self.slice_fn(
                batch, slice(part * shard, part * (shard + 1)), process_index=shard, num_processes=self.cut.shards
            )
            for shard in shards
        ]

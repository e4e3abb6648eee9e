# SPDX-License-Identifier: Apache-2.0
"""Datasets that split themselves: each process reads only its shard of an iterable dataset."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.graph_settings import get_all_graph_pipes

from ..collectives import transport
from ..core.errors import CheckpointError, PrepareError
from ..runtime.calls import Call
from ..runtime.channel import signature
from ..state import PartialState
from ..torch_internals.dataset_streams import treats_rows_alone
from .batch_source import altered
from .loader import DataLoaderShard
from .order import Order, is_distributed
from .rows import count_rows, join_rows, repeat_rows
from .samplers import IterableDatasetShard
from .steps import ReadPlan, ShardSplit, ShardStep, SplitProgress, StreamPosition

_NEXT = Call("the next step of a data loader whose dataset is split")
# What a shard reports instead of a number of samples.
_ENDED, _FAILED = -1, -2


def is_splittable(dataset: Any) -> bool:
    """Whether `dataset` is an iterable dataset of the package `datasets`."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, module.IterableDataset)


def is_split(dataset: Any) -> bool:
    """Whether the processes read different shards of `dataset` already, because the user declared it."""
    return _splits_by_rank(dataset) or (
        is_splittable(dataset) and getattr(dataset, "_distributed", None) is not None
    )


def check_split(dataset: Any, shards: int) -> None:
    """Raise PrepareError where `dataset` is split between all processes, and only some of them read different data."""
    if not _splits_by_rank(dataset):
        return
    world = PartialState().num_processes
    if world != shards:
        raise PrepareError(
            f"this {type(dataset).__name__} gives each of {world} processes its own samples, but "
            f"in this layout the data has {shards} shard(s): use a dataset that does not split "
            "itself, which rank 0 reads for all ranks"
        )


def _splits_by_rank(dataset: Any) -> bool:
    """Whether `dataset` reads the samples of its rank, in a run of several processes."""
    for name, splits in _BY_RANK.items():
        module = sys.modules.get(name)
        if module is not None and splits(module, dataset):
            return PartialState().num_processes > 1
    return False


# Packages whose datasets split themselves by rank, and which of their datasets do.
_BY_RANK: dict[str, Callable[[Any, Any], bool]] = {
    "webdataset": lambda module, dataset: (
        isinstance(dataset, module.DataPipeline) and module.split_by_node in dataset.pipeline
    ),
    "litdata": lambda module, dataset: isinstance(
        dataset,
        (module.StreamingDataset, module.CombinedStreamingDataset, module.ParallelStreamingDataset),
    ),
    # Torch's loader gives each rank its part of what passes a `sharding_filter`.
    "torch.utils.data.graph": lambda module, dataset: (
        isinstance(dataset, IterDataPipe)
        and any(
            hasattr(pipe, "apply_sharding")
            for pipe in get_all_graph_pipes(module.traverse_dps(dataset))
        )
    ),
}


def splits_evenly(dataset: Any, shards: int) -> bool:
    """Whether each of `shards` processes can read equally many of the dataset's own shards (files, mostly).

    Not after a step that counts, groups or interleaves samples, which gives other rows of a shard than of the whole.
    """
    return (
        is_splittable(dataset)
        and dataset.num_shards >= shards
        and dataset.num_shards % shards == 0
        and treats_rows_alone(dataset)
    )


class SplitLoader(DataLoaderShard):
    """The loader of a process that reads its own shard of the dataset. All processes make equally many steps.

    The shards may have different lengths. Therefore the processes exchange the number of samples in each step, and
    whether it is the last one of their shard. A batch that is smaller than others is filled with the first samples of
    its shard. With `drop_last` the epoch ends with the shortest shard.

    A position is the number of samples read of each shard. On another number of processes, the rest of the epoch is
    read as one stream, of which each process takes a slice.
    """

    def _configure(
        self, *, unsplit: Any = None, cut: ShardSplit | None = None, **options: Any
    ) -> None:
        super()._configure(**options)
        # The dataset of all processes; None where the user has split it.
        self.unsplit = unsplit
        self.cut: ShardSplit = cut or ShardSplit()

    def options(self) -> dict[str, Any]:
        """The arguments with which `around` makes another loader like this one."""
        return {**super().options(), "unsplit": self.unsplit, "cut": self.cut}

    def plan(self) -> ReadPlan:
        """How a step is split. The stream is that of this process."""
        plan = super().plan()
        plan.skip *= self.cut.shards
        # Nothing is repeated from the start of the common order.
        plan.cut = dataclasses.replace(self.cut, even=False)
        return plan

    def _check_split(self, stream: StreamPosition) -> None:
        if stream.split == self._progress(_read_of(stream)):
            return
        if self.unsplit is None:
            raise CheckpointError(
                "the position was saved with a different number of processes or workers, but "
                "this dataset splits itself (split_dataset_by_node, webdataset's split_by_node): "
                "use the same numbers for this epoch"
            )
        super()._check_split(stream)

    def _progress(self, read: int) -> SplitProgress:
        return SplitProgress(self.cut.shards, read, self._source.workers)

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        shards = self.cut.shards
        read = _read_of(start)
        if start.consumed and start.split != self._progress(read):
            # The rest of an epoch that was read in another way.
            base = self.base_dataloader
            shard = IterableDatasetShard(
                self.unsplit,
                base.batch_size or 1,
                base.drop_last,
                shards,
                self.cut.index,
                even_batches=self.cut.even,
            )
            return self._open_unsplit(altered(base, dataset=shard), order, start)
        read = max(read, plan.skip // shards)
        shard_plan = dataclasses.replace(plan, cut=ShardSplit(), skip=read)
        steps = self._source.open(shard_plan, order, StreamPosition())
        if is_distributed() and (self.cut.even or plan.drop_last):
            first = None
            if read:
                first = functools.partial(self._first_step, shard_plan, order)
            steps = equalized(steps, self.cut, plan.drop_last, first)
        return self._placed(steps, read, plan.size or 1)

    def _placed(self, steps: Iterator[ShardStep], read: int, size: int) -> Iterator[ShardStep]:
        for step in steps:
            read += size
            progress = self._progress(read)
            step.position = StreamPosition(self.cut.shards * read, split=progress)
            yield step


def _read_of(stream: StreamPosition) -> int:
    """The samples that were read of each shard."""
    if stream.split is None:
        return 0
    return stream.split.read


def equalized(
    steps: Iterator[ShardStep],
    cut: ShardSplit,
    drop_last: bool,
    first: Callable[[], ShardStep | None] | None = None,
) -> Iterator[ShardStep]:
    """The steps of one shard, as many as those of the longest shard (with `drop_last`, of the shortest one).

    Args:
        steps: the steps of this shard.
        cut: the number of shards, and which one this is.
        drop_last: end with the shortest shard.
        first: reads the first step of the epoch, where `steps` begin later.

    Raises:
        PrepareError: a shard has no samples; on every rank.
        RuntimeError: another rank has failed to read its shard.
    """
    group = transport.group_of(None)
    head: ShardStep | None = None
    for number in itertools.count():
        try:
            step = next(steps, None)
        except Exception:
            _exchanged(_FAILED, True, cut, group)
            raise
        is_last = True
        count = _ENDED
        if step is not None:
            is_last = step.last
            count = samples_in(step)
        counts, last = _exchanged(count, is_last, cut, group)
        ended = [shard for shard, samples in enumerate(counts) if samples == _ENDED]
        if len(ended) == cut.shards or (ended and drop_last):
            return
        if number == 0 and first is None:
            if ended:
                raise PrepareError(
                    f"the dataset's shard for process {ended[0]} of {cut.shards} is empty. Let "
                    "rank 0 read for all processes (dispatch_batches=True), or distribute the "
                    "samples evenly over the dataset's shards."
                )
            assert step is not None
            head = dataclasses.replace(step)
        if step is None or count < max(counts):
            if head is None and first is not None:
                head = first()
            assert head is not None
            step = filled_step(step, max(counts), head)
        step.counts = None
        # 0 stands for a batch whose rows cannot be counted.
        if 0 not in counts:
            step.counts = tuple(max(0, samples) for samples in counts)
        if drop_last:
            step.last = any(last)
        else:
            step.last = all(last)
        yield step
        if step.last:
            return


def samples_in(step: ShardStep) -> int:
    """The number of samples in a step of one shard; 0 where it cannot be counted."""
    if step.counts:
        return step.counts[0]
    return count_rows(step.data) or 0


def _exchanged(count: int, last: bool, cut: ShardSplit, group: Any) -> tuple[list[int], list[bool]]:
    """The number of samples of each shard in this step, and for each shard whether the step is its last one."""
    message = [cut.index, count, last]
    rows = transport.all_gather_numbers(message, group, signature(_NEXT.operation), _NEXT)
    failed = [rank for rank, row in enumerate(rows) if row[1] == _FAILED]
    if failed and count != _FAILED:
        raise RuntimeError(
            f"rank {failed[0]} failed to read its shard of the dataset: see its traceback"
        )
    counts = [0] * cut.shards
    ends = [False] * cut.shards
    for shard, samples, is_last in rows:
        counts[shard] = samples
        ends[shard] = bool(is_last)
    return counts, ends


def filled_step(step: ShardStep | None, size: int, head: ShardStep) -> ShardStep:
    """`step` with `size` rows: the missing ones are those of `head`, the first step of the shard."""
    length = samples_in(head)
    if step is None:
        data = head.data
        if length not in (0, size):
            data = repeat_rows(data, length, size)
        return ShardStep(data, None, 0)
    rows = samples_in(step)
    if rows and length:
        filling = repeat_rows(head.data, length, size - rows)
        step.data = join_rows([step.data, filling], [rows, size - rows])
    return step

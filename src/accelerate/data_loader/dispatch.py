# SPDX-License-Identifier: Apache-2.0
"""The loader that one process reads for all: rank 0 loads the batches and sends each rank its own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data.datapipes.datapipe import IterDataPipe

from ..core.errors import CheckpointError, ConfigurationError
from ..state import PartialState
from .assign import NO_BATCH, AssignedStep, BatchAssigner, SliceFunction
from .batch_source import altered, has_state, is_iterable
from .channel import READER, BatchChannel, BatchMessage, pack
from .loader import PreparedLoader
from .order import Order, draw_worker_seed, is_distributed
from .samplers import check_divisible
from .steps import ReadPlan, ShardSplit, ShardStep, StreamPosition, consumed_at, discard


class DataLoaderDispatcher(PreparedLoader):
    """A loader that rank 0 reads for all ranks. For data that only one process can or should read.

    Batches may contain tensors and any picklable objects. Only rank 0's position includes how far the workers of an
    iterable dataset have read: save that one.

    Args:
        dataset: the dataset.
        split_batches: a step is one batch, split equally. Otherwise it is a batch for each process.
        skip_batches: steps skipped at the start of every pass.
        use_stateful_dataloader: use torchdata's loader.
        slice_fn: slices a batch, called as `(batch, slice, process_index=, num_processes=)`.
        torch_device_mesh: the device mesh that determines which ranks read different samples.
        iteration: the epoch of the first pass.
        even_batches: the last step is split equally, and filled with the first samples if it does not divide.
        exact: samples are not repeated. A process without samples in the last step gets a placeholder.
        **kwargs: the other arguments of torch's `DataLoader`. `drop_last` drops an incomplete last step.

    Raises:
        ConfigurationError: there is more than one shard, and no process group.
        RuntimeError: rank 0 failed to read; on every rank.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFunction | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        even_batches: bool = True,
        exact: bool = False,
        **kwargs: Any,
    ) -> None:
        state = PartialState()
        super().__init__(
            dataset,
            device=state.device,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        shards = data_shards(torch_device_mesh)
        self._set_cut(ShardSplit(*shards, split_batches, even_batches, exact), slice_fn)

    def _configure(
        self,
        *,
        cut: ShardSplit | None = None,
        slice_fn: SliceFunction | None = None,
        **options: Any,
    ) -> None:
        super()._configure(**options)
        if cut is not None:
            self._set_cut(cut, slice_fn)

    def _set_cut(self, cut: ShardSplit, slice_fn: SliceFunction | None) -> None:
        # A single shard is not filled, as in a plain loop.
        self.cut: ShardSplit = dataclasses.replace(cut, even=cut.even and cut.shards > 1)
        self.slice_fn = slice_fn
        check_divisible(super().plan().size, cut, "dispatch_batches=True")

    def options(self) -> dict[str, Any]:
        """The arguments with which `around` makes another loader like this one."""
        return {**super().options(), "cut": self.cut, "slice_fn": self.slice_fn}

    @property
    def split_batches(self) -> bool:
        """Whether a step is one batch, split between the processes."""
        return self.cut.split

    def plan(self) -> ReadPlan:
        """The order of the samples, and how each step is split."""
        plan = super().plan()
        batch = plan.stride
        plan.cut = self.cut
        # The plan of the base class counts single batches.
        plan.skip += self.skip_batches * (plan.stride - batch)
        return plan

    def __len__(self) -> int:
        plan = self.plan()
        steps = len(plan)
        cut = plan.cut
        rest = max(0, plan.total() - plan.skip) % plan.stride
        if cut.even or cut.exact or plan.drop_last or not rest or plan.size is None:
            return steps
        # The samples of an incomplete last step are split equally.
        samples = rest
        if not plan.of_samples:
            before = plan.total() - rest
            samples = len(self.get_sampler()) - before * plan.size
        part = math.ceil(samples / cut.shards)
        full_steps = (plan.total() - plan.skip) // plan.stride
        return full_steps + (part * cut.index < samples)

    @property
    def _reads(self) -> bool:
        return not is_distributed() or dist.get_rank() == READER

    def _check_split(self, stream: StreamPosition) -> None:
        if stream.split is not None:
            raise CheckpointError(
                "the position was saved by processes that each read a shard of the dataset: load it with "
                "dispatch_batches=False"
            )

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        if not is_distributed():
            if plan.cut.shards > 1:
                raise ConfigurationError(
                    f"dispatch_batches=True sends batches from rank 0 to {plan.cut.shards} "
                    "shards, but this process does not belong to a process group: start the "
                    "script on several processes, or use dispatch_batches=False"
                )
            return self._source.open(plan, order, start)
        channel = BatchChannel(plan.cut.index)
        # Opening one is a collective of torch's loader, which shares the seed of its shuffles.
        is_pipe = isinstance(self.base_dataloader.dataset, IterDataPipe)
        if not self._reads:
            if is_pipe:
                iter(altered(self.base_dataloader, num_workers=0))
            elif not order.resumes:
                self._draw_as_reader()
            return _received(channel)
        return _read_for_all(self.assigned(plan, order, start), channel, plan.cut.index)

    def assigned(
        self, plan: ReadPlan, order: Order, start: StreamPosition
    ) -> Callable[[], Iterator[AssignedStep]]:
        """A function that opens the steps of all shards, on the process that reads them."""
        unsplit = dataclasses.replace(plan, cut=ShardSplit(exact=plan.cut.exact))
        is_stream = is_iterable(self.base_dataloader)
        is_pipe = isinstance(self.base_dataloader.dataset, IterDataPipe)
        begins_later = start.consumed or (plan.skip and not is_stream)
        assigner = BatchAssigner(plan, self.slice_fn)
        if begins_later and not (is_pipe or has_state(self.base_dataloader)):
            assigner.first = functools.partial(self._first_step, unsplit, order)
        skipped = 0
        if not begins_later and is_stream:
            # A stream is read from its start in any case; its first batch is kept, since it may not be opened twice.
            skipped = unsplit.skip // unsplit.stride
            unsplit.skip = 0

        # Opened by `_read_for_all`, so that an error there is reported to the other ranks as well.
        def open_steps() -> Iterator[AssignedStep]:
            steps = self._source.open(unsplit, order, start)
            if skipped:
                head = next(steps, None)
                assigner.first = lambda: head
                steps = itertools.islice(steps, skipped - 1, None)
            return assigner.steps(steps)

        return open_steps

    @property
    def last_step_size(self) -> int | None:
        """The samples are split equally first."""
        if self.batch_counts is None:
            return None
        return max(self.batch_counts) * len(self.batch_counts)

    def _draw_as_reader(self) -> None:
        """Draw the numbers that the start of a torch loader draws, as the API does on every rank."""
        base = self.base_dataloader
        draw_worker_seed(None)
        if base.num_workers and not is_iterable(base):
            # Torch requests the first batches from its workers at once.
            indices = iter(base.batch_sampler or base.sampler)
            per_worker = base.prefetch_factor or 2
            discard(indices, base.num_workers * per_worker)


def _read_for_all(
    open_steps: Callable[[], Iterator[AssignedStep]], channel: BatchChannel, shard: int
) -> Iterator[ShardStep]:
    """Rank 0's batch of each step, after the other ranks' batches have been sent."""
    steps: Iterator[AssignedStep] | None = None
    while True:
        try:
            if steps is None:
                steps = open_steps()
            step = next(steps, None)
            messages: list[BatchMessage | None] = []
            if step is not None:
                messages = _messages(step)
            packed = [pack(message) for message in messages]
        except Exception as error:
            channel.fail(f"{type(error).__name__}: {error}")
            raise
        if step is None:
            channel.end()
            return
        channel.send(packed)
        message = messages[shard]
        if message is not None:
            yield ShardStep(message.batch, message.counts, step.position, message.last)
        if step.final:
            return


def _messages(step: AssignedStep) -> list[BatchMessage | None]:
    position = consumed_at(step.position)
    messages: list[BatchMessage | None] = []
    for batch, last in zip(step.batches, step.last, strict=True):
        message = None
        if batch is not NO_BATCH:
            message = BatchMessage(batch, step.counts, position, last, step.final)
        messages.append(message)
    return messages


def _received(channel: BatchChannel) -> Iterator[ShardStep]:
    """This rank's batch of each step. It may have none in the final step only."""
    for message in iter(channel.receive, None):
        assert message is not None
        yield ShardStep(message.batch, message.counts, message.position, message.last)
        if message.final:
            return


def data_shards(mesh: Any) -> tuple[int, int]:
    """The number of data shards of the run, or of its device mesh, and the index of this process's shard."""
    if mesh is not None:
        return shards_of_mesh(mesh)
    state = PartialState()
    return state.num_processes, state.process_index


def shards_of_mesh(mesh: Any) -> tuple[int, int]:
    """The number of data shards of a device mesh, and the index of this process's shard.

    Ranks that differ only along tensor, context, sequence or pipeline dimensions read the same data.
    """
    shards = 1
    index = 0
    for name in mesh.mesh_dim_names or ():
        if name not in ("tp", "cp", "sp", "pp"):
            size = mesh[name].size()
            shards *= size
            index = index * size + mesh[name].get_local_rank()
    return shards, index

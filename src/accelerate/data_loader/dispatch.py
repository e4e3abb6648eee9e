# SPDX-License-Identifier: Apache-2.0
"""The loader that one process reads for all: rank 0 loads, every rank is handed its part of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ..core.errors import ConfigurationError
from ..state import PartialState
from .assign import AssignedStep, BatchAssigner, SliceFunction
from .batch_source import Batch
from .channel import READER, BatchChannel, BatchMessage, pack
from .loader import PreparedLoader
from .order import Order, is_distributed
from .position import StreamPosition
from .shard import check_part
from .steps import ReadPlan, ShardSplit


class DataLoaderDispatcher(PreparedLoader):
    """A loader that rank 0 reads, and whose batches it hands out. For data that only one process can or should read.

    Without `split_batches`, a step is a batch for each process; with it, one batch cut into equal parts. The last step
    is cut into equal parts, completed with the first samples where that does not divide (`even_batches`), cut as it
    falls with a placeholder where a process has none (`exact`), or left out (the loader's `drop_last`). Batches may
    hold tensors and any picklable objects. Takes the arguments of torch's `DataLoader` after its own.

    Only rank 0's position tells how far the workers of a stream have read: save that one.

    Raises ConfigurationError for more than one shard without a process group, RuntimeError on every rank where the
    reader fails.
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
        shards = (state.num_processes, state.process_index)
        if torch_device_mesh is not None:
            shards = shards_of_mesh(torch_device_mesh)
        self._share_out(ShardSplit(*shards, split_batches, even_batches, exact), slice_fn)

    def _configure(
        self, *args: Any, cut: ShardSplit | None = None, slice_fn: SliceFunction | None = None, **options: Any
    ) -> None:
        super()._configure(*args, **options)
        if cut is not None:
            self._share_out(cut, slice_fn)

    def _share_out(self, cut: ShardSplit, slice_fn: SliceFunction | None) -> None:
        # One shard reads what there is, as a plain loop does.
        self.cut = dataclasses.replace(cut, even=cut.even and cut.shards > 1)
        self.slice_fn = slice_fn
        size = super().plan().size
        check_part(size, cut.shards, cut.split, cut.exact, "dispatch_batches=True")

    def options(self) -> dict[str, Any]:
        return {**super().options(), "cut": self.cut, "slice_fn": self.slice_fn}

    @property
    def split_batches(self) -> bool:
        return self.cut.split

    def plan(self) -> ReadPlan:
        plan = dataclasses.replace(super().plan(), cut=self.cut)
        # The base's own plan counted single batches.
        plan.skip += self.skip_batches * (plan.stride - dataclasses.replace(plan, cut=ShardSplit()).stride)
        return plan

    def __len__(self) -> int:
        return len(self.plan())

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[Batch]:
        world = dist.get_world_size() if is_distributed() else 1
        if world == 1:
            if plan.cut.shards > 1:
                raise ConfigurationError(
                    f"dispatch_batches=True hands batches from rank 0 to {plan.cut.shards} shards, and this process "
                    "is in no process group: start the script on several processes, or use dispatch_batches=False"
                )
            return self._source.open(plan, order, start)
        wire = BatchChannel(plan.cut.index)
        if dist.get_rank() != READER:
            return _received(wire)
        order.isolate(shared=False)
        whole = dataclasses.replace(plan, cut=ShardSplit(exact=plan.cut.exact))
        # What fails while the loader is opened is told to the others like what fails later.
        dealer = BatchAssigner(plan, self.slice_fn)
        return _assigned(lambda: dealer.rounds(self._source.open(whole, order, start)), wire, plan.cut.index)


def _assigned(open_rounds: Callable[[], Iterator[AssignedStep]], wire: BatchChannel, shard: int) -> Iterator[Batch]:
    """The reader's own part of each step, after the others have been handed theirs."""
    rounds = None
    while True:
        try:
            rounds = open_rounds() if rounds is None else rounds
            step = next(rounds, None)
            parcels = [] if step is None else _messages(step)
            packed = [None if parcel is None else pack(parcel) for parcel in parcels]
        except Exception as error:
            wire.fail(f"{type(error).__name__}: {error}")
            raise
        if step is None:
            wire.end()
            return
        wire.send(packed)
        own = parcels[shard]
        if own is not None:
            yield own.batch, own.counts, step.place, own.last
        if step.final:
            return


def _messages(step: AssignedStep) -> list[BatchMessage | None]:
    position = step.place if isinstance(step.place, int) else step.place.consumed
    return [
        None if part is None else BatchMessage(part, step.counts, position, last, step.final)
        for part, last in zip(step.parts, step.last, strict=True)
    ]


def _received(wire: BatchChannel) -> Iterator[Batch]:
    """This rank's part of each step. Only in a final one can it have none."""
    while (found := wire.receive()) is not None:
        yield found.batch, found.counts, found.position, found.last
        if found.final:
            return


def shards_of_mesh(mesh: Any) -> tuple[int, int]:
    """How many shards of the data a device mesh has, and which one is this process's.

    Ranks that differ only along the dimensions that share one sample (tensor, context, sequence, pipeline) read the
    same data.
    """
    shards, index = 1, 0
    for name in mesh.mesh_dim_names or ():
        if name not in ("tp", "cp", "sp", "pp"):
            size = mesh[name].size()
            shards, index = shards * size, index * size + mesh[name].get_local_rank()
    return shards, index

# SPDX-License-Identifier: Apache-2.0
"""Prepared loaders: they read one shard of a torch loader's data, keep its position and copy it to the device."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import weakref
import zlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, SequentialSampler

from ..collectives.rng import synchronize_rng_states
from ..core.errors import CheckpointError
from ..core.objects import computed
from ..core.observers import RunLoop
from ..runtime import marks
from ..state import GradientState
from .base import DataLoaderAdapter, DataLoaderStateMixin
from .batch_source import BatchSource, altered, is_iterable, is_native, plan_for, unwrapped
from .order import (
    GLOBAL,
    Order,
    OwnGenerators,
    RecordedOrder,
    ReplayedOrder,
    States,
    is_distributed,
    is_recorded,
    is_seeded,
    preserved,
)
from .prefetch import feed_for
from .samplers import (
    EpochSampler,
    IterableDatasetShard,
    Remainder,
    epoch_listeners,
    get_sampler,
    tell_epoch,
    with_sampler,
)
from .steps import (
    Position,
    ReadPlan,
    ShardStep,
    StreamPosition,
    as_stream_position,
    consumed_at,
    discard,
    total_of,
)


@dataclasses.dataclass(eq=False, repr=False)
class LoaderOptions:
    """The attributes that `PreparedLoader.around` takes as arguments. `prepare` sets `_seeded` for its generator."""

    use_stateful_dataloader: bool = False
    device: torch.device | None = None
    rng_types: list[Any] | None = None
    synchronized_generator: torch.Generator | None = None
    skip_batches: int = 0
    _drop_last: bool = False
    _non_blocking: bool = False
    torch_device_mesh: Any = None
    iteration: int = 0
    _seeded: bool = False


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin, LoaderOptions):
    """A torch loader that reads one shard and keeps its position in the epoch.

    Attributes:
        batches_read: batches that the present pass, or the last one, has yielded on this process.
        batches_before: batches of the epoch that this pass has left out.
        iteration: the epoch of the next pass. It increases by one after each complete pass.
        skip_batches: steps skipped at the start of every pass.
    """

    batches_read: int = 0
    batches_before: int = 0
    end_of_dataloader: bool
    remainder: int
    batch_counts: tuple[int, ...] | None
    batch_weight: float
    loop: RunLoop
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._configure(
            use_stateful_dataloader=use_stateful_dataloader,
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
        )

    @classmethod
    def around(cls, base: DataLoader[Any], **options: Any) -> DataLoader[Any]:
        """Make a prepared loader from an existing torch loader."""
        loader = cls.__new__(cls)
        loader.base_dataloader = base
        loader._configure(**options)
        return cast("DataLoader[Any]", loader)  # which it is to `isinstance`

    def _configure(self, **options: Any) -> None:
        LoaderOptions.__init__(self, **options)
        if self.device is not None:
            self.device = torch.device(self.device)
        self._source = self._open_source()
        self._feed = feed_for(self.device, self._non_blocking)
        # The present pass (or the last one, if it was not complete), and its position.
        self._order: Order | None = None
        self._position: StreamPosition | int = 0
        self._former_position: StreamPosition | int = 0  # before the last batch
        self._start = 0
        self._pending: Position | None = None
        # What passes that were left have read of a stream that goes on where it is: one that is its own iterator.
        self._yielded = 0
        # A loader that skips the first batches of this one's epoch continues it and has its position.
        self._origin: PreparedLoader | None = None
        self._successor: weakref.ref[PreparedLoader] | None = None

    def options(self) -> dict[str, Any]:
        """The arguments with which `around` makes another loader like this one."""
        names = [field.name for field in dataclasses.fields(LoaderOptions)]
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, also in another process, makes passes of its own.
        return functools.partial(type(self).around, **self.options()), (self.base_dataloader,)

    # All objects of this class share one state.
    gradient_state: GradientState = computed(lambda self: GradientState(), "The gradient state.")

    @property
    def copy_seconds(self) -> float:
        """Seconds that this loader has spent so far on copies to the device."""
        if self._feed is None:
            return 0.0
        return self._feed.copy_seconds

    # -- one pass

    def __iter__(self) -> Iterator[Any]:
        self.loop.before_pass(self)
        self.batches_before = self.first_batch
        # Until a batch is read, as another call of `iter` may follow: tqdm makes two.
        resumed = self._pending
        self._successor = None
        if resumed is not None and self.iteration > resumed.epoch:
            # No batch of it is left: the generators are set to its end.
            following = self.iteration
            self._pending = None
            self.set_epoch(resumed.epoch)
            order = self._new_order(resumed.order)
            discard(self._open(self.plan(), order, resumed.stream))
            self.set_epoch(following)
            resumed = None
        start = StreamPosition()
        states = None
        if resumed is not None:
            self.iteration = resumed.epoch
            start = resumed.stream
            states = resumed.order
        self.share_generators(self.rng_types)
        self._inform(self.iteration, overrule=False)
        self._leave_pass()
        order = self._new_order(states)
        self._order = order
        self._position = start
        self._start = start.consumed
        plan = self.plan()
        steps = self._open(plan, order, start)
        if self._feed is not None:
            steps = self._feed.ahead(steps)
        return self._pass(steps, plan, start)

    def share_generators(self, kinds: list[Any] | None) -> None:
        """Copy rank 0's states of these kinds of generators to every rank."""
        kinds = kinds or []
        # Without a generator to synchronize, the ranks share the states that the order is drawn from. A position of
        # another number of shards may take it away.
        if self.synchronized_generator is None:
            kinds = [kind for kind in kinds if getattr(kind, "value", kind) != "generator"]
        synchronize_rng_states(kinds, self.synchronized_generator)

    @property
    def first_batch(self) -> int:
        """The batch of the epoch, from 0, with which the next pass begins: another than 0 after a resume or a skip."""
        skipped = self.batches_skipped
        if self._pending is None or self.iteration > self._pending.epoch:
            return skipped
        return max(skipped, -(-self._pending.stream.consumed // self.plan().stride))

    @property
    def batches_skipped(self) -> int:
        """Batches that every pass skips."""
        plan = self.plan()
        return -(-plan.skip // plan.stride)

    def _leave_pass(self) -> None:
        if isinstance(self._order, ReplayedOrder) and isinstance(
            unwrapped(self.base_dataloader.dataset), Iterator
        ):
            self._yielded = self._order.lead + self._order.drawn
        self._order = None

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        if start.split is not None:
            return self._open_unsplit(self.base_dataloader, order, start)
        self._share(plan, order)
        return self._source.open(plan, order, start)

    def _open_source(self) -> BatchSource:
        return BatchSource(self.base_dataloader)

    def _share(self, plan: ReadPlan, order: Order) -> None:
        """Let all ranks have rank 0's order: they are shards of it, or read the same samples."""
        is_common = plan.cut.shards > 1 or self.torch_device_mesh is not None
        order.shared = is_common and is_distributed() and not order.fixed

    def _first_step(self, plan: ReadPlan, order: Order) -> ShardStep | None:
        """The first step of the present epoch, read again without an effect on generators."""
        # Not the source of the present pass, whose workers may be persistent.
        source = BatchSource(self.base_dataloader)
        states = order.own.capture()
        unskipped = dataclasses.replace(plan, skip=0)
        with preserved():
            step = next(source.open(unskipped, order.repeated(), StreamPosition()), None)
        order.own.restore(states)
        return step

    def _open_unsplit(self, base: Any, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        """The rest of an epoch from one stream, also of an epoch whose shards were read by other processes."""
        read = 0
        split = start.split
        if split is not None:
            read = split.shards * split.read
            dataset: Any = Remainder(unwrapped(base.dataset), split, self.iteration)
            if isinstance(base.dataset, IterableDatasetShard):
                shard = copy.copy(base.dataset)
                shard.dataset = dataset
                dataset = shard
            base = altered(base, dataset=dataset)
            start = StreamPosition(start.consumed - read)
        plan = plan_for(base, self.skip_batches)
        plan.skip = max(0, plan.skip - read)
        self._share(plan, order)
        for step in BatchSource(base).open(plan, order, start):
            if split is not None:
                step.position = StreamPosition(read + consumed_at(step.position), split=split)
            yield step

    def _pass(
        self, steps: Iterator[ShardStep], plan: ReadPlan, start: StreamPosition
    ) -> Iterator[Any]:
        self._pending = None
        self.begin()
        self.batches_read = 0
        complete = False
        cut = plan.cut
        keeps_last = not (plan.drop_last or self._drop_last)
        marks.begin_pass(self)
        loop = self.loop
        loop.begin_pass(self)
        try:
            if not self._drop_last:
                self.remainder = plan.last_size(start.consumed)
            for step in steps:
                counts = step.counts
                if counts is not self.batch_counts:
                    self.batch_counts = counts
                    if cut.exact and counts is not None:
                        self.batch_weight = counts[cut.index] * cut.shards / (sum(counts) or 1)
                if step.last and keeps_last and counts is not None:
                    # What was read, if a sampler yields another number than its length.
                    self.remainder = _last_size(counts, plan)
                self.end_of_dataloader = step.last
                self._former_position = self._position
                self._position = step.position
                self.batches_read += 1
                # The next batch is read without this one in memory, unless the loop keeps it.
                batch = step.data
                step.data = None
                loop.batch(self, batch)
                yield batch
                del batch
                loop.end_batch(self)
            self._order = None
            self._yielded = 0
            complete = True
            self._end_epoch(self.iteration + 1)
        finally:
            # At the end of the interpreter, the globals of modules are gone.
            if not sys.is_finalizing():
                marks.end_pass(self, self.iteration - complete, complete)
                loop.end_pass(self)
                self.end()

    def leave_out_rest(self) -> None:
        """Count the pass that is under way as complete."""
        self._order = None
        self._yielded = 0
        self._end_epoch(self.iteration + 1)

    @property
    def is_being_read(self) -> bool:
        """Whether a pass is under way."""
        return self._order is not None

    @property
    def can_return(self) -> bool:
        """Whether `return_batch` is possible: the last batch was not the first of an epoch."""
        return consumed_at(self._former_position) > 0

    def return_batch(self) -> None:
        """Have the position before the last batch, for a save after which the process ends."""
        self._position = self._former_position
        self.end_of_dataloader = False

    @property
    def batches_skipped_twice(self) -> int:
        """Batches before the present one, if they are as many as those that a resumed pass left out; else 0."""
        skipped = self.batches_read - 1
        consumed = consumed_at(self._position) - self._start
        if consumed * skipped == self._start * self.batches_read:
            return skipped
        return 0

    def _end_epoch(self, following: int) -> None:
        """Set the next epoch, here and in the loader whose epoch this one completed."""
        self.iteration = following
        if self._origin is not None and self._origin.iteration < following:
            self._origin._end_epoch(following)

    # -- what is read

    @property
    def consumed(self) -> int:
        """How much of the order of this epoch all shards together have read, in the unit of `plan()`."""
        return consumed_at(self._position)

    @property
    def drops_last(self) -> bool:
        """Whether an incomplete last step of all shards is dropped."""
        return self._drop_last or self.plan().drop_last

    @property
    def order_key(self) -> int:
        """A number that differs between orders of an epoch; 0 where nothing is drawn, or it is not known."""
        order = self._order
        if not isinstance(order, ReplayedOrder) or order.states is None:
            return 0
        if order.own.seedable is not None:
            return (order.own.seedable.initial_seed + self.iteration) % 2**64
        if not order.kinds:
            return 0
        names = (*order.kinds, "generators")
        states = [order.states[name] for name in names if name in order.states]
        return zlib.crc32(repr(states).encode())

    def plan(self) -> ReadPlan:
        """The order of the samples, and how it is split, according to the present samplers."""
        return plan_for(self.base_dataloader, self.skip_batches)

    def _new_order(self, states: States | None = None) -> Order:
        """The order of the next pass; with `states`, the one that a position was saved in."""
        base = self.base_dataloader
        plan = self.plan()
        generators = self._own_generators()
        if is_iterable(base):
            yielded = 0
            if not base.num_workers:
                yielded = self._yielded
            return ReplayedOrder(generators, GLOBAL, False, states, yielded)
        if not is_seeded(plan.stream) or (states is not None and is_recorded(states)):
            # More elements than twice the dataset, or what the sampler says, are not one epoch.
            length = 1 << 20
            if hasattr(base.dataset, "__len__"):
                length = len(base.dataset)
            limit = 2 * max(total_of(plan) or 0, length) + 1
            return RecordedOrder(generators, plan.stream, limit, states)
        if type(plan.stream) is SequentialSampler:
            return ReplayedOrder(generators, (), True, states)
        if generators.seedable is not None:
            return ReplayedOrder(generators, (), generators.seedable.seed_agreed, states)
        return ReplayedOrder(generators, ("torch",), False, states)

    def _own_generators(self) -> OwnGenerators:
        base = self.base_dataloader
        sampler = self.get_sampler()
        holders = [sampler, base]
        if is_iterable(base):
            holders.append(unwrapped(base.dataset))
        generators = [getattr(holder, "generator", None) for holder in holders]
        generators.append(self.synchronized_generator)
        # A batch sampler without a sampler may have the seed itself.
        for seedable in (sampler, self.plan().stream):
            if isinstance(seedable, EpochSampler):
                return OwnGenerators(generators, seedable)
        return OwnGenerators(generators)

    @property
    def _has_seeded_sampler(self) -> bool:
        """Whether the sampler's generator came from `prepare`, so that nothing else draws from it."""
        return (
            self._seeded
            and getattr(self.get_sampler(), "generator", None) is self.synchronized_generator
        )

    def _use_seeded_sampler(self, seeded: bool) -> None:
        """Draw from the kind of generator that a loaded position was drawn from."""
        sampler = self.get_sampler()
        if seeded == self._has_seeded_sampler or sampler is None:
            return
        if not seeded:
            sampler.generator = self.synchronized_generator = None
        elif getattr(sampler, "generator", False) is None:
            sampler.generator = self.synchronized_generator = torch.Generator()
        self._seeded = seeded

    def __len__(self) -> int:
        if is_native(self.base_dataloader):
            return len(self.plan())
        return max(0, len(self.base_dataloader) - self.skip_batches)

    @property
    def total_batch_size(self) -> int:
        """Samples in a step over all shards. Raises AttributeError where batches have no fixed size."""
        size = self.plan().global_batch
        if size is None:
            raise AttributeError  # `__getattr__` adds the message
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset of all shards."""
        dataset = unwrapped(self.base_dataloader.dataset)
        if hasattr(dataset, "total_length"):
            return int(dataset.total_length)
        return len(dataset)

    @property
    def last_step_size(self) -> int | None:
        """Each shard fills its batch."""
        return self.plan().global_batch

    def get_sampler(self) -> Any:
        """The sampler of single indices inside this loader; None where there is none."""
        if is_iterable(self.base_dataloader):
            return None
        return get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler, from the next pass on."""
        base = self.base_dataloader
        if base.batch_sampler is None:
            base.__dict__["sampler"] = sampler
        else:
            base.__dict__.update(
                batch_sampler=with_sampler(base.batch_sampler, sampler), sampler=sampler
            )
        self._source = self._open_source()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, here and in samplers and a dataset that have `set_epoch`."""
        self.iteration = epoch
        pending = self._pending
        if pending is not None and epoch not in (pending.epoch, pending.epoch + pending.ended):
            # A request for another epoch drops the rest of the loaded one. The epoch after an ended one needs the
            # generators as the ended one left them.
            self._pending = None
        self._inform(epoch)

    def _inform(self, epoch: int, overrule: bool = True) -> None:
        base = self.base_dataloader
        dataset = unwrapped(base.dataset)
        if not hasattr(dataset, "set_epoch"):
            dataset = base.dataset
        for listener in epoch_listeners(base.batch_sampler, base.sampler, dataset):
            tell_epoch(listener, epoch, overrule)

    # -- position

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, and how much of its order all shards together have read.

        After the last batch, while the loop has not ended, a pass that is resumed from the position yields nothing.

        Returns:
            Numbers, strings, lists, bytes and tensors. They do not depend on the shard or the number of shards.
        """
        if self._pending is not None:
            return self._pending.to_dict()
        if self._successor is not None:
            successor = self._successor()
            if successor is not None and (successor._order or successor._pending):
                return successor.state_dict()
        plan = self.plan()
        position = Position(self.iteration, plan.unit, total_of(plan), sampler=self._sampler_class)
        if self._order is None or not consumed_at(self._position):
            # Between epochs, or before the first batch of one.
            states = self._own_generators().capture()
            position.generators = states
        else:
            position.stream = as_stream_position(self._position)
            if isinstance(self._position, int) and is_iterable(self.base_dataloader):
                position.stream.workers = (self._position,)
            states = self._order.as_saved()
            position.order = states
            position.ended = self.end_of_dataloader
        if self._has_seeded_sampler:
            states["seeded"] = True
        return position.to_dict()

    @property
    def origin(self) -> PreparedLoader:
        """The loader that the user prepared: this one, or the one whose epoch this one continues."""
        if self._origin is None:
            return self
        return self._origin.origin

    def succeed(self, origin: PreparedLoader, continues: bool = True) -> None:
        """Continue the present epoch of `origin`, also from a position that was loaded into it.

        Args:
            origin: the loader whose epoch this one continues.
            continues: whether some of its batches are left out. If none are and the loaded epoch has ended, this
                loader reads the next one.
        """
        self.loop = origin.loop
        self._pending = origin._pending
        origin._pending = None
        if self._pending is not None and self._pending.ended:
            self.iteration = self._pending.epoch + (not continues)
        self._origin = origin
        origin._successor = weakref.ref(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a position, also one of another number of shards. The next pass yields the rest of its epoch.

        Args:
            state_dict: what `state_dict` has returned.

        Raises:
            CheckpointError: this loader cannot continue from the position.
        """
        position = self._checked(state_dict)
        self._leave_pass()
        self._position = 0
        self._successor = None
        self._pending = None
        if position.in_epoch:
            self._pending = position
        self._use_seeded_sampler(bool((position.order or position.generators or {}).get("seeded")))
        if position.generators is not None:
            self._own_generators().restore(position.generators)
        self.set_epoch(position.epoch)

    def leave_ended_epoch(self) -> bool:
        """Let the next pass be that of the next epoch, if the loaded position is after the last batch of one.

        Returns:
            Whether it is.
        """
        if self._pending is None or not self._pending.ended:
            return False
        self.set_epoch(self._pending.epoch + 1)
        return True

    def check_state_dict(self, state_dict: dict[str, Any]) -> list[str]:
        """Raise CheckpointError for a position from which this loader cannot continue. Returns notes."""
        saved = self._checked(state_dict)
        sampler = self._sampler_class
        if not saved.in_epoch or None in (saved.sampler, sampler) or saved.sampler == sampler:
            return []
        return [
            f"was saved in the middle of an epoch with the sampler {saved.sampler} but has "
            f"{sampler} here, which orders the rest of that epoch: some samples may be read twice "
            "or not at all"
        ]

    @property
    def _sampler_class(self) -> str | None:
        sampler = self.get_sampler()
        if sampler is None:
            return None
        return type(sampler).__qualname__

    def _checked(self, state_dict: dict[str, Any]) -> Position:
        position = Position.from_dict(state_dict)
        plan = self.plan()
        workers = None
        if self._reads and is_iterable(self.base_dataloader):
            workers = self._source.workers
        total = total_of(plan)
        if position.in_epoch and total != position.total:
            # The length may depend on the epoch.
            self._inform(position.epoch)
            total = total_of(plan)
            self._inform(self.iteration)
        position.check_fits(plan.unit, total, workers)
        if position.in_epoch:
            self._check_split(position.stream)
        return position

    @property
    def _reads(self) -> bool:
        """Whether this process reads the dataset itself."""
        return True

    def _check_split(self, stream: StreamPosition) -> None:
        """Raise CheckpointError where the rest of an epoch of which each process read a shard cannot be read here."""
        split = stream.split
        if split is not None and (split.workers > 1 or self._source.workers > 1):
            raise CheckpointError(
                f"the position was saved by {split.shards} processes that each read a shard of "
                f"the dataset, with {split.workers} worker(s). A different number of processes or "
                "workers can read the rest of the epoch only with at most one worker: use the "
                "same numbers for this epoch"
            )


class DataLoaderShard(PreparedLoader):
    """A loader for one shard: every process reads its own samples.

    Args:
        dataset: the dataset.
        device: where batches are put. None: they are not moved.
        rng_types: generators to synchronize before every pass ("torch", "cuda", "generator", ...).
        synchronized_generator: the generator that "generator" means.
        skip_batches: steps skipped at the start of every pass.
        use_stateful_dataloader: use torchdata's loader.
        torch_device_mesh: the device mesh that determines which ranks read different samples.
        iteration: the epoch of the first pass.
        **kwargs: the other arguments of torch's `DataLoader`.
    """


class SkipDataLoader(PreparedLoader):
    """A loader that skips its first `skip_batches`. A map-style dataset is not read for them.

    Args:
        dataset: the dataset.
        skip_batches: steps skipped at the start of every pass.
        use_stateful_dataloader: use torchdata's loader.
        **kwargs: the other arguments of torch's `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            **kwargs,
        )


def _last_size(counts: tuple[int, ...], plan: ReadPlan) -> int:
    """The remainder of a last step according to its counts."""
    samples = sum(counts)
    if plan.global_batch is None:
        is_full = 0 not in counts
    else:
        is_full = samples >= plan.global_batch
    if is_full:
        return 0
    return samples

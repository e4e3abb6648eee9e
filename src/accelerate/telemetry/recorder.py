# SPDX-License-Identifier: Apache-2.0
"""`StepRecorder` records the steps of a process, and publishes its newest state.

Beside methods of the accelerator it replaces the class of prepared optimizers and the iterator of a prepared loader.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from time import perf_counter, time
from types import MappingProxyType
from typing import Any

import torch

from ..core.trees import first_leaf
from ..data_loader.steps import ReadPlan, ShardStep
from ..optimizer import AcceleratedOptimizer
from .device_values import scalar
from .meter import StepMeter, length_of, with_items
from .records import FLAG_FIRST, FLAG_SKIPPED
from .status import EVALUATING, STARTING, TRAINING, StatusFile
from .writer import NONE_READ, TelemetryWriter

_NAN = math.nan
# Seconds of a backward from which on the wait at the end of the next one is measured.
_LEAST = 1e-3
# Steps of a process that are recorded one by one. Of later ones that take less than `_SHORT` seconds several share a
# record, the more the shorter they are, and the last of these alone is split into phases: a record costs 30 to 110 us
# of the step, depending on the machine. They are about `_SHARED` at most.
EACH = 1000
_SHORT = 0.01
_SHARED = 100
# Seconds after which steps that share a record have become long.
_LONG = 0.15
# The second of two arguments: a method of C of a mapping without keys.
_second: Callable[[None, ShardStep], ShardStep] = MappingProxyType({}).get  # type: ignore[assignment]
# The length of a tensor by a method of C: the one of `torch.Tensor` is written in Python.
_length: Callable[[torch.Tensor], int] = torch._C.TensorBase.__len__  # type: ignore[attr-defined]


class MeteredOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that notifies the recorder of its run after each step. A copy of it is a plain one.

    While the recorder has no need of that, the optimizer is a plain one too.
    """

    _meter: StepRecorder

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `AcceleratedOptimizer.step`."""
        meter = self._meter
        if not meter.splits:
            result = AcceleratedOptimizer.step(self, closure)
            meter.count_step(self.steps_made)
            return result
        made, begin = self.steps_made, perf_counter()
        result = AcceleratedOptimizer.step(self, closure)
        if self.steps_made != made:
            meter.end_step(self, begin)
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__class__ = AcceleratedOptimizer  # type: ignore[assignment]
        self.__setstate__(state)


class _SampleCounter:
    """How many batches of a pass over a prepared loader are in the samples that were counted.

    Args:
        loader: the loader.
        index: of the shard.
    """

    __slots__ = ("batches", "index", "loader")

    def __init__(self, loader: Any, index: int) -> None:
        self.loader = loader
        self.index = index
        self.batches = 0


class StepRecorder(StepMeter):
    """Records each optimizer step, and publishes the newest state.

    Durations are measured on the host: on a device whose work is queued they show where the host waits. The forward
    reaches from the delivery of a batch to `backward`, less collectives and saves. A pass over a loader in which no
    backward follows its batches is an evaluation, which is in no record.

    A long run of steps shorter than 10 ms has records of several steps (see `EACH`). Steps, samples, tokens,
    collectives, saves and the total time are counted in all of them.

    Args:
        writer: of the records.
        status: see `StepMeter`.
        device: see `StepMeter`.
        share: see `StepMeter`.
        waits: a backward may wait for other processes.

    Attributes:
        splits: the present step is split into phases; it ends with a record.
    """

    optimizer_type: type[AcceleratedOptimizer] = MeteredOptimizer

    __slots__ = (
        "_backward", "_before", "_begin", "_checkpoint", "_communication", "_count", "_counters", "_data", "_ended",
        "_factors", "_flags", "_forward", "_group", "_has_tokens", "_last", "_longest", "_losses", "_mark", "_norm",
        "_notified", "_optimizer", "_owner", "_read_samples", "_read_tokens", "_recorded", "_releases", "_replaced",
        "_rest", "_trains", "_transfer", "_waited", "_waits", "_writer", "splits",
    )  # fmt: skip

    def __init__(
        self,
        writer: TelemetryWriter,
        status: StatusFile | None,
        device: torch.device,
        share: float = 1.0,
        waits: bool = False,
    ) -> None:
        self._writer = writer
        self._waits = waits
        self._flags = FLAG_FIRST
        self._recorded = 0  # steps of the run in records, the present one included
        self._notified = True  # the methods of the accelerator and its optimizers notify this object
        self._owner: Callable[[], Any] = lambda: None  # the accelerator
        self._replaced: dict[str, Callable[..., Any]] = {}  # its methods that each step calls
        self._has_tokens = False  # steps have tokens
        self._rest: list[None] = []
        writer.before_write.append(weakref.WeakMethod(self._end_portion))
        self._trains = False  # a backward has followed the last batch
        self._group = 1  # the steps of a record
        # The number of steps of a record varies, so that what happens in each fourth step, say, is not always or never
        # in the split step.
        random = Random(0).random
        self._factors = itertools.cycle([0.5 + random() for _ in range(61)])
        self._counters: tuple[_SampleCounter, ...] = ()  # of the passes that are open
        self.splits: bool = True
        now = perf_counter()
        self._mark = now  # where the forward began
        self._begin_record(now)
        super().__init__(status, device, share)
        self.folder: Path | None = writer.folder
        self._releases = True
        writer.before_close.append(weakref.WeakMethod(self._finish_record))

    def _begin_record(self, now: float) -> None:
        self._last = self._begin = self._ended = now  # of the last record, of the step that is split, of any step
        self._data = self._transfer = self._forward = self._backward = 0.0
        self._communication = self._optimizer = self._checkpoint = 0.0
        self._waited = 0.0  # in the backward of the step that is split
        self._before = 0.0  # communication and checkpoints of the record before the step that is split
        self._longest = 0.0
        self._count = 0  # steps of the record so far
        self.splits = self._group == 1
        self._read_samples = self._read_tokens = NONE_READ
        self._losses: list[Any] = []
        self._norm: Any = None

    # -- what is replaced

    def add_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        """Take in a prepared optimizer, also one of an engine."""
        super().add_optimizer(optimizer)
        if isinstance(optimizer, MeteredOptimizer):
            optimizer._meter = self
        else:
            known = weakref.ref(optimizer)
            optimizer._after_step.append(lambda: self.end_step(known(), perf_counter()))

    def add_loader(self, loader: Any) -> None:
        """Take in a prepared loader."""
        loader.meter = self

    def wrap(self, name: str, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any] | None:
        """See `StepMeter.wrap`."""
        around = {"backward": self._around_backward, "clip_grad_norm_": self._around_clip}
        if name not in around:
            return self._around_collective(call, owner)
        self._owner = owner
        replaced = self._replaced[name] = around[name](call, owner)
        return replaced

    def _counting_waits(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` of a backward, in which the wait for the reduction of gradients at its end is communication.

        DDP waits in a callback that autograd runs when the gradients are computed. One that is queued before it, as
        the backward begins, knows when that was. It costs about 20 us, so backwards shorter than `_LEAST` are not
        split.
        """
        computed = took = 0.0

        def note() -> None:
            nonlocal computed
            computed = perf_counter()

        def queue(gradient: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(note)

        def backward(accelerator: Any, loss: Any, num_items: Any = None, **kwargs: Any) -> None:
            nonlocal computed, took
            begin = perf_counter()
            if took < _LEAST or type(loss) is not torch.Tensor or not loss.requires_grad:
                call(accelerator, loss, num_items, **kwargs)
                took = perf_counter() - begin
                return
            computed = 0.0
            hook = loss.register_hook(queue)
            try:
                call(accelerator, loss, num_items, **kwargs)
            finally:
                hook.remove()
            end = perf_counter()
            took = end - begin
            if computed:
                waited = end - computed
                self._waited += waited
                self._backward -= waited

        return backward

    def _around_backward(self, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any]:
        call = with_items(call)
        split = self._counting_waits(call) if self._waits else call

        def backward(loss: Any, num_items: Any = None, **kwargs: Any) -> None:
            self._trains = True
            if not self.splits:
                call(owner(), loss, num_items, **kwargs)
                if num_items is not None:
                    self._count_tokens(num_items)
                return
            begin = perf_counter()
            self._forward += begin - self._mark
            split(owner(), loss, num_items, **kwargs)
            self._mark = end = perf_counter()
            self._backward += end - begin
            # With a `gradient` it may have any shape.
            at_hand = type(loss) is torch.Tensor and loss.is_cpu and not kwargs
            self._losses.append(loss.item() if at_hand else scalar(loss))
            if num_items is not None:
                self._count_tokens(num_items)

        return backward

    def _count_tokens(self, num_items: Any) -> None:
        self._has_tokens = True
        self._read_tokens += _number(num_items)

    def _around_clip(self, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any]:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if not self.splits:
                return call(owner(), *args, **kwargs)
            begin = perf_counter()
            norm = call(owner(), *args, **kwargs)
            took = perf_counter() - begin
            self._optimizer += took
            self._mark += took
            if type(norm) is torch.Tensor and norm.numel() == 1:
                # A tensor that is kept until the writer's thread reads it splits the memory that gradients are freed
                # to, so that the next step's take pages of their own: 4 % of a step of 2 ms.
                self._norm = norm.item() if norm.is_cpu else norm
            return norm

        return clip_grad_norm_

    def _around_collective(self, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter()
            result = call(owner(), *args, **kwargs)
            took = perf_counter() - begin
            self._communication += took
            self._mark += took
            return result

        return collective

    # -- the loader

    def timed_source(self, steps: Iterator[ShardStep]) -> Iterator[ShardStep]:
        """The steps of a loader before they are copied to the device: the copy's time is not theirs."""
        begin = perf_counter()
        for step in steps:
            if self.splits:
                took = perf_counter() - begin
                self._data += took
                self._transfer -= took
            yield step
            begin = perf_counter()

    def timed(self, loader: Any, plan: ReadPlan, steps: Iterator[ShardStep], copied: bool) -> Iterator[ShardStep]:
        """The steps of a pass over a prepared loader, as it yields them. `copied`: they come from `timed_source`."""
        return itertools.chain.from_iterable(self._portions(loader, plan, steps, copied))

    def _portions(
        self, loader: Any, plan: ReadPlan, steps: Iterator[ShardStep], copied: bool
    ) -> Iterator[Iterable[ShardStep]]:
        """The steps of a pass: each by itself, or many in a portion that runs no code of this class between them."""
        self._notify()
        self.take_samples()
        before, begin = self._snapshot(), perf_counter()
        if self._flags & FLAG_FIRST:
            self._last = self._begin = self._ended = self._mark = begin
        began, trained, evaluates, singly = time(), False, False, False
        self._loader, self._batches, self._epoch = weakref.ref(loader), length_of(loader), loader.iteration
        counter = _SampleCounter(loader, plan.cut.index)
        self._counters = (*self._counters, counter)
        try:
            requested = begin
            for step in steps:
                if self.splits:
                    self._mark = now = perf_counter()
                    if copied:
                        self._transfer += now - requested
                    else:
                        self._data += now - requested
                portion: Iterable[ShardStep] = (step,)
                number = 0
                if not trained:
                    self._trains = False
                elif not (self.splits or singly):
                    # All but the last two: where one of these ends, the split step begins.
                    number = self._group - self._count - 2
                    if number > 1:
                        # As many as there are elements in a list, which `_end_portion` may empty.
                        self._rest = [None] * (number - 1)
                        portion = itertools.chain(portion, map(_second, self._rest, steps))
                recorded = self._recorded
                if number > 0:
                    self._leave()
                yield portion if step.counts is not None else self._sized(portion)
                if number > 0:
                    self._notify()
                    # Where the loop makes several steps of a batch, the one to split may have been among them.
                    singly = self._recorded - recorded > number
                requested = perf_counter()
                if trained:
                    continue
                if self._recorded != recorded or self._trains:
                    trained = True
                elif not evaluates:
                    evaluates = True
                    self._begin_evaluation(began)
        finally:
            self._notify()
            self.take_samples()
            self._counters = tuple(one for one in self._counters if one is not counter)
            if evaluates and not trained:
                self._end_evaluation(before, perf_counter() - begin)

    def _sized(self, steps: Iterable[ShardStep]) -> Iterator[ShardStep]:
        """`steps` of a loader that does not know how many samples they have."""
        kind = key = None
        for step in steps:
            data = step.data
            if type(data) is not kind:
                kind, key = type(data), _first_key(data)
            try:
                self._read_samples += _batch_size(data) if key is None else _length(data[key])
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
                self._read_samples += _batch_size(data)
            yield step

    def _end_portion(self) -> None:
        """Called by the thread of the writer: the portion of an iterator ends if its steps have become long."""
        if not self._notified and perf_counter() - self._ended > _LONG:
            self._rest.clear()

    def _leave(self) -> None:
        """Have the next steps made without a notice to this object."""
        self._notified = False
        for one in self._optimizers:
            optimizer = one()
            if type(optimizer) is MeteredOptimizer:
                optimizer.__class__ = AcceleratedOptimizer  # type: ignore[assignment]
        owner = self._owner()
        methods = {} if owner is None else owner.__dict__
        for name, replaced in self._replaced.items():
            # Only the backward counts tokens. A script may have replaced a method too.
            if methods.get(name) is replaced and not (self._has_tokens and name == "backward"):
                del methods[name]

    def _notify(self) -> None:
        """Have each step notify this object again, and count those since `_leave`."""
        if self._notified:
            return
        self._notified = True
        for one in self._optimizers:
            optimizer = one()
            if type(optimizer) is AcceleratedOptimizer:
                optimizer.__class__ = MeteredOptimizer
        owner = self._owner()
        methods = {} if owner is None else owner.__dict__
        for name, replaced in self._replaced.items():
            methods.setdefault(name, replaced)
        steps = self._steps_made() - self._recorded
        if steps > 0:
            now = perf_counter()
            took = (now - self._ended) / steps
            self._longest = max(self._longest, took)
            if took > _SHORT:
                self._group = 0  # the record ends as soon as possible
            self._recorded += steps
            self._count += steps
            self._ended = now

    def take_samples(self) -> None:
        """Take in the samples of the batches that were read since the last call, before their number changes."""
        for counter in self._counters:
            loader = counter.loader
            batches, counts = loader.batches_read, loader.batch_counts
            if counts is not None:
                self._read_samples += (batches - counter.batches) * counts[counter.index]
            counter.batches = batches

    def _snapshot(self) -> tuple[Any, ...]:
        return (
            self._data, self._transfer, self._communication, self._read_samples,
            self._epoch, self._loader, self._batches,
        )  # fmt: skip

    def _begin_evaluation(self, began: float) -> None:
        self._enter(EVALUATING)
        self._writer.event("evaluation_begin", step=self._recorded, time=began)

    def _end_evaluation(self, before: tuple[Any, ...], seconds: float) -> None:
        """Remove an evaluation from the step in which it was made."""
        self._writer.event("evaluation_end", step=self._recorded)
        (
            self._data, self._transfer, self._communication, self._read_samples,
            self._epoch, self._loader, self._batches,
        ) = before  # fmt: skip
        self._last += seconds
        self._begin += seconds
        self._ended += seconds
        self._mark = perf_counter()
        self._enter(TRAINING if self._recorded else STARTING)

    # -- called in the run

    def count_step(self, made: int) -> None:
        """A prepared optimizer, which has made so many steps by now, is called in a step that is not split."""
        step = made + self._base
        if step <= self._recorded:
            return  # in an accumulation window, or another optimizer of the same step
        self._recorded = step
        now = perf_counter()
        took, self._ended = now - self._ended, now
        if took > self._longest:
            self._longest = took
        self._count = count = self._count + 1
        if (count + 1 >= self._group or took > _SHORT) and self._notified:
            self.splits = True
            self._begin = self._mark = now
            self._before = self._communication + self._checkpoint

    def end_step(self, optimizer: Any, begin: float) -> None:
        """A prepared optimizer has stepped; its step began at `begin`."""
        self._mark = now = perf_counter()
        self._optimizer += now - begin
        step = optimizer.steps_made + self._base
        if step <= self._recorded:
            return  # another optimizer of the same step
        self._recorded = step
        self.take_samples()
        flags = self._flags
        if flags:
            self._flags = 0
        # Only a gradient scaler skips steps, ours or that of an engine.
        may_skip = optimizer.scaler is not None or type(optimizer) is not MeteredOptimizer
        if may_skip and optimizer.step_was_skipped:
            flags |= FLAG_SKIPPED
        losses, late = self._losses, self._norm
        loss: Any = losses[0] if len(losses) == 1 else _mean(losses)
        if self._late is not None or type(loss) is not float:
            loss, late = self._copied(loss, late)
        rate = optimizer.optimizer.param_groups[0]["lr"]
        self._append(now, flags, loss, rate if type(rate) is float else _number(rate), late)
        self._group = 1
        if optimizer.steps_made > EACH and not may_skip:
            ratio = _SHORT / ((now - self._begin) or _SHORT)
            usual = ratio * ratio
            self._group = round((usual if usual < _SHARED else _SHARED) * next(self._factors)) or 1
        self._begin_record(now)

    def _append(self, now: float, flags: int, loss: float, rate: float, late: Any, split: bool = True) -> None:
        """Append a record of the steps since the last one, the last of which is split into phases."""
        steps = self._count + split
        seconds = (now - self._last) / steps
        scale = 1.0 if split else _NAN
        if split and steps > 1:
            # The other steps are taken to be like the split step, but for collectives and saves.
            apart = self._communication + self._checkpoint
            rest = now - self._begin - (apart - self._before)
            scale = (seconds - apart / steps) / rest if rest > 0 else _NAN
        self._writer.append(
            (
                now,
                self._recorded,
                steps,
                self._epoch,
                flags,
                seconds,
                self._data * scale,
                self._transfer * scale,
                self._forward * scale,
                self._backward * scale,
                self._communication / steps + (self._waited * scale if split else 0.0),
                self._optimizer * scale,
                self._checkpoint / steps,
                max(self._longest, now - self._ended) if steps > 1 else seconds,
                self._read_samples,
                self._read_tokens,
                loss,
                rate,
                late,
            )
        )

    def _finish_record(self) -> None:
        """Append the steps that are in no record yet, and begin one of a single step."""
        self._notify()
        self.take_samples()
        if self._count:
            self._append(self._ended, 0, _NAN, _NAN, None, split=False)
        self._group = 1
        self._mark = now = perf_counter()
        self._begin_record(now)

    def _copied(self, loss: Any, norm: Any) -> tuple[float, Any]:
        """The loss; the norm, or a function that returns loss and norm later where one is on a device."""
        if self._late is None:
            return _NAN if loss is None or isinstance(loss, torch.Tensor) else loss, norm
        loss, norm = (_NAN if value is None else value for value in (loss, None if norm is None else scalar(norm)))
        if not isinstance(loss, torch.Tensor) and not isinstance(norm, torch.Tensor):
            return loss, norm
        return _NAN, self._late.copy((loss, norm))

    def _look(self) -> int:
        writer, new = self._writer, self._new_steps()
        self._loss, self._memory = writer.loss, writer.memory[0]
        self._samples, self._tokens = writer.samples * self._share, writer.tokens * self._share
        return new

    def saved(self, path: str, step: int, seconds: float) -> None:
        """A checkpoint was saved, or is being written in the background, for which the loop waited `seconds`."""
        self._checkpoint += seconds
        self._mark += seconds
        self._writer.event("save", path=path, step=step, seconds=round(seconds, 6))
        super().saved(path, step, seconds)

    def before_load(self) -> None:
        """A checkpoint was loaded: what the optimizers have counted so far is about to be reset."""
        self._finish_record()
        super().before_load()

    def resumed(self, path: str, step: int, seconds: float) -> None:
        """The run continues after `step` optimizer steps."""
        self._writer.event("resume", path=path, step=step, seconds=round(seconds, 6))
        self._recorded = step
        super().resumed(path, step, seconds)

    def reset(self) -> None:
        """The prepared objects are released: others count from the start."""
        self._finish_record()
        super().reset()
        self._recorded = self.step

    def event(self, name: str, **fields: Any) -> None:
        """Record an event."""
        self._writer.event(name, **fields)

    def close(self) -> None:
        """The run has ended: write everything."""
        self._release_writer()
        super().close()

    def __del__(self) -> None:
        # Not a finalizer: the steps that are in no record yet are in this object. At exit the writer requests them.
        if hasattr(self, "_releases"):
            self._release_writer()

    def _release_writer(self) -> None:
        if self._releases and not self._writer.closed:
            self._releases = False
            self._finish_record()
            self._writer.release()


def _mean(losses: list[Any]) -> Any:
    """The mean of the losses of a step; None where one is not known."""
    if not losses or any(loss is None for loss in losses):
        return None
    if all(type(loss) is float for loss in losses):
        return sum(losses) / len(losses)
    tensors = [loss.reshape(()).float() for loss in losses if isinstance(loss, torch.Tensor)]
    return torch.stack(tensors).mean() if len(tensors) == len(losses) else None


def _number(value: Any) -> float:
    """A number that the host knows; NaN for one on a device."""
    found = scalar(value)
    return found if isinstance(found, float) else _NAN


def _first_key(data: Any) -> Any:
    """The key or index of the first tensor of a batch; None where that is not its first element."""
    if not isinstance(data, tuple | list | Mapping) or not data:
        return None
    key: Any = next(iter(data)) if isinstance(data, Mapping) else 0
    return key if isinstance(data[key], torch.Tensor) else None


def _batch_size(data: Any) -> float:
    first = first_leaf(data)
    try:
        # Not its shape, which not all nested tensors have.
        return _NAN if first is None else float(_length(first))
    except (TypeError, RuntimeError):
        return _NAN

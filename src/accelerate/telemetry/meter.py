# SPDX-License-Identifier: Apache-2.0
"""What a process measures of its steps: `StepMeter` publishes the newest state, `StepRecorder` records each step too.

Both are chosen when the `Accelerator` is made. They replace methods of the accelerator, the class of prepared
optimizers and the iterator of a prepared loader, so that a run without them has nothing in its steps. The model's
kernels leave little of this code in the caches, so that each line of it costs several times what it costs in a loop
of its own: what a step does not have to do is done by a thread, from what the run counts anyway.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from time import perf_counter, time
from typing import Any

import torch

from ..core import devices
from ..core.trees import find_batch_size
from ..data_loader.steps import ReadPlan, ShardStep
from ..optimizer import AcceleratedOptimizer
from ..state import GradientState
from .device_values import device_values, scalar
from .records import FLAG_FIRST, FLAG_SKIPPED
from .status import EVALUATING, SAVING, STARTING, TRAINING, StatusFile
from .writer import NONE_READ, TelemetryWriter

_NAN = math.nan
# Seconds between two looks at a run for its launcher.
_INTERVAL = 0.25
# Seconds of a backward from which on the wait at the end of the next one is measured.
_LEAST = 1e-3
# Steps of a process that are recorded one by one. Of later ones that take less than `_SHORT` seconds several share a
# record, the more the shorter they are, and the last of these alone is split into phases: that would cost a twelfth of
# a step of 130 us. They are about `_SHARED` at most.
EACH = 1000
_SHORT = 0.0033
_SHARED = 40
# The methods of an accelerator that a meter may replace.
METHODS = (
    "backward", "clip_grad_norm_", "gather", "gather_for_metrics", "reduce", "pad_across_processes",
    "wait_for_everyone",
)  # fmt: skip


def _with_items(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a backward, with the argument `num_items`, which the method of a subclass may not have."""
    if "num_items" in inspect.signature(call).parameters:
        return call

    def backward(accelerator: Any, loss: Any, num_items: Any = None, **kwargs: Any) -> None:
        call(accelerator, loss, **(kwargs if num_items is None else {**kwargs, "num_items": num_items}))

    return backward


class StepMeter:
    """Publishes the newest state of this rank to its launcher, from a thread that looks at it every 0.25 seconds.

    Args:
        status: the file; None publishes nothing.
        device: of the run.
        share: this process's fraction of what its samples contribute to the sum over all processes: less than 1 where
            several read the same samples.

    Attributes:
        step: the optimizer steps of the run at the last look, of the optimizer that has made most.
        folder: of the run, if it is recorded.
    """

    optimizer_type: type[AcceleratedOptimizer] = AcceleratedOptimizer

    __slots__ = (
        "__weakref__", "_base", "_batches", "_device", "_epoch", "_late", "_loader", "_lock", "_loss", "_memory",
        "_optimizers", "_pending", "_samples", "_share", "_state", "_step_samples", "_stop", "_tokens", "_trained",
        "_wants_loss", "folder", "status", "step",
    )  # fmt: skip

    def __init__(self, status: StatusFile | None, device: torch.device, share: float = 1.0) -> None:
        self.status: StatusFile | None = status
        self.folder: Path | None = None
        self.step: int = 0
        self._base = 0  # steps before the checkpoint that was loaded
        self._optimizers: tuple[weakref.ref[AcceleratedOptimizer], ...] = ()
        self._epoch = 0
        self._batches = 0
        self._samples = self._tokens = _NAN
        self._step_samples = _NAN
        self._loss = self._memory = _NAN
        self._wants_loss = status is not None
        self._share = share
        self._device = device
        self._late = device_values(device)
        self._pending: Callable[[bool], tuple[float, ...] | None] | None = None
        self._loader: Callable[[], Any] = _none
        self._trained: Callable[[], Any] = _none
        self._state = STARTING
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._publish(STARTING)
        if status is not None:
            watched = (weakref.ref(self), self._stop)
            threading.Thread(target=_look_regularly, args=watched, name="accelerate-status", daemon=True).start()

    # -- what is replaced

    def add_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        """Take in a prepared optimizer, also one of an engine."""
        self._optimizers = (*self._optimizers, weakref.ref(optimizer))

    def add_loader(self, loader: Any) -> None:
        """Take in a prepared loader."""
        loader.before_pass = (*loader.before_pass, self.begin_pass)

    def wrap(self, name: str, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any] | None:
        """What replaces a method of the accelerator; None leaves it as it is.

        Args:
            name: of the method, one of `METHODS`.
            call: the function of the class.
            owner: a weak reference to the accelerator.
        """
        return self._around_backward(call, owner) if name == "backward" else None

    def _around_backward(self, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any]:
        call = _with_items(call)

        def backward(loss: Any, num_items: Any = None, **kwargs: Any) -> None:
            call(owner(), loss, num_items, **kwargs)
            if num_items is not None and type(num_items) is not torch.Tensor:
                tokens = self._tokens
                self._tokens = num_items * self._share + (tokens if tokens == tokens else 0.0)
            if self._wants_loss:
                self._wants_loss = False
                self._read_loss(loss)

        return backward

    def _read_loss(self, loss: Any) -> None:
        """Read a loss, and the memory; those of a device when they are here."""
        value = scalar(loss)
        if isinstance(value, float):
            self._loss = value
        elif value is not None and self._late is not None:
            found = None if self._pending is None else self._pending(False)
            if found is not None:
                self._loss = found[0]
            if found is not None or self._pending is None:
                self._pending = self._late.copy((value, _NAN))
            self._memory = device_memory(self._device)

    # -- called in the run

    def begin_pass(self, loader: Any) -> None:
        """A pass over a prepared loader begins."""
        with self._lock:
            self._look()
            origin = getattr(loader, "origin", loader)
            self._loader, self._batches = weakref.ref(loader), length_of(loader)
            if self._trained() in (None, origin):
                self._epoch = loader.iteration
                plan = loader.plan()
                size = plan.global_batch
                steps = GradientState().num_steps
                self._step_samples = _NAN if size is None else size / plan.cut.shards * steps * self._share
            else:
                self._publish(EVALUATING)

    def look(self) -> None:
        """Publish the steps that were made since the last look."""
        with self._lock:
            if self._look() or self._state == TRAINING:
                self._publish(TRAINING)
        self._wants_loss = True

    def _look(self) -> int:
        """Take in the steps since the last look. Returns how many there are."""
        made = [found.steps_made for one in self._optimizers if (found := one()) is not None]
        new = self._base + max(made, default=0) - self.step
        if new <= 0:
            return 0
        self.step += new
        samples = self._samples
        self._samples = new * self._step_samples + (samples if samples == samples else 0.0)
        loader = self._loader()
        if loader is not None and self._trained is _none:
            self._trained = weakref.ref(getattr(loader, "origin", loader))
        return new

    def _publish(self, state: int) -> None:
        self._state = state
        if self.status is not None:
            loader = self._loader()
            self.status.write(
                state,
                self.step,
                time(),
                self._epoch,
                0 if loader is None else loader.batches_read,
                self._batches,
                self._loss,
                self._samples,
                self._tokens,
                self._memory,
            )

    def _enter(self, state: int) -> None:
        """Publish a state that begins now."""
        with self._lock:
            self._look()
            self._publish(state)

    def begin_save(self) -> None:
        """The state of the run is about to be saved."""
        self._enter(SAVING)

    def saved(self, path: str, step: int, seconds: float) -> None:
        """A checkpoint was saved, or is being written in the background, for which the loop waited `seconds`."""
        self._enter(TRAINING)
        if self.status is not None:
            self.status.write_checkpoint(path, time())

    def resumed(self, path: str, step: int, seconds: float) -> None:
        """The run continues after `step` optimizer steps."""
        with self._lock:
            self._base = self.step = step
            self._publish(TRAINING if step else STARTING)

    def reset(self) -> None:
        """The prepared objects are released: others count from the start."""
        with self._lock:
            self.step = self._base
            self._optimizers = ()
            self._loader = self._trained = _none

    def event(self, name: str, **fields: Any) -> None:
        """Record an event."""

    def close(self) -> None:
        """The run has ended."""
        self._stop.set()
        self.look()


def _look_regularly(meter: Callable[[], StepMeter | None], stop: threading.Event) -> None:
    while not stop.wait(_INTERVAL):
        found = meter()
        if found is None:
            return
        found.look()
        del found


class MeteredOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that notifies the recorder of its run after each step. A copy of it is a plain one."""

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

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept.pop("_meter", None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__class__ = AcceleratedOptimizer  # type: ignore[assignment]
        super().__setstate__(state)


class _SampleCounter:
    """Counts the samples of a pass over a prepared loader, where it knows those of each batch.

    Args:
        loader: the loader.
        index: of the shard.
    """

    __slots__ = ("_batches", "_index", "_loader")

    def __init__(self, loader: Any, index: int) -> None:
        self._loader = loader
        self._index = index
        self._batches = 0

    def samples(self) -> int:
        """The samples in the batches since the last call, which all have the present `batch_counts`."""
        batches, loader = self._batches, self._loader
        self._batches = loader.batches_read
        counts = loader.batch_counts
        return 0 if counts is None else (loader.batches_read - batches) * counts[self._index]


class StepRecorder(StepMeter):
    """Records each optimizer step, and publishes the newest state.

    Durations are measured on the host: on a device whose work is queued they show where the host waits. The forward
    reaches from the delivery of a batch to `backward`, less collectives and saves. A pass over a loader in which no
    backward follows its batches is an evaluation, which is in no record.

    A long run of steps shorter than 3 ms has records of several steps (see `EACH`). Steps, samples, tokens,
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
        "_flags", "_forward", "_group", "_last", "_longest", "_losses", "_mark", "_norm", "_optimizer", "_random",
        "_read_samples", "_read_tokens", "_release", "_seen", "_trains", "_transfer", "_waited", "_waits",
        "_writer", "splits",
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
        self._seen = 0  # the step of the last look
        self._trains = False  # a backward has followed the last batch
        self._group = 1  # the steps of a record
        self._random = Random(0).random
        self._counters: tuple[_SampleCounter, ...] = ()  # of the passes that are open
        self.splits: bool = True
        self.step: int = 0
        now = perf_counter()
        self._mark = now  # where the forward began
        self._begin_record(now)
        super().__init__(status, device, share)
        self.folder: Path | None = writer.folder
        self._release = weakref.finalize(self, writer.release)

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
        return around.get(name, self._around_collective)(call, owner)

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
        call = _with_items(call)
        split = self._counting_waits(call) if self._waits else call

        def backward(loss: Any, num_items: Any = None, **kwargs: Any) -> None:
            self._trains = True
            if not self.splits:
                call(owner(), loss, num_items, **kwargs)
                if num_items is not None:
                    self._read_tokens += _number(num_items)
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
                self._read_tokens += _number(num_items)

        return backward

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
                if step.counts is None:
                    self._read_samples += _batch_size(step.data)
                step_before = self.step
                if not trained:
                    self._trains = False
                yield (step,)
                if trained and not (self.splits or singly):
                    # The next one to split is not among them, unless the loop makes several steps of a batch.
                    number = max(0, self._group - self._count - 1)
                    rest = itertools.islice(steps, number)
                    yield rest if step.counts is not None else self._sized(rest)
                    singly = self.step - step_before > number + 1
                requested = perf_counter()
                if trained:
                    continue
                if self.step != step_before or self._trains:
                    trained = True
                elif not evaluates:
                    evaluates = True
                    self._begin_evaluation(began)
        finally:
            self.take_samples()
            self._counters = tuple(one for one in self._counters if one is not counter)
            if evaluates and not trained:
                self._end_evaluation(before, perf_counter() - begin)

    def _sized(self, steps: Iterator[ShardStep]) -> Iterator[ShardStep]:
        """`steps` of a loader that does not know how many samples they have."""
        for step in steps:
            self._read_samples += _batch_size(step.data)
            yield step

    def take_samples(self) -> None:
        """Take in the samples of the batches that were read since the last call, before their number changes."""
        for counter in self._counters:
            self._read_samples += counter.samples()

    def _snapshot(self) -> tuple[Any, ...]:
        return (
            self._data, self._transfer, self._communication, self._read_samples,
            self._epoch, self._loader, self._batches,
        )  # fmt: skip

    def _begin_evaluation(self, began: float) -> None:
        self._enter(EVALUATING)
        self._writer.event("evaluation_begin", step=self.step, time=began)

    def _end_evaluation(self, before: tuple[Any, ...], seconds: float) -> None:
        """Remove an evaluation from the step in which it was made."""
        self._writer.event("evaluation_end", step=self.step)
        (
            self._data, self._transfer, self._communication, self._read_samples,
            self._epoch, self._loader, self._batches,
        ) = before  # fmt: skip
        self._last += seconds
        self._begin += seconds
        self._ended += seconds
        self._mark = perf_counter()
        self._enter(TRAINING if self.step else STARTING)

    # -- called in the run

    def count_step(self, made: int) -> None:
        """A prepared optimizer, which has made so many steps by now, is called in a step that is not split."""
        step = made + self._base
        if step <= self.step:
            return  # in an accumulation window, or another optimizer of the same step
        self.step = step
        now = perf_counter()
        took, self._ended = now - self._ended, now
        if took > self._longest:
            self._longest = took
        self._count = count = self._count + 1
        if count + 1 >= self._group or took > _SHORT:
            self.splits = True
            self._begin = self._mark = now
            self._before = self._communication + self._checkpoint

    def end_step(self, optimizer: Any, begin: float) -> None:
        """A prepared optimizer has stepped; its step began at `begin`."""
        self._mark = now = perf_counter()
        self._optimizer += now - begin
        step = optimizer.steps_made + self._base
        if step <= self.step:
            return  # another optimizer of the same step
        self.step = step
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
            # Of no fixed number, so that what happens in each fourth step, say, is not always or never seen.
            usual = min(_SHARED, (_SHORT / max(now - self._begin, 1e-6)) ** 2)
            self._group = max(1, int(usual * (0.5 + self._random())))
        self._begin_record(now)

    def _append(self, now: float, flags: int, loss: float, rate: float, late: Any, split: bool = True) -> None:
        """Append a record of the steps since the last one, the last of which is split into phases."""
        steps = self._count + split
        seconds = (now - self._last) / steps
        scale = 1.0 if split else _NAN
        if split and steps > 1:
            # The other steps are taken to be like the one that was split, but for collectives and saves.
            apart = self._communication + self._checkpoint
            rest = now - self._begin - (apart - self._before)
            scale = (seconds - apart / steps) / rest if rest > 0 else _NAN
        self._writer.append(
            (
                now,
                self.step,
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
        writer, new = self._writer, self.step - self._seen
        self._seen = self.step
        self._loss, self._memory = writer.loss, writer.memory[0]
        self._samples, self._tokens = writer.samples * self._share, writer.tokens * self._share
        return new

    def saved(self, path: str, step: int, seconds: float) -> None:
        """A checkpoint was saved, or is being written in the background, for which the loop waited `seconds`."""
        self._checkpoint += seconds
        self._mark += seconds
        self._writer.event("save", path=path, step=step, seconds=round(seconds, 6))
        super().saved(path, step, seconds)

    def resumed(self, path: str, step: int, seconds: float) -> None:
        """The run continues after `step` optimizer steps."""
        self._writer.event("resume", path=path, step=step, seconds=round(seconds, 6))
        self._finish_record()
        super().resumed(path, step, seconds)

    def reset(self) -> None:
        """The prepared objects are released: others count from the start."""
        self._finish_record()
        super().reset()

    def event(self, name: str, **fields: Any) -> None:
        """Record an event."""
        self._writer.event(name, **fields)

    def close(self) -> None:
        """The run has ended: write everything."""
        self._finish_record()
        self._release()
        super().close()


def device_memory(device: torch.device) -> float:
    """Most bytes that were allocated on a device so far; NaN where that is not known."""
    module = devices.module_of(device)
    known = getattr(module, "max_memory_allocated", None)
    return _NAN if device.type == "cpu" or known is None else float(known(device))


def memory_reader(device: torch.device) -> Callable[[], float] | None:
    """A function that returns `device_memory`; None for the CPU."""
    return None if device.type == "cpu" else functools.partial(device_memory, device)


def length_of(loader: Any) -> int:
    """The batches of a pass; 0 where that is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return 0


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


def _batch_size(data: Any) -> float:
    # The usual case without a walk over the batch.
    first = data[0] if type(data) in (tuple, list) and data else data
    if type(first) is torch.Tensor and first.shape:
        return first.shape[0]
    try:
        found = find_batch_size(data)
    except (TypeError, ValueError, IndexError):
        return _NAN
    return _NAN if found is None else float(found)


def _none() -> None:
    return None

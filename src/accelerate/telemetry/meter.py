# SPDX-License-Identifier: Apache-2.0
"""What a process measures of its steps: `StepMeter` publishes the newest state, `StepRecorder` records each step too.

Both are chosen when the `Accelerator` is made. They replace methods of the accelerator, the class of prepared
optimizers and the iterator of a prepared loader, so that a run without them has nothing in its steps.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
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
from .writer import TelemetryWriter

_NAN = math.nan
# Seconds between two losses that are published.
_LOSS_INTERVAL = 0.25
# The methods of an accelerator that a meter may replace.
METHODS = (
    "backward", "clip_grad_norm_", "gather", "gather_for_metrics", "reduce", "pad_across_processes",
    "wait_for_everyone",
)  # fmt: skip


class MeteredOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that notifies the meter of its run after each step. A copy of it is a plain one."""

    _meter: StepMeter

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `AcceleratedOptimizer.step`."""
        if not self.gradient_state.sync_gradients:
            return None
        begin = perf_counter()
        result = AcceleratedOptimizer.step(self, closure)
        self._meter.end_step(self, begin)
        return result

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept.pop("_meter", None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__class__ = AcceleratedOptimizer  # type: ignore[assignment]
        super().__setstate__(state)


class StepMeter:
    """Publishes the newest state of this rank to its launcher.

    Args:
        status: the file; None publishes nothing.
        device: of the run.
        share: this process's fraction of what its samples contribute to the sum over all processes: less than 1 where
            several read the same samples.

    Attributes:
        step: the optimizer steps of the run, of the optimizer that has made most.
        folder: of the run, if it is recorded.
    """

    __slots__ = (
        "__weakref__", "_base", "_batches", "_device", "_epoch", "_late", "_loader", "_look_at", "_loss", "_memory",
        "_pending", "_samples", "_share", "_step_samples", "_tokens", "_trained", "folder", "status", "step",
    )  # fmt: skip

    def __init__(self, status: StatusFile | None, device: torch.device, share: float = 1.0) -> None:
        self.status: StatusFile | None = status
        self.folder: Path | None = None
        self.step: int = 0
        self._base = 0  # steps before the checkpoint that was loaded
        self._epoch = 0
        self._batches = 0
        self._samples = self._tokens = _NAN
        self._step_samples = _NAN
        self._loss = self._memory = _NAN
        self._look_at = -math.inf  # when the next loss is read
        self._share = share
        self._device = device
        self._late = device_values(device)
        self._pending: Callable[[bool], tuple[float, ...] | None] | None = None
        self._loader: Callable[[], Any] = _none
        self._trained: Callable[[], Any] = _none
        self._publish(STARTING)

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
        def backward(loss: Any, num_items: Any = None, **kwargs: Any) -> None:
            call(owner(), loss, num_items, **kwargs)
            if num_items is not None and type(num_items) is not torch.Tensor:
                tokens = self._tokens
                self._tokens = num_items * self._share + (tokens if tokens == tokens else 0.0)
            if self._look_at < perf_counter():
                self._look(loss)

        return backward

    def _look(self, loss: Any) -> None:
        """Read a loss, and the memory; those of a device when they are here."""
        self._look_at = perf_counter() + _LOSS_INTERVAL
        value = scalar(loss)
        if isinstance(value, float):
            self._loss = value
        elif value is not None and self._late is not None:
            found = None if self._pending is None else self._pending(False)
            if found is not None:
                self._loss = found[1]
            if found is not None or self._pending is None:
                self._pending = self._late.copy((_NAN, value, _NAN))
            self._memory = device_memory(self._device)

    # -- called in the run

    def begin_pass(self, loader: Any) -> None:
        """A pass over a prepared loader begins."""
        self._loader = weakref.ref(loader)
        self._batches = length_of(loader)
        origin = getattr(loader, "origin", loader)
        if self._trained() not in (None, origin):
            self._publish(EVALUATING)
            return
        self._epoch = loader.iteration
        plan = loader.plan()
        size = plan.global_batch
        steps = GradientState().num_steps
        self._step_samples = _NAN if size is None else size / plan.cut.shards * steps * self._share

    def end_step(self, optimizer: Any, begin: float) -> None:
        """A prepared optimizer has stepped; its step began at `begin`."""
        step = optimizer.steps_made + self._base
        if step > self.step:
            self.step = step
            self._count_step()
            self._publish(TRAINING)

    def _count_step(self) -> None:
        loader = self._loader()
        samples = self._samples
        self._samples = self._step_samples + (samples if samples == samples else 0.0)
        if loader is not None and self._trained is _none:
            self._trained = weakref.ref(getattr(loader, "origin", loader))

    def _publish(self, state: int) -> None:
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

    def begin_save(self) -> None:
        """The state of the run is about to be saved."""
        self._publish(SAVING)

    def saved(self, path: str, step: int, seconds: float) -> None:
        """A checkpoint was saved, or is being written in the background, for which the loop waited `seconds`."""
        self._publish(TRAINING)
        if self.status is not None:
            self.status.write_checkpoint(path, time())

    def resumed(self, path: str, step: int, seconds: float) -> None:
        """The run continues after `step` optimizer steps."""
        self._base = self.step = step
        self._publish(TRAINING if step else STARTING)

    def reset(self) -> None:
        """The prepared objects are released: others count from the start."""
        self.step = self._base
        self._loader = self._trained = _none

    def event(self, name: str, **fields: Any) -> None:
        """Record an event."""

    def close(self) -> None:
        """The run has ended."""


class StepRecorder(StepMeter):
    """Records each optimizer step, and publishes the newest state.

    Durations are measured on the host: on a device whose work is queued they show where the host waits. The forward
    reaches from the delivery of a batch to `backward`, less collectives and saves. A pass over a loader in which no
    backward follows its batches is an evaluation, which is in no record.
    """

    __slots__ = (
        "_backward", "_backwards", "_checkpoint", "_communication", "_data", "_flags", "_forward", "_last", "_losses",
        "_mark", "_norm", "_optimizer", "_read_samples", "_read_tokens", "_release", "_transfer", "_writer",
    )  # fmt: skip

    def __init__(
        self, writer: TelemetryWriter, status: StatusFile | None, device: torch.device, share: float = 1.0
    ) -> None:
        self._writer = writer
        self._flags = FLAG_FIRST
        self._backwards = 0
        now = perf_counter()
        self._last = now  # end of the last step
        self._mark = now  # where the forward began
        self._clear()
        super().__init__(status, device, share)
        self.folder: Path | None = writer.folder
        self._release = weakref.finalize(self, writer.release)

    def _clear(self) -> None:
        self._data = self._transfer = self._forward = self._backward = 0.0
        self._communication = self._optimizer = self._checkpoint = 0.0
        self._read_samples = self._read_tokens = _NAN
        self._losses: list[Any] = []
        self._norm: Any = _NAN

    # -- what is replaced

    def add_loader(self, loader: Any) -> None:
        """Take in a prepared loader."""
        loader.meter = self

    def wrap(self, name: str, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any] | None:
        """See `StepMeter.wrap`."""
        around = {"backward": self._around_backward, "clip_grad_norm_": self._around_clip}
        return around.get(name, self._around_collective)(call, owner)

    def _around_backward(self, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any]:
        def backward(loss: Any, num_items: Any = None, **kwargs: Any) -> None:
            begin = perf_counter()
            self._forward += begin - self._mark
            call(owner(), loss, num_items, **kwargs)
            self._mark = end = perf_counter()
            self._backward += end - begin
            self._backwards += 1
            self._losses.append(loss.item() if type(loss) is torch.Tensor and loss.is_cpu else scalar(loss))
            if num_items is not None:
                tokens = self._read_tokens
                self._read_tokens = _number(num_items) + (tokens if tokens == tokens else 0.0)

        return backward

    def _around_clip(self, call: Callable[..., Any], owner: Callable[[], Any]) -> Callable[..., Any]:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter()
            norm = call(owner(), *args, **kwargs)
            took = perf_counter() - begin
            self._optimizer += took
            self._mark += took
            if type(norm) is torch.Tensor:
                self._norm = norm  # the writer reads one on the host
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
            took = perf_counter() - begin
            self._data += took
            self._transfer -= took
            yield step
            begin = perf_counter()

    def timed(self, loader: Any, plan: ReadPlan, steps: Iterator[ShardStep], copied: bool) -> Iterator[ShardStep]:
        """The steps of a pass over a prepared loader, as it yields them. `copied`: they come from `timed_source`."""
        before, begin = self._snapshot(), perf_counter()
        if self._flags & FLAG_FIRST:
            self._last = self._mark = begin
        began, trained, evaluates, delivered = time(), False, False, 0
        self._loader, self._batches, self._epoch = weakref.ref(loader), length_of(loader), loader.iteration
        index = plan.cut.index
        complete = False
        try:
            requested = begin
            for step in steps:
                self._mark = now = perf_counter()
                if copied:
                    self._transfer += now - requested
                else:
                    self._data += now - requested
                counts = step.counts
                number = counts[index] if counts is not None else _batch_size(step.data)
                samples = self._read_samples
                self._read_samples = number + (samples if samples == samples else 0.0)
                delivered += 1
                backwards = self._backwards
                yield step
                requested = perf_counter()
                if self._backwards != backwards:
                    trained = True
                elif not trained and not evaluates:
                    evaluates = True
                    self._begin_evaluation(began)
            complete = True
        finally:
            if not trained and (evaluates or (complete and delivered)):
                if not evaluates:
                    self._begin_evaluation(began)
                self._end_evaluation(before, perf_counter() - begin)

    def _snapshot(self) -> tuple[Any, ...]:
        return (
            self._data, self._transfer, self._communication, self._read_samples,
            self._epoch, self._loader, self._batches,
        )  # fmt: skip

    def _begin_evaluation(self, began: float) -> None:
        self._publish(EVALUATING)
        self._writer.event("evaluation_begin", step=self.step, time=began)

    def _end_evaluation(self, before: tuple[Any, ...], seconds: float) -> None:
        """Remove an evaluation from the step in which it was made."""
        self._writer.event("evaluation_end", step=self.step)
        (
            self._data, self._transfer, self._communication, self._read_samples,
            self._epoch, self._loader, self._batches,
        ) = before  # fmt: skip
        self._last += seconds
        self._mark = perf_counter()
        self._publish(TRAINING if self.step else STARTING)

    # -- called in the run

    def end_step(self, optimizer: Any, begin: float) -> None:
        """A prepared optimizer has stepped; its step began at `begin`."""
        self._mark = now = perf_counter()
        self._optimizer += now - begin
        step = optimizer.steps_made + self._base
        if step <= self.step:
            return  # another optimizer of the same step
        self.step = step
        flags = self._flags
        if flags:
            self._flags = 0
        # Only a gradient scaler skips steps, ours or that of an engine.
        if (optimizer.scaler is not None or type(optimizer) is not MeteredOptimizer) and optimizer.step_was_skipped:
            flags |= FLAG_SKIPPED
        losses, norm, tokens, late = self._losses, self._norm, self._read_tokens, None
        loss: Any = losses[0] if len(losses) == 1 else _mean(losses)
        if self._late is not None or type(loss) is not float:
            loss, norm, late = self._copied(loss, norm, tokens)
        rate = optimizer.optimizer.param_groups[0]["lr"]
        self._writer.append(
            (
                now,
                step,
                self._epoch,
                flags,
                now - self._last,
                self._data,
                self._transfer,
                self._forward,
                self._backward,
                self._communication,
                self._optimizer,
                self._checkpoint,
                self._read_samples,
                tokens,
                loss,
                norm,
                rate if type(rate) is float else _number(rate),
                late,
            )
        )
        self._last = now
        if self.status is not None:
            self._publish_step(loss, tokens)
        # As `_clear`, without a call.
        self._data = self._transfer = self._forward = self._backward = 0.0
        self._communication = self._optimizer = self._checkpoint = 0.0
        self._read_samples = self._read_tokens = self._norm = _NAN
        self._losses = []

    def _copied(self, loss: Any, norm: Any, tokens: float) -> tuple[float, float, Any]:
        """Loss and norm, and a function that returns them later where they are on a device."""
        if self._late is None:
            return _NAN if loss is None or isinstance(loss, torch.Tensor) else loss, norm, None
        norm = scalar(norm)
        loss, norm = (_NAN if value is None else value for value in (loss, norm))
        if not isinstance(loss, torch.Tensor) and not isinstance(norm, torch.Tensor):
            return loss, norm, None
        if self._look_at < self._last and isinstance(loss, torch.Tensor):
            self._look(loss)
        return _NAN, _NAN, self._late.copy((tokens, loss, norm))

    def _publish_step(self, loss: float, tokens: float) -> None:
        if loss == loss:
            self._loss = loss
        if self._read_samples == self._read_samples:
            samples = self._samples
            self._samples = self._read_samples * self._share + (samples if samples == samples else 0.0)
        if tokens == tokens:
            known = self._tokens
            self._tokens = tokens * self._share + (known if known == known else 0.0)
        self._publish(TRAINING)

    def saved(self, path: str, step: int, seconds: float) -> None:
        """A checkpoint was saved, or is being written in the background, for which the loop waited `seconds`."""
        self._checkpoint += seconds
        self._mark += seconds
        self._writer.event("save", path=path, step=step, seconds=round(seconds, 6))
        super().saved(path, step, seconds)

    def resumed(self, path: str, step: int, seconds: float) -> None:
        """The run continues after `step` optimizer steps."""
        self._writer.event("resume", path=path, step=step, seconds=round(seconds, 6))
        self._clear()
        self._last = self._mark = perf_counter()
        super().resumed(path, step, seconds)

    def event(self, name: str, **fields: Any) -> None:
        """Record an event."""
        self._writer.event(name, **fields)

    def close(self) -> None:
        """The run has ended: write everything."""
        self._release()


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
    try:
        found = find_batch_size(data)
    except (TypeError, ValueError):
        return _NAN
    return _NAN if found is None else float(found)


def _none() -> None:
    return None

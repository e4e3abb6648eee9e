# SPDX-License-Identifier: Apache-2.0
"""`RunRecorder` makes a record of each optimizer step of a process, and shows its newest state to its launcher."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time
from typing import Any

import psutil
import torch

from ..core import devices
from ..core.observers import RunObserver
from ..core.trees import first_leaf
from .records import FLAG_FIRST, FLAG_SKIPPED
from .status import EVALUATING, SAVING, STARTING, TRAINING, StatusFile
from .writer import DeviceValues, TelemetryWriter

_NAN = math.nan
# Seconds between two looks at the memory.
_MEMORY_INTERVAL = 1.0


class RunRecorder(RunObserver):
    """Records each optimizer step, and publishes the newest state.

    Durations are measured on the host: on a device whose work is queued they show where the host waits. The forward
    reaches from the delivery of a batch to `backward`, less collectives and saves. A pass over a loader in which no
    backward follows its batches is an evaluation, which is in no record.

    Args:
        device: of the run.
        share: this process's fraction of what its samples contribute to the sum over all processes: less than 1 where
            several read the same samples.
        writer: of the records; None records nothing.
        status: what the launcher reads, or the server of a TrainJob gets; None publishes nothing.

    Attributes:
        folder: of the run, if it is recorded.
        newest: the newest record, and its loss and gradient norm if a device still computes them.
    """

    def __init__(
        self,
        device: torch.device,
        share: float,
        writer: TelemetryWriter | None,
        status: StatusFile | None,
    ) -> None:
        self.folder: Path | None = None
        self.newest: tuple[list[float], DeviceValues | None] | None = None
        self._device = device
        self._share = share
        self.writer = writer
        self._status = status
        self._release: Callable[[], Any] = lambda: None
        if writer is not None:
            self.folder = writer.folder
            finalizer = weakref.finalize(self, writer.release)
            finalizer.atexit = False  # the writer closes itself
            self._release = finalizer
        self._step = 0  # of the run, of the optimizer that has made most
        self._base = 0  # steps before the checkpoint that was loaded
        self._epoch = 0
        self._flags = FLAG_FIRST
        self._passes: list[_Pass] = []  # that are open
        self._shown: _Pass | None = None  # the newest one, but for evaluations that have ended
        # of all steps; the loss of a recent one
        self._read_samples = self._read_tokens = self._loss = _NAN
        self._device_loss: DeviceValues | None = None
        self._memory = (_NAN, _NAN)  # on the device and on the host
        self._memory_time = -math.inf
        self._host_memory = psutil.Process().memory_info
        self._begin_step(perf_counter())
        self._publish(STARTING)

    def _begin_step(self, now: float) -> None:
        # of the step, of its present phase, of the wait for a batch
        self._begin = self._mark = self._requested = now
        self._step_begin: float | None = None  # of the optimizer
        self._data = self._transfer = self._forward = self._backward = 0.0
        self._communication = self._optimizer = self._checkpoint = 0.0
        self._samples: float | None = None
        self._tokens: float | None = None
        self._losses: list[Any] = []
        self._norm: Any = None

    # -- loaders

    def before_pass(self, loader: Any) -> None:
        """The wait for the first batch begins."""
        self._requested = perf_counter()
        if self._flags & FLAG_FIRST:
            # What the script does before its first pass belongs to no step.
            self._begin = self._mark = self._requested

    def begin_pass(self, loader: Any) -> None:
        """Note what an evaluation is to be removed from."""
        before = (
            self._data,
            self._transfer,
            self._communication,
            self._samples,
            self._epoch,
            self._shown,
        )
        self._shown = _Pass(loader, before)
        self._passes.append(self._shown)
        self._epoch = loader.iteration

    def batch(self, loader: Any, data: Any) -> None:
        """The wait for a batch ends, and a forward begins."""
        self._mark = now = perf_counter()
        current = self._pass_of(loader)
        copied = loader.copy_seconds - current.copied
        current.copied += copied
        self._transfer += copied
        self._data += now - self._requested - copied
        counts = loader.batch_counts
        size = _batch_size(data) if counts is None else counts[current.index]
        self._samples = (self._samples or 0.0) + size

    def end_batch(self, loader: Any) -> None:
        """The wait for the next batch begins. The pass is an evaluation if nothing was trained with this one."""
        current = self._pass_of(loader)
        if not (current.trains or current.evaluates):
            current.evaluates = True
            self.event("evaluation_begin", step=self._step, time=current.time)
            self._publish(EVALUATING)
        self._requested = perf_counter()

    def end_pass(self, loader: Any) -> None:
        """Remove an evaluation from the step in which it was made."""
        ended = self._pass_of(loader)
        self._passes.remove(ended)
        if not ended.evaluates or ended.trains:
            return
        self.event("evaluation_end", step=self._step)
        self._data, self._transfer, self._communication, self._samples, self._epoch, self._shown = (
            ended.before
        )
        self._mark = now = perf_counter()
        self._begin += now - ended.begin
        self._publish(TRAINING if self._step else STARTING)

    def _pass_of(self, loader: Any) -> _Pass:
        newest = self._passes[-1]
        if newest.loader is loader:
            return newest
        for current in self._passes:
            if current.loader is loader:
                return current
        raise KeyError(loader)

    # -- the step

    def before_backward(self, loss: Any, num_items: Any) -> None:
        """The forward ends."""
        now = perf_counter()
        self._forward += now - self._mark
        self._mark = now

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """Take in the backward, the loss and the tokens."""
        now = perf_counter()
        self._backward += now - self._mark
        self._losses.append(scalar(loss))
        if num_items is not None:
            self._tokens = (self._tokens or 0.0) + on_host(scalar(num_items))
        for current in self._passes:
            current.trains = True
        self._mark = perf_counter()

    def after_clip(self, norm: Any, seconds: float) -> None:
        """Clipping is part of the optimizer's time."""
        self._optimizer += seconds
        self._mark += seconds
        # A tensor that is kept splits the memory that gradients are freed to: on the host only the number is kept.
        self._norm = scalar(norm)

    def after_collective(self, seconds: float) -> None:
        """Take in communication."""
        self._communication += seconds
        self._mark += seconds

    def before_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> None:
        """The optimizer's time begins."""
        self._step_begin = perf_counter()

    def after_step(self, optimizer: Any) -> None:
        """Make the record of a step. It ends with the first of several optimizers that steps."""
        self._mark = now = perf_counter()
        if self._step_begin is not None:  # that of an engine is part of the backward
            self._optimizer += now - self._step_begin
            self._step_begin = None
        step = self._base + optimizer.steps_made
        if step <= self._step:
            return
        self._step = step
        flags, self._flags = self._flags, 0
        if optimizer.step_was_skipped:
            flags |= FLAG_SKIPPED
        if now - self._memory_time > _MEMORY_INTERVAL:
            self._memory_time = now
            self._memory = (device_memory(self._device), float(self._host_memory().rss))
        loss, norm = _mean(self._losses), self._norm
        copies = None
        if isinstance(loss, torch.Tensor) or isinstance(norm, torch.Tensor):
            if self.writer is not None or self._device_loss is None:
                copies = DeviceValues(self._device, loss, norm)
            loss, norm = self._newest_loss(copies), _NAN
        self._loss = on_host(loss)
        if self.writer is not None:
            seconds = now - self._begin
            rate = scalar(optimizer.param_groups[0]["lr"])
            record = [
                time(), step, 1, self._epoch, flags, seconds, self._data, self._transfer, self._forward,
                self._backward, self._communication, self._optimizer, self._checkpoint, seconds,
                on_host(self._samples), on_host(self._tokens), self._loss, on_host(norm), on_host(rate),
                *self._memory,
            ]  # fmt: skip
            self.newest = record, copies
            self.writer.append(record, copies)
        if self._status is not None:
            self._read_samples = _added(self._read_samples, self._samples)
            self._read_tokens = _added(self._read_tokens, self._tokens)
            self._publish(TRAINING)
        self._begin_step(now)

    def _newest_loss(self, copies: DeviceValues | None) -> float:
        """The newest loss that a device has computed."""
        if self._device_loss is None:
            self._device_loss = copies
        if self._device_loss is None or not self._device_loss.is_ready():
            return self._loss
        loss, _ = self._device_loss.read()
        self._device_loss = None
        return loss

    def _publish(self, state: int) -> None:
        if self._status is not None:
            batch = batches = 0
            if self._shown is not None:
                loader = self._shown.loader
                batch, batches = loader.batches_before + loader.batches_read, self._shown.batches
            share, memory = self._share, self._memory[0]
            self._status.write(
                state, self._step, time(), self._epoch, batch, batches, self._loss, self._read_samples * share,
                self._read_tokens * share, memory,
            )  # fmt: skip

    # -- the run

    def before_save(self) -> None:
        """Show that the run saves."""
        self._publish(SAVING)

    def saved(self, path: str, step: int, seconds: float) -> None:
        """Record and show a checkpoint."""
        self._checkpoint += seconds
        self._mark += seconds
        self.event("save", path=path, step=step, seconds=round(seconds, 6))
        self._publish(TRAINING)
        if self._status is not None:
            self._status.write_checkpoint(path, time())

    def loaded(self, path: str, step: int, seconds: float) -> None:
        """Count from the step of a checkpoint."""
        self.event("resume", path=path, step=step, seconds=round(seconds, 6))
        self._base = self._step = step
        self._begin_step(perf_counter())
        self._publish(TRAINING if step else STARTING)

    def released(self) -> None:
        """Count from the start: other objects are prepared."""
        self._step = self._base
        self._shown = None
        self._begin_step(perf_counter())

    def event(self, name: str, **fields: Any) -> None:
        """Record an event."""
        if self.writer is not None:
            self.writer.event(name, **fields)

    def close(self) -> None:
        """Write everything."""
        self._release()


class _Pass:
    """A pass over a loader: when it began, what was counted before it, and whether it trains or evaluates."""

    __slots__ = (
        "batches",
        "before",
        "begin",
        "copied",
        "evaluates",
        "index",
        "loader",
        "time",
        "trains",
    )

    def __init__(self, loader: Any, before: tuple[Any, ...]) -> None:
        self.loader = loader
        self.before = before
        self.index: int = loader.plan().cut.index
        try:
            self.batches = len(loader) + loader.batches_skipped
        except (TypeError, NotImplementedError):
            self.batches = 0  # not known
        self.copied: float = loader.copy_seconds
        self.time, self.begin = time(), perf_counter()
        self.evaluates = self.trains = False


def device_memory(device: torch.device) -> float:
    """Most bytes that were allocated on a device so far; NaN where that is not known."""
    read = getattr(devices.module_of(device), "max_memory_allocated", None)
    if device.type == "cpu" or read is None:
        return _NAN
    return float(read(device))


def scalar(value: Any) -> float | torch.Tensor | None:
    """A number as a float, if it is on the host; a tensor on a device as it is; None where there is no such value."""
    if type(value) is torch.Tensor:
        if value.numel() != 1 or value.is_meta:
            return None
        if value.is_cpu:
            return float(value.item())
        return value.detach().reshape(())
    if isinstance(value, (int, float)):
        return float(value)
    return None


def _mean(values: list[float | torch.Tensor | None]) -> float | torch.Tensor | None:
    """The mean of the losses of a step; None where one is not known."""
    if not values:
        return None
    total: float | torch.Tensor = 0.0
    for value in values:
        if value is None:
            return None
        total = total + (value.float() if isinstance(value, torch.Tensor) else value)
    return total / len(values)


def _batch_size(data: Any) -> float:
    """The length of the first tensor of a batch; NaN where it has none."""
    first = first_leaf(data)
    # Not its shape, which not all nested tensors have.
    if first is None or not first.dim():
        return _NAN
    return float(first.size(0))


def on_host(value: float | torch.Tensor | None) -> float:
    """The number, for which the host does not wait; NaN where there is none, or it is on a device."""
    if isinstance(value, (int, float)):
        return value
    return _NAN


def _added(total: float, counted: float | None) -> float:
    if counted is None:
        return total
    if total != total:
        return counted
    return total + counted

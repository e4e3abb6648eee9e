# SPDX-License-Identifier: Apache-2.0
"""`StepMeter` publishes the newest state of a process to its launcher.

It is chosen when the `Accelerator` is made, and replaces methods of it, so that a run without it has nothing in its
steps. The model's kernels leave little of this code in the caches, so that each line of it costs several times what
it costs in a loop of its own: what a step does not have to do is done by a thread, from what the run counts anyway.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any

import torch

from ..core import devices
from ..optimizer import AcceleratedOptimizer
from ..state import GradientState
from .device_values import device_values, scalar
from .status import EVALUATING, SAVING, STARTING, TRAINING, StatusFile

_NAN = math.nan
# Seconds between two looks at a run for its launcher.
_INTERVAL = 0.25
# The methods of an accelerator that a meter may replace.
METHODS = (
    "backward", "clip_grad_norm_", "gather", "gather_for_metrics", "reduce", "pad_across_processes",
    "wait_for_everyone",
)  # fmt: skip


def with_items(call: Callable[..., Any]) -> Callable[..., Any]:
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
        call = with_items(call)

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
        new = self._new_steps()
        if not new:
            return 0
        samples = self._samples
        self._samples = new * self._step_samples + (samples if samples == samples else 0.0)
        loader = self._loader()
        if loader is not None and self._trained is _none:
            self._trained = weakref.ref(getattr(loader, "origin", loader))
        return new

    def _steps_made(self) -> int:
        """The optimizer steps of the run, of the optimizer that has made most."""
        made = [found.steps_made for one in self._optimizers if (found := one()) is not None]
        return self._base + max(made, default=0)

    def _new_steps(self) -> int:
        new = max(0, self._steps_made() - self.step)
        self.step += new
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

    def before_load(self) -> None:
        """A checkpoint was loaded: what the optimizers have counted so far is about to be reset."""
        with self._lock:
            self._look()

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


def _none() -> None:
    return None

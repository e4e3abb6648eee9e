# SPDX-License-Identifier: Apache-2.0
"""Calls of `log` in a thread, so that a slow service does not hold up the training loop."""

from __future__ import annotations

import functools
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from ..core import devices
from .base import GeneralTracker, logger

# Calls that wait at most; then `put` waits.
CAPACITY = 1024
# Seconds in which a run that ends, and one that is terminated, makes the calls that wait.
END_LIMIT = 60.0
_TERMINATION_LIMIT = 5.0


class BackgroundLog:
    """Makes calls in one thread, in their order. Nothing is dropped: when `CAPACITY` calls wait, `put` waits.

    An error of a call is logged, once for each tracker, and later calls are made.
    """

    _shared: ClassVar[BackgroundLog | None] = None

    def __init__(self) -> None:
        # In a signal handler it may be used where the main thread is within `put`.
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        self._slots = threading.Semaphore(CAPACITY)
        self._failed: set[str] = set()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="accelerate-trackers", daemon=True)
        self._thread.start()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    @classmethod
    def shared(cls) -> BackgroundLog:
        """The one of this process."""
        writer = cls._shared
        if writer is None or writer._process != os.getpid():
            writer = cls._shared = cls()
        return writer

    def put(self, tracker: str, call: Callable[[], object]) -> None:
        """Have a call made; `tracker` is the name for its errors."""
        self._slots.acquire()
        self._calls.put((tracker, call))

    def drain(self, limit: float | None = None) -> bool:
        """Wait until all calls so far are made, at most `limit` seconds. Returns whether they are."""
        if threading.current_thread() is self._thread:
            return True
        reached = threading.Event()
        self._calls.put(("", reached.set))
        return reached.wait(limit)

    def _run(self) -> None:
        while True:
            tracker, call = self._calls.get()
            try:
                call()
            except Exception as error:
                if tracker not in self._failed:
                    self._failed.add(tracker)
                    logger.error(
                        "the tracker %s cannot log: %r. These values are lost. Later errors of "
                        "this tracker will not be shown",
                        tracker,
                        error,
                    )
            if tracker:
                self._slots.release()
            del call

    def _terminate(self, number: int, frame: object) -> None:
        """End as the signal would have ended the process, once the calls are made."""
        self.drain(_TERMINATION_LIMIT)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class NotCopiedError(Exception):
    """A value is an object that cannot be copied, such as a figure."""


def snapshot(values: Any) -> tuple[Any, Callable[[], None]]:
    """Copy values, without waiting for a device.

    Args:
        values: numbers, text, tensors and arrays in dicts, lists and tuples.

    Returns:
        The copy, and a function that waits until its tensors are computed.

    Raises:
        NotCopiedError: there are other objects among them.
    """
    found: set[torch.device] = set()
    copy = _copy(values, found)
    events = []
    for device in found:
        module = devices.module_of(device)
        if hasattr(module, "current_stream"):
            events.append(module.current_stream(device).record_event())
    return copy, functools.partial(_wait, events)


def _wait(events: list[Any]) -> None:
    for event in events:
        event.synchronize()


def _copy(value: Any, found: set[torch.device]) -> Any:
    kind = type(value)
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex, np.generic)):
        return value
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if value.device.type not in ("cpu", "meta"):
            found.add(value.device)
        return value.detach().clone()
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if kind is dict:
        return {key: _copy(item, found) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_copy(item, found) for item in value)
    raise NotCopiedError(kind.__name__)


def log_later(
    log: BackgroundLog,
    tracker: GeneralTracker,
    values: Any,
    ready: Callable[[], None],
    **options: Any,
) -> None:
    """Have `tracker.log(values, **options)` called when `ready` returns."""

    def call() -> None:
        ready()
        tracker.log(values, **{**tracker.background_options(), **options})

    log.put(tracker.name, call)

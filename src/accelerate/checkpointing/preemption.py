# SPDX-License-Identifier: Apache-2.0
"""A signal that requests a save and an exit: recorded at once, handled at a step that all ranks agree on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from ..runtime.agreement import Process
from ..runtime.step_exchange import INTERVAL, StepExchange

# Windows has one of them.
DEFAULT_SIGNALS = tuple(name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))

# Seconds to a deadline that count.
_LEAST = 1.0


class PreemptionWatch:
    """Records signals. All ranks learn at the same step that one of them received a signal.

    Call `requested` after each optimizer step on every rank. The ranks exchange what they received every few steps
    (one small message through the store, about 0.2 ms), so a signal takes effect at most `interval` steps later.
    `close` restores the previous signal handlers, which are not called while the watch is active.

    Args:
        process: who this process is.
        signals: the names of the signals.
        interval: the maximum number of steps between two exchanges.
        exchange: the exchange of the run, if there is one.
        on_signal: called in the main thread when a signal arrives, and again when the other ranks know of it.

    Example:
        watch = PreemptionWatch(state)
        for batch in loader:
            ...
            if watch.requested():
                accelerator.save_state()
                sys.exit(143)
    """

    def __init__(
        self,
        process: Process,
        signals: Sequence[str] = DEFAULT_SIGNALS,
        interval: int = INTERVAL,
        exchange: StepExchange | None = None,
        on_signal: Callable[[], None] | None = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "signal handlers can be set only in the main thread: create the watch there"
            )
        if interval < 1:
            raise ConfigurationError(
                f"interval={interval}: the number of steps between two checks must be at least 1"
            )
        if exchange is None:
            exchange = StepExchange(process, interval)
        self._exchange = exchange
        self._on_signal = on_signal
        self._within: float | None = env.value("ACCELERATE_STOP_WITHIN")
        self._job_end: float | None = env.value("SLURM_JOB_END_TIME")
        exchange.on_spread = self.notify
        exchange.watch()
        self._former: dict[signal.Signals, Any] = {}
        for name in signals:
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals):
                raise ConfigurationError(f"this system does not have the signal {name!r}")
            self._former[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.receive(signal.Signals(number).name)

    def receive(self, name: str) -> None:
        """Note a signal, or a request of the program. The first one sets the deadline."""
        exchange = self._exchange
        if exchange.received is None:
            if self._within is not None:
                exchange.deadline = time.monotonic() + self._within
            # Past it, Slurm grants a time of its own.
            left = (self._job_end or 0.0) - time.time()
            if left > _LEAST:
                exchange.deadline = min(exchange.deadline, time.monotonic() + left)
            exchange.received = name
        if self._on_signal is not None:
            self._on_signal()

    def notify(self) -> bool:
        """Let the main thread call `on_signal`, and return whether it will. This is another thread."""
        if self._exchange.received is None or not self._former:
            return False
        main = threading.main_thread().ident
        assert main is not None
        # All have the same handler, and only the first one counts.
        signal.pthread_kill(main, next(iter(self._former)))
        return True

    @property
    def is_limited(self) -> bool:
        """Whether a signal sets a deadline."""
        return self._within is not None or self._job_end is not None

    @property
    def received(self) -> str | None:
        """The name of the signal that the ranks have agreed on, or that this rank has received.

        It is "request_stop()" where the program has called that instead.
        """
        return self._exchange.agreed or self._exchange.received

    def requested(self) -> bool:
        """Whether a rank has received a signal: the same result on all ranks, and True from then on.

        `received` is then the signal's name, on all ranks.
        """
        self._exchange.step()
        return self.is_agreed

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks have agreed to stop. It exchanges nothing. One process agrees with itself at once."""
        return self._exchange.is_agreed

    def close(self) -> None:
        """Restore the former signal handlers."""
        self._exchange.end_watch()
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

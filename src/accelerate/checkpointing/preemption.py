# SPDX-License-Identifier: Apache-2.0
"""A signal that requests a save and an exit: recorded at once, handled at a step that all ranks agree on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..core.errors import ConfigurationError
from ..runtime.agreement import Agreement, Process

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")


class PreemptionWatch:
    """Records signals. All ranks learn at the same step that one of them has received one.

    Call `requested` once a step on every rank. The ranks exchange what they received every `interval` calls (one small
    message through the store, about 0.2 ms), so a signal takes effect at most that many steps later. `close` restores
    the former signal handlers, which are not called while the watch is on.

    Example:
        watch = PreemptionWatch(state)
        for batch in loader:
            ...
            if watch.requested():
                accelerator.save_state()
                sys.exit(143)
    """

    def __init__(
        self, process: Process, signals: Sequence[str] = DEFAULT_SIGNALS, interval: int = 8
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "signal handlers can be set in the main thread only: create the watch there"
            )
        if interval < 1:
            raise ConfigurationError(
                f"interval={interval}: the number of steps between two checks must be at least 1"
            )
        self.process = process
        self.interval = interval
        self.received: str | None = None
        self._agreed: str | None = None
        self._calls = 0
        self._agreement: Agreement | None = None
        self._former: dict[signal.Signals, Any] = {}
        for name in signals:
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals):
                raise ConfigurationError(f"there is no signal {name!r} on this system")
            self._former[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def requested(self, timeout: float = 1800.0) -> bool:
        """Whether a rank has received a signal: the same result on all ranks, and True from then on.

        `received` is then the signal's name, on all ranks.
        """
        if self.process.num_processes == 1:
            return self.received is not None
        self._calls += 1
        if self._agreed is not None or self._calls % self.interval:
            return self._agreed is not None
        if self._agreement is None:
            self._agreement = Agreement(self.process, "preemption")
        self._agreed = self._agreement.exchange(
            "preemption check",
            self.received,
            timeout,
            reduce=lambda names: next(filter(None, names.values()), None),
        )
        self.received = self._agreed or self.received
        return self._agreed is not None

    def close(self) -> None:
        """Restore the former signal handlers."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

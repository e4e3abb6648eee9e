# SPDX-License-Identifier: Apache-2.0
"""The thread that uses the store shared by all machines: heartbeats, and requests with a timeout."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from ..core.errors import LaunchError

T = TypeVar("T")

# Seconds between two heartbeats, and without an answer after which the store counts as lost.
BEAT = 0.5
STORE_TIMEOUT = 6.0
# Own heartbeats without one of another machine, after which that counts as lost. Not in seconds: a machine that was
# suspended must not count all others as lost when it resumes.
MAX_MISSED = 6


class StoreLost(LaunchError):
    """The machine that holds the store is lost or cannot be reached."""


class Messenger(threading.Thread):
    """Sends heartbeats and runs requests, one after the other.

    Args:
        store: a connection that only this thread uses.
        member: this machine's number in the run.
        keeps_time: the other machines compare their clocks to this machine's.
    """

    def __init__(self, store: Any, member: int, keeps_time: bool = False) -> None:
        super().__init__(daemon=True, name="elastic-messenger")
        self.store = store
        self.member = member
        self.keeps_time = keeps_time
        # Called with the store at each heartbeat, in this thread.
        self.on_beat: Callable[[Any], None] | None = None
        self.reason: str = ""
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = False
        self._beats = 0
        self._answered = time.monotonic()
        self._overdue_since: float | None = None

    def run(self) -> None:
        """Process requests and send heartbeats until the thread is closed or a request fails."""
        due = 0.0
        while not self._over:
            try:
                request = self._requests.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                request = self._beat
                due = time.monotonic() + BEAT
            try:
                request()
            except Exception as error:
                # After any error here, the machines of the run can no longer agree on anything.
                self.reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                return
            self._answered = time.monotonic()

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(alive_key(self.member), str(self._beats))
        if self.keeps_time:
            self.store.set("clock", repr(time.time()))
        if self.on_beat is not None:
            self.on_beat(self.store)

    def post(self, action: Callable[[Any], Any]) -> None:
        """Have the thread call `action(store)`, without waiting for it."""
        self._requests.put(lambda: action(self.store))

    def request(self, action: Callable[[Any], T]) -> T:
        """Have the thread call `action(store)`, which must not block, and return its result.

        Raises:
            StoreLost: the store does not answer in time.
        """
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(action(self.store))
            except Exception as error:
                answer.set_exception(error)
                raise

        self._requests.put(work)
        until = time.monotonic() + STORE_TIMEOUT
        while True:
            try:
                return answer.result(timeout=0.2)
            except FutureTimeout:
                if not self.is_alive() or time.monotonic() > until:
                    raise StoreLost(self.reason or f"no answer for {STORE_TIMEOUT:.0f} s") from None
            except RuntimeError as error:
                raise StoreLost(str(error).splitlines()[0]) from None

    def is_lost(self) -> bool:
        """Whether the store is lost. Only a second call reports it: this process may have been suspended before."""
        if not self.is_alive():
            return True
        now = time.monotonic()
        if now - self._answered < STORE_TIMEOUT:
            self._overdue_since = None
        elif self._overdue_since is None:
            self._overdue_since = now
        return self._overdue_since is not None and now - self._overdue_since > 2 * BEAT

    def stop(self) -> None:
        """End the thread after the current request."""
        self._over = True


class Presence:
    """Which of some machines still send heartbeats."""

    def __init__(self, members: list[int]) -> None:
        self.missed: dict[int, int] = dict.fromkeys(members, 0)
        self._last = dict.fromkeys(members, b"")

    def update(self, store: Any) -> list[int]:
        """Read the heartbeats. Returns the machines that are lost."""
        members = list(self.missed)
        for member, beat in zip(members, store.multi_get([alive_key(m) for m in members]), strict=True):
            self.missed[member] = 0 if beat != self._last[member] else self.missed[member] + 1
            self._last[member] = beat
        return [member for member, missed in self.missed.items() if missed >= MAX_MISSED]


def alive_key(member: int) -> str:
    """The key of a machine's heartbeat."""
    return f"alive/{member}"

# SPDX-License-Identifier: Apache-2.0
"""The one thread that talks to the store all machines share: beats of life, and answers that never block the asker."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, TypeVar

from ..core.errors import LaunchError

T = TypeVar("T")

# Seconds between two signs of life, and without an answer after which the store counts as lost.
BEAT = 0.5
SILENCE = 6.0
# Beats without a new sign after which a machine counts as gone. Beats, not seconds: a machine that was itself asleep
# must not take all others for gone when it wakes.
MISSED = 6


class StoreLost(LaunchError):
    """The machine that holds the store is gone or out of reach."""


class Messenger(threading.Thread):
    """`store` is a connection of this thread's own. `member` is this machine's number in the run.

    keeps_time: this machine's clock is the one that others compare theirs to.
    """

    def __init__(self, store: Any, member: int, keeps_time: bool = False) -> None:
        super().__init__(daemon=True, name="elastic-messenger")
        self.store = store
        self.member = member
        self.keeps_time = keeps_time
        # Called with the store at each beat, in this thread.
        self.follow: Callable[[Any], None] | None = None
        self.reason = ""
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = False
        self._beats = 0
        self._answered = time.monotonic()
        self._silent_since: float | None = None

    def run(self) -> None:
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
                # Whatever goes wrong here, the run's machines can no longer agree on anything.
                self.reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                return
            self._answered = time.monotonic()

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(alive_key(self.member), str(self._beats))
        if self.keeps_time:
            self.store.set("clock", repr(time.time()))
        if self.follow is not None:
            self.follow(self.store)

    def tell(self, message: Callable[[Any], Any]) -> None:
        """Have the thread do something with the store; nobody waits for it."""
        self._requests.put(lambda: message(self.store))

    def ask(self, question: Callable[[Any], T]) -> T:
        """What `question(store)` returns. It must not wait for anybody. Raises StoreLost where no answer comes."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(question(self.store))
            except Exception as error:
                answer.set_exception(error)
                raise

        self._requests.put(work)
        until = time.monotonic() + SILENCE
        while True:
            try:
                return answer.result(timeout=0.2)
            except NoAnswer:
                if not self.is_alive() or time.monotonic() > until:
                    raise StoreLost(self.reason or f"no answer for {SILENCE:.0f} s") from None
            except RuntimeError as error:
                raise StoreLost(str(error).splitlines()[0]) from None

    def is_silent(self) -> bool:
        """Whether the store is lost. Said only at the second look: at the first this process may just have woken."""
        if not self.is_alive():
            return True
        now = time.monotonic()
        if now - self._answered < SILENCE:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        return self._silent_since is not None and now - self._silent_since > 2 * BEAT

    def stop(self) -> None:
        self._over = True


class Presence:
    """Which of some machines still give signs of life, judged beat by beat."""

    def __init__(self, members: list[int]) -> None:
        self.missed = dict.fromkeys(members, 0)
        self._heard = dict.fromkeys(members, b"")

    def look(self, store: Any) -> list[int]:
        """The machines that are gone, as of this beat."""
        members = list(self.missed)
        for member, beat in zip(members, store.multi_get([alive_key(m) for m in members]), strict=True):
            self.missed[member] = 0 if beat != self._heard[member] else self.missed[member] + 1
            self._heard[member] = beat
        return [member for member, missed in self.missed.items() if missed >= MISSED]


def alive_key(member: int) -> str:
    return f"alive/{member}"

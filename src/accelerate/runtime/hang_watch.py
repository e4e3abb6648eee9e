# SPDX-License-Identifier: Apache-2.0
"""A thread of each rank that notices when the run stands still, and reports where every rank is.

Nothing here is on the path of a step. The thread sleeps. It looks at the main thread's stack, the ledger, the batches
read and the process's CPU time; if they show no progress for the limit, it requests the place
of every rank through the store. Each rank's thread answers, whatever its main thread does. One rank prints the report.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch.distributed as dist

from ..core import env
from . import marks
from .agreement import default_connection
from .hang_report import IDLE, MOVES, WAITS, Status, explain
from .ledger import LEDGER, in_words
from .pending import KEPT, Recorded, newest, recorded
from .place import place_of

logger: logging.Logger = logging.getLogger(__name__)

# Seconds without progress until the first report (ACCELERATE_HANG_REPORT). The next one comes after twice the time.
LIMIT = 60.0
# Seconds between two looks: a share of the limit, at most.
INTERVAL = 1.0
LOOKS = 8
# In debug mode ranks wait for an answer.
DEBUG_INTERVAL = 0.25
# Seconds in which the thread ends when the process leaves the run.
STOP = 2.0
# Collectives before the last one that a report lists.
BEFORE = 3
# Shares of the time on a CPU or waiting for one: below the first a process does nothing, above the second it computes.
QUIET, BUSY = 0.05, 0.3

# Called with the text of each report on the rank that prints it.
on_report: list[Callable[[str], None]] = []


class _Watch:
    """The watch of this process."""

    running: ClassVar[HangWatch | None] = None


def start(limit: float | None = None) -> None:
    """Watch the thread that calls this, until `stop`. Needs the default process group."""
    stop()
    if dist.get_world_size() == 1:
        return
    if limit is None:
        found = env.get_float("ACCELERATE_HANG_REPORT")
        limit = LIMIT if found is None else found
        if ends := env.get_float("ACCELERATE_COLLECTIVE_TIMEOUT"):
            limit = min(limit, ends / 2)
    if limit > 0 or env.get_flag("ACCELERATE_DEBUG_MODE"):
        _Watch.running = HangWatch(threading.get_ident(), limit)


def stop() -> None:
    """End the watch. At the exit no thread may be in a call of torch."""
    watch, _Watch.running = _Watch.running, None
    if watch is not None:
        watch.stop()


def request(ranks: Iterable[int]) -> dict[int, Status]:
    """The status of `ranks`; one that does not answer is left out."""
    watch = _Watch.running
    return {} if watch is None else watch.request(ranks)


class HangWatch:
    """Watches one thread.

    Args:
        thread: the identifier of the thread.
        limit: seconds without progress until a report; 0: only answer the requests of other ranks.
    """

    def __init__(self, thread: int, limit: float) -> None:
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self.limit = limit
        self._on_device = dist.get_backend() != "gloo"
        self.interval: float = min(INTERVAL, limit / LOOKS or INTERVAL)
        if env.get_flag("ACCELERATE_DEBUG_MODE"):
            self.interval = min(self.interval, DEBUG_INTERVAL)
        self._watched = thread
        self._ended = threading.Event()
        self._store: Any = None
        self._answered = 0
        self._reports = 0
        # When the last progress was seen, with the CPU time then; and when a report is next due.
        self._sign: Any = None
        self._since = self._last = time.monotonic()
        self._run_queue = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._cpu = self._last_cpu = self._busy_time()
        self._share = 0.0
        self._due = limit
        self._newest: Any = None
        self._thread = threading.Thread(target=self._run, name="accelerate-hang-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        # A process that was forked does not have it.
        if self._thread.is_alive():
            self._thread.join(STOP)

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                self._look()
            except (RuntimeError, ValueError, ConnectionError):
                # The store is gone, or the group: the run is at its end.
                return

    def _busy_time(self) -> float:
        """Seconds on a CPU, and those in which the main thread was ready and another process had the core (Linux)."""
        try:
            with open(self._run_queue, "rb") as file:
                waited = int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            waited = 0.0
        return time.process_time() + waited

    def _look(self) -> None:
        if self._store is None:
            # A separate connection: calls on one connection wait for each other.
            self._store = default_connection().store
        now, cpu = time.monotonic(), self._busy_time()
        self._share = (cpu - self._last_cpu) / max(now - self._last, 1e-3)
        self._last, self._last_cpu = now, cpu
        self._answer()
        if not self.limit:
            return
        place = place_of(self._watched)
        sign = (LEDGER.count, marks.batches_read(), None if place is None else place.mark)
        if sign != self._sign:
            self._sign = sign
            self._progress(now, cpu)
            return
        stood = now - self._since
        if self._newest is None and stood > self.limit / 2:
            self._newest = newest(recorded())
        # Rank 0 comes first, so that its output has the report where it stands itself.
        if stood > self._due + (2 * self.interval if self.rank else 0.0):
            self._note_reports(stood)
            if stood > self._due:
                self._check(stood, now, cpu, place is not None and place.waits)

    def _progress(self, now: float, cpu: float) -> None:
        self._since, self._cpu, self._newest, self._due = now, cpu, None, self.limit

    def _check(self, stood: float, now: float, cpu: float, waits: bool) -> None:
        """Report if this process is in a collective, or does nothing, for as long as it has made no progress."""
        entry, calls = LEDGER.last(), recorded()
        inside = entry is not None and entry.left is None
        if not inside and newest(calls) != self._newest:
            # Torch's collectives are new ones: the looks have met the same line of a loop.
            self._progress(now, cpu)
        elif inside or waits or (cpu - self._cpu) / stood < QUIET or _is_stuck(calls, stood / 2):
            self._report(stood)
        else:
            # It computes. Reading the recorder takes milliseconds.
            self._due = stood + self.limit / 4

    # -- questions and answers

    def _answer(self) -> None:
        """Answer the last request of another rank."""
        number = int(self._store.add("accelerate/where", 0))
        if number > self._answered:
            self._answered = number
            self._store.set(f"accelerate/where/{number}/{self.rank}", json.dumps(self.status()))

    def request(self, ranks: Iterable[int]) -> dict[int, Status]:
        """The status of `ranks`; one that does not answer is left out. Raises RuntimeError if the store is gone."""
        store = self._store or default_connection().store
        number = int(store.add("accelerate/where", 1))
        keys = {rank: f"accelerate/where/{number}/{rank}" for rank in ranks}
        found: dict[int, Status] = {}
        deadline = time.monotonic() + 2 * self.interval + 1.0
        watches = threading.current_thread() is self._thread
        if watches:
            self._answered = number
        while time.monotonic() < deadline:
            for rank, key in keys.items():
                if rank == self.rank:
                    found[rank] = self.status()
                elif rank not in found and store.check([key]):
                    found[rank] = json.loads(store.get(key))
                    store.delete_key(key)
            if len(found) == len(keys) or self._ended.is_set():
                break
            if watches:
                # Another rank may send a request meanwhile.
                self._answer()
            time.sleep(0.02)
        return dict(sorted(found.items()))

    def _note_reports(self, stood: float) -> None:
        """If another rank has reported since, this rank's next report is due later."""
        reports = int(self._store.add("accelerate/hang_reports", 0))
        if reports > self._reports:
            self._reports = reports
            self._due = 2 * stood

    def _report(self, stood: float) -> None:
        """Ask all ranks, and print what follows, unless another rank does."""
        mine = str(self.rank)
        if self._store.compare_set(f"accelerate/hang_report/{self._reports}", "", mine).decode() != mine:
            return
        everyone = range(self.world)
        found = self.request(everyone)
        ended = {*(marks.read(marks.LEFT, everyone) or ()), *(marks.read(marks.FAILED, everyone) or ())}
        text = None if self._ended.is_set() else explain(found, self.world, ended)
        self._reports = int(self._store.add("accelerate/hang_reports", 1))
        self._due = 2 * stood
        if text is not None:
            logger.warning("%s", text)
            for call in on_report:
                call(text)

    # -- what this process does

    def status(self) -> Status:
        """Where this process is, in plain JSON data.

        state: WAITS in a collective or an agreement, MOVES, or IDLE. at, calls, within: as in `StackPlace`.
        seconds: since the last progress. call, before: the last collective of this package, and those before it.
        pending, recent, last: torch's collectives, and the number of the last one in each group.
        """
        place = place_of(self._watched)
        now = time.monotonic()
        entry = LEDGER.last()
        calls = recorded()
        waiting = [one for one in calls if one.is_pending]
        ended = [one for one in LEDGER.recent(BEFORE + 1) if one.left is not None]
        inside = entry is not None and entry.left is None
        agrees = place is not None and place.waits
        moved = now - self._since < 2 * self.interval
        # A wait for NCCL may keep a core busy.
        stuck = _is_stuck(waiting, 2 * self.interval) and (self._share < BUSY or self._on_device)
        state = WAITS if inside or agrees or (stuck and not moved) else MOVES if moved or self._share > BUSY else IDLE
        status: Status = {
            "state": state,
            "at": "no line: its main thread has ended" if place is None else place.at,
            "calls": "" if place is None else place.calls,
            "within": "" if place is None else place.within,
            "seconds": now - self._since,
            "call": None,
            "before": [f"{one.operation} ({one.file}:{one.line})" for one in ended[-BEFORE:]],
            "pending": [one._asdict() for one in waiting[:KEPT]],
            "last": newest(calls),
            "recent": [one._asdict() for one in calls[-KEPT:]],
        }
        if entry is not None:
            status["call"] = {
                "operation": entry.operation,
                "data": in_words(entry.data),
                "at": f"{entry.file}:{entry.line}",
                "inside": inside,
            }
        return status


def _is_stuck(calls: list[Recorded], seconds: float) -> bool:
    return any(one.is_pending and one.age > seconds for one in calls)

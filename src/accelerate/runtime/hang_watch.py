# SPDX-License-Identifier: Apache-2.0
"""A thread of each rank that notices when the run stands still, and reports where every rank is.

Nothing here is on the path of a step. The thread sleeps. It looks at the main thread's stack and CPU time, the ledger
and the batches read; if they show no progress for the limit, it requests the place of every rank through the store.
Each rank's thread answers, whatever its main thread does. One rank prints the report.

Ranks that wait in different collectives of the same number will wait for ever. Each rank that has waited for a moment
leaves its collective in the store, where the next one compares, so that this is reported long before the limit.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from ..core import env
from . import hang_files, locked, marks
from .agreement import default_connection
from .hang_report import ACTIVE, FILES, HAS_ENDED, IDLE, MOVES, THREADS, WAITS, Status, explain
from .ledger import LEDGER, in_words
from .pending import KEPT, Recorded, compared, newest, recorded
from .place import StackPlace, place_of

logger: logging.Logger = logging.getLogger(__name__)

# Seconds without progress until the first report (ACCELERATE_HANG_REPORT). The next one comes after twice the time.
# With the time for the answers, the default report is out within a minute.
LIMIT = 50.0
# Seconds between two looks: a share of the limit, at most.
INTERVAL = 1.0
LOOKS = 8
# Looks without progress until the collectives of the ranks are compared, and then until another rank than 0 reports.
COMPARED_AFTER, PATIENCE = 2, 2
# If a look is so many seconds late, this process was stopped, or in a call that holds the interpreter lock.
ABSENCE = 3.0
# In debug mode ranks wait for an answer.
DEBUG_INTERVAL = 0.25
# Seconds in which the thread ends when the process leaves the run.
STOP = 2.0
# Collectives before the last one that a report lists.
BEFORE = 3
# Shares of the time on a CPU or waiting for one: below the first a thread does nothing, above the second it computes.
QUIET, BUSY = 0.05, 0.3
# A thread sleeps in a loop if it has been woken up between so many looks, and this share of them. One that waits for
# the workers of a data loader wakes up every 5 seconds.
WOKEN, OFTEN = 3, 0.25
# Bytes a second of a process that reads or writes files.
TRANSFERS = 1 << 20
# The number of a request by which the process that hosts the store announces that it leaves.
CLOSING = 1 << 40

# Called with the text of each report on the rank that prints it.
on_report: list[Callable[[str], None]] = []


class Usage(NamedTuple):
    """What a thread and its process have done so far.

    Fields:
        thread: seconds in which the thread was on a CPU, or ready while another had the core.
        process: seconds in which any thread of the process was on a CPU.
        wakes: how often the thread was given a CPU.
        bytes: that the process has read from and written to files.
    """

    thread: float
    process: float
    wakes: int
    bytes: int


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
        # Before the run ends, whoever has set its timeout.
        limit = min(LIMIT if found is None else found, _timeout() / 2)
    if limit > 0 or env.get_flag("ACCELERATE_DEBUG_MODE"):
        locked.prepare()
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


def announce_end(store: Any) -> None:
    """End the watches of all ranks, since the process that hosts the store leaves: torch logs each lost connection."""
    store.add("accelerate/where", CLOSING)


def _timeout() -> float:
    """Seconds after which a collective of the default group fails; infinite where it is not known."""
    group: Any = dist.group.WORLD
    try:
        return float(group._get_backend(group._device_types[0]).options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):
        # Groups of a backend that Python has registered list no devices.
        return math.inf


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
        # When the last progress was seen, and what had been done by then; and when a report is next due.
        self._sign: Any = None
        self._place: StackPlace | None = None
        self._since = self._last = time.monotonic()
        self._schedule = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._begin = self._last_usage = self._usage()
        self._share = self._process_share = self._rate = 0.0
        # Looks since the last progress, and those of them before which the thread was woken up.
        self._looks = self._woken = 0
        self._due = limit
        self._newest: Any = None
        # The keys under which this rank has left its collectives for comparison; None before it has.
        self._compared: list[str] | None = None
        # The mismatches found in the run before this stand-still; None where one of it has been reported.
        self._mismatches: int | None = None
        # Looks for which this rank leaves the report of a mismatch to rank 0.
        self._patience = 0
        # Seconds of the stand-still that this rank has reported, and of one that seems to be over.
        self._reported_after = self._over = 0.0
        self._thread = threading.Thread(target=self._run, name="accelerate-hang-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        # A process that was forked does not have it.
        if self._thread.is_alive():
            self._thread.join(STOP)
            if self._reported_after or self._over:
                self._over = self._over or time.monotonic() - self._since
                self._note_recovery()

    def _run(self) -> None:
        begin = time.monotonic()
        while not self._ended.wait(self.interval):
            if time.monotonic() - begin > self.interval + ABSENCE:
                self._progress(time.monotonic())
            try:
                self._look()
            except (RuntimeError, ValueError, ConnectionError):
                # The store is gone, or the group: the run is at its end.
                return
            begin = time.monotonic()

    def _usage(self) -> Usage:
        process = time.process_time()
        try:
            # Nanoseconds on a CPU, nanoseconds of waiting for one, times that it was given one (Linux).
            with open(self._schedule, "rb") as file:
                ran, waited, wakes = map(int, file.read().split())
        except (OSError, ValueError):
            return Usage(process, process, 0, 0)
        return Usage((ran + waited) / 1e9, process, wakes, _transferred())

    def _look(self) -> None:
        if self._store is None:
            # A separate connection: calls on one connection wait for each other.
            self._store = default_connection().store
        now, used = time.monotonic(), self._usage()
        seconds = max(now - self._last, 1e-3)
        self._rate = (used.bytes - self._last_usage.bytes) / seconds
        self._share = (used.thread - self._last_usage.thread) / seconds
        self._process_share = (used.process - self._last_usage.process) / seconds
        self._looks += 1
        self._woken += used.wakes > self._last_usage.wakes
        self._last, self._last_usage = now, used
        if self._over:
            self._note_recovery()
        self._answer()
        if not self.limit or self._moves():
            return
        stood = now - self._since
        if self._newest is None and stood > self.limit / 2:
            self._newest = newest(recorded())
        if stood > COMPARED_AFTER * self.interval:
            self._compare()
        # Rank 0 comes first, so that its output has the report where it stands itself.
        if stood > self._due + (2 * self.interval if self.rank else 0.0):
            self._note_reports(stood)
            if stood > self._due:
                self._check(stood)

    def _moves(self) -> bool:
        """Whether the watched thread has made progress since the last call."""
        self._place = place_of(self._watched)
        sign = (LEDGER.count, marks.batches_read(), None if self._place is None else self._place.mark)
        if sign == self._sign:
            return False
        self._sign = sign
        self._progress(time.monotonic())
        return True

    def _progress(self, now: float) -> None:
        if self._reported_after:
            # Reported at the next look: an error that ends the run is progress at first.
            self._over, self._reported_after = now - self._since, 0.0
        for key in self._compared or ():
            self._store.delete_key(key)
        self._since, self._begin, self._newest, self._due = now, self._last_usage, None, self.limit
        self._compared = None
        self._looks = self._woken = 0

    def _note_recovery(self) -> None:
        seconds, self._over, self._reported_after = self._over, 0.0, 0.0
        if not marks.has_published(marks.WAITING) and not marks.has_published(marks.FAILED):
            logger.warning("The run continues after %.0f s.", seconds)

    def _compare(self) -> None:
        """Compare the collectives in which the ranks wait, once; report if they differ, here or on other ranks."""
        if self._compared is None:
            self._compared, differs = [], False
            self._reports = int(self._store.add("accelerate/hang_reports", 0))
            self._mismatches = int(self._store.add("accelerate/mismatches", 0))
            self._patience = PATIENCE if self.rank else 0
            for name, text in compared(recorded()).items():
                key = f"accelerate/compared/{name}"
                self._compared.append(key)
                differs |= self._store.compare_set(key, "", text).decode() != text
            if differs:
                self._store.add("accelerate/mismatches", 1)
        if self._mismatches is None or int(self._store.add("accelerate/mismatches", 0)) == self._mismatches:
            return
        if self._patience:
            self._patience -= 1
            return
        self._mismatches = None
        if int(self._store.add("accelerate/hang_reports", 0)) == self._reports:
            self._report()

    def _check(self, stood: float) -> None:
        """Report if this process is in a collective, or does nothing, for as long as it has made no progress."""
        entry, calls = LEDGER.last(), recorded()
        inside = entry is not None and entry.left is None
        if not inside and newest(calls) != self._newest:
            # Torch's collectives are new ones: the looks have met the same line of a loop.
            self._progress(self._last)
            return
        waits = self._place is not None and (self._place.waits or self._place.is_distributed)
        quiet = (self._last_usage.thread - self._begin.thread) / stood < QUIET
        if inside or waits or quiet or _is_stuck(calls, stood / 2):
            self._report()
        else:
            # It computes. Reading the recorder takes milliseconds.
            self._due = stood + self.limit / 4

    # -- questions and answers

    def _answer(self) -> None:
        """Answer the last request of another rank."""
        number = int(self._store.add("accelerate/where", 0))
        if number >= CLOSING:
            self._ended.set()
        elif number > self._answered:
            self._answered = number
            status = self.status()
            self._store.set(f"accelerate/where/{number}/{self.rank}", json.dumps(status))
            if self._store.check(["accelerate/hang_folder"]):
                hang_files.write(self._store.get("accelerate/hang_folder").decode(), self.rank, self._watched)

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
            self._due = 2 * max(stood, self.limit)

    def _report(self) -> None:
        """Ask all ranks, and print what follows, unless another rank does."""
        mine, since = str(self.rank), self._since
        if self._store.compare_set(f"accelerate/hang_report/{self._reports}", "", mine).decode() != mine:
            return
        everyone = range(self.world)
        folder = hang_files.folder(self._store)
        found = self.request(everyone)
        if folder:
            hang_files.write(folder, self.rank, self._watched)
        self._reports = int(self._store.add("accelerate/hang_reports", 1))
        # While the ranks answered, this one may have moved on, or the run may have ended.
        if self._ended.is_set() or self._moves() or self._since != since:
            return
        stood = time.monotonic() - since
        self._due = 2 * max(stood, self.limit)
        text = explain(found, self.world, self._absence(found))
        if text is None:
            return
        if folder:
            text += f"\nThe stacks and the last collectives of each rank: {folder} (on its machine)"
        self._reported_after = stood
        logger.warning("%s", text)
        for call in on_report:
            call(text)

    def _absence(self, found: dict[int, Status]) -> dict[int, str]:
        """Why ranks do not answer, as far as it is known."""
        absent = [rank for rank in range(self.world) if rank not in found]
        store = self._store
        left = {rank for kind in (marks.LEFT, marks.FAILED) for rank in marks.read(kind, absent, store) or ()}
        words, stacks = {}, marks.read(marks.STACKS, absent, store) or {}
        for rank, process in (marks.read(marks.PROCESS, absent, store) or {}).items():
            if rank in left:
                words[rank] = HAS_ENDED
            elif marks.is_gone(process):
                words[rank] = "was killed or crashed: its process is gone"
            elif marks.is_stopped(process):
                words[rank] = f"is stopped (process {process[1]}): SIGSTOP, or a debugger"
            elif line := locked.line_of(process, stacks.get(rank)):
                words[rank] = f"is in a call that holds the interpreter lock ({line})"
        return words | dict.fromkeys(left, HAS_ENDED)

    # -- what this process does

    def status(self) -> Status:
        """Where this process is, in plain JSON data.

        state: WAITS in a collective or an agreement, MOVES, FILES, ACTIVE, THREADS, or IDLE. at, calls, within: as in
        `StackPlace`.
        seconds: since the last progress. call, before: the last collective of this package, and those before it.
        pending, recent, last: torch's collectives, and the number of the last one in each group.
        """
        self._moves()
        place = self._place
        now = time.monotonic()
        entry = LEDGER.last()
        calls = recorded()
        waiting = [one for one in calls if one.is_pending]
        inside = entry is not None and entry.left is None
        moved = now - self._since < 2 * self.interval
        agrees = place is not None and (place.waits or (place.is_distributed and not moved))
        # A wait for NCCL may keep a core busy.
        stuck = _is_stuck(waiting, 2 * self.interval) and (self._share < BUSY or self._on_device)
        state = WAITS if inside or agrees or (stuck and not moved) else self._activity(moved)
        status: Status = {
            "state": state,
            "at": "no line: its main thread has ended" if place is None else place.at,
            "calls": "" if place is None else place.calls,
            "within": "" if place is None else place.within,
            "seconds": now - self._since,
            "call": None,
            "before": LEDGER.ended(BEFORE),
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

    def _activity(self, moved: bool) -> str:
        """What the watched thread does outside of collectives."""
        if moved or self._share > BUSY:
            return MOVES
        if self._rate > TRANSFERS:
            return FILES
        if self._process_share > BUSY:
            return THREADS
        return ACTIVE if self._woken >= max(WOKEN, OFTEN * self._looks) else IDLE


def _transferred() -> int:
    """Bytes that this process has read from and written to files (Linux)."""
    try:
        with open("/proc/self/io", "rb") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith((b"rchar", b"wchar")))
    except (OSError, ValueError):
        return 0


def _is_stuck(calls: list[Recorded], seconds: float) -> bool:
    return any(one.is_pending and one.age > seconds for one in calls)

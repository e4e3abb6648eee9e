# SPDX-License-Identifier: Apache-2.0
"""A thread of each rank that notices when the run stands still, and reports who has not come to which collective.

Nothing here is on the path of a step. The thread sleeps. It looks at the ledger and the batches read; if they show no
progress for the limit, it asks all ranks through the store where they are. Each rank's thread answers, whatever its
main thread does. One rank prints the report, if some ranks wait in a collective for one that no debugger explains;
where a child process computes meanwhile, it is a line that names it, and no warning. An agreement has a limit and
messages of its own. The stacks are faulthandler's (`stacks.py`), written without a signal, which would interrupt what
the main thread does.

Ranks that wait in different collectives of the same number will wait for ever. Each rank that has waited for a moment
leaves its collective in the store, where the next one compares, so that this is reported long before the limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from textwrap import shorten
from typing import Any, ClassVar

import psutil
import torch.distributed as dist

from ..core import env, messages
from ..core.objects import by_text, ranks_in_words
from ..torch_internals.flight_recorder import Recorded, newest, recorded
from . import marks, stacks
from .agreement import default_connection, pauses
from .calls import LEDGER
from .passing import Answers, begin_answers

logger: logging.Logger = logging.getLogger(__name__)

# Where a rank is, as plain JSON data; `HangWatch.status` describes the fields.
Status = dict[str, Any]

# Seconds without progress until the first report (ACCELERATE_HANG_REPORT). The next one comes after twice the time.
# With the time for the answers, the default report is out within a minute.
LIMIT = 50.0
# Seconds between two looks: at most, in debug mode (ranks wait for an answer), and as a share of the limit.
INTERVAL, DEBUG_INTERVAL, LOOKS = 1.0, 0.25, 8
# Looks without progress until the collectives are compared, and for which another rank than 0 leaves a report to it.
COMPARED_AFTER, PATIENCE = 2, 2
# Seconds between two looks for questions of rank 0 (`passing.py`), and how many of them the store serves in a second.
GLANCE, GLANCES = 0.2, 500.0
# If a look is so many seconds late, this process was stopped, or in a call that holds the interpreter lock.
ABSENCE = 3.0
# Seconds in which the thread ends when the process leaves the run.
STOP = 2.0
# Collectives that a rank lists, of this package before the last one and of torch, and compares while it waits.
BEFORE, LISTED, COMPARED = 3, 16, 3
# Share of the time on a CPU below which child processes do nothing.
QUIET = 0.05
# The number of a request by which the process that hosts the store announces that it leaves.
CLOSING = 1 << 40
# Collectives of torch in which every rank passes tensors of the same shape.
SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "reduce_scatter")
SAME_CALLS = (
    "Every rank must call the same collectives in the same order (gather, reduce, wait_for_everyone, backward, "
    "save_state, ...): look for one under an `if`, after a `break` or in a `try` that only some ranks reach. "
    "With ACCELERATE_DEBUG_MODE=1 every call is compared, and the first that differs is an error."
)

# Called with the text of each report on the rank that prints it.
on_report: list[Callable[[str], None]] = []
# Called in the thread a few times a second, with its connection to the store.
on_glance: list[Callable[[dist.Store], None]] = []


def start(timeout: timedelta | None = None) -> None:
    """Watch the thread that calls this, until `stop`. `timeout`: of the default process group."""
    stop()
    if dist.get_world_size() == 1:
        return
    requested = env.value("ACCELERATE_HANG_REPORT")
    limit = LIMIT if requested is None else requested
    if timeout is not None:
        # Before the run ends.
        limit = min(limit, timeout.total_seconds() / 2)
    HangWatch.running = HangWatch(threading.get_ident(), limit)


def stop(has_failed: bool = False) -> None:
    """End the watch, and remove its files unless the run has failed. At the exit no thread may be in torch."""
    watch, HangWatch.running = HangWatch.running, None
    if watch is not None:
        watch.stop()
        if not has_failed and not marks.has_failed():
            stacks.remove(watch.folder, watch.rank)


def request(ranks: Iterable[int]) -> dict[int, Status]:
    """The status of `ranks`; one that does not answer is left out."""
    watch = HangWatch.running
    if watch is None:
        return {}
    return watch.request(list(ranks))


def announce_end(store: Any) -> None:
    """End the watches of all ranks, since the process that hosts the store leaves: torch logs each lost connection."""
    store.add("accelerate/where", CLOSING)


class HangWatch:
    """Watches one thread.

    Args:
        thread: the identifier of the thread.
        limit: seconds without progress until a report; 0: only answer the requests of other ranks.
    """

    running: ClassVar[HangWatch | None] = None  # the one of this process

    def __init__(self, thread: int, limit: float) -> None:
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self.limit = limit
        self.interval: float = min(INTERVAL, limit / LOOKS or INTERVAL)
        if env.get_flag("ACCELERATE_DEBUG_MODE"):
            self.interval = min(self.interval, DEBUG_INTERVAL)
        self._watched = thread
        self._ended = threading.Event()
        self._store: Any = None
        self._answered = self._reports = 0
        # Seconds of the last stand-still that this rank has reported.
        self._reported = 0.0
        self._signs: tuple[int, int] | None = None
        # Since when there was no progress, and the time on a CPU by then; and when a report is due.
        self._since = self._cpu = 0.0
        self._due = limit
        # The last collectives of torch; None until they are compared. And the mismatches found before.
        self._newest: dict[str, int] | None = None
        self._mismatches: int | None = None
        self._patience = 0
        # Seconds that each child process had on a CPU when the stand-still began.
        self._children: dict[int, float] = {}
        self.folder: str = ""  # with the file of this rank, once it was written
        self._progress()
        self._run_number = begin_answers(self.rank)
        self._thread = threading.Thread(target=self._run, name="accelerate-hang-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        # A process that was forked does not have it.
        if self._thread.is_alive():
            self._thread.join(STOP)
            self._progress()

    def _run(self) -> None:
        glance = min(self.interval, max(GLANCE, self.world / GLANCES))
        # The store is gone, or the group, where these are raised: the run is at its end.
        with contextlib.suppress(RuntimeError, ValueError, ConnectionError):
            # A separate connection: calls on one connection wait for each other.
            self._store = default_connection().store
            answers = Answers(self._store, self.rank, self._run_number)
            begin = time.monotonic()
            while not self._ended.wait(glance):
                answers.look()
                for call in on_glance:
                    call(self._store)
                now = time.monotonic()
                if now - begin > self.interval + ABSENCE:
                    self._progress()
                if now - begin >= self.interval:
                    self._look()
                    begin = time.monotonic()
            answers.end()

    def _look(self) -> None:
        self._answer()
        if not self.limit or self._moves():
            return
        stood = time.monotonic() - self._since
        if stood > COMPARED_AFTER * self.interval:
            self._compare()
        due = self._due
        if self.rank:
            # Rank 0 comes first, so that its output has the report where it stands itself.
            due += 2 * self.interval
        if stood <= due:
            return
        reports = int(self._store.add("accelerate/hang_reports", 0))
        if newest(recorded()) != self._newest:
            # Collectives of torch in a loop without any of this package.
            self._progress()
        elif reports > self._reports:
            # Another rank has reported since.
            self._reports = reports
            self._due = 2 * max(stood, self.limit)
        else:
            self._report()

    def _moves(self) -> bool:
        """Whether this rank has made progress since the last call."""
        signs = (LEDGER.count, marks.batches_read())
        if signs == self._signs:
            return False
        self._signs = signs
        self._progress()
        return True

    def _progress(self) -> None:
        if self._reported and not marks.has_failed():
            logger.warning("The run continues after %.0f s.", time.monotonic() - self._since)
        self._since = time.monotonic()
        self._cpu = time.process_time()
        self._due = self.limit
        self._reported = 0.0
        self._newest = self._mismatches = None

    def _compare(self) -> None:
        """Compare the collectives in which the ranks wait, once; report if they differ, here or on other ranks."""
        if self._newest is None:
            self._reports = int(self._store.add("accelerate/hang_reports", 0))
            self._mismatches = int(self._store.add("accelerate/mismatches", 0))
            self._patience = 0
            if self.rank:
                self._patience = PATIENCE
            self._children = _children_cpu()
            calls = recorded()
            self._newest = newest(calls)
            differs = False
            for name, text in compared(calls).items():
                if not self._is_first(f"compared/{name}", text):
                    differs = True
            if differs:
                self._store.add("accelerate/mismatches", 1)
        if self._mismatches is None:
            return
        if int(self._store.add("accelerate/mismatches", 0)) == self._mismatches:
            return
        if self._patience:
            self._patience -= 1
            return
        self._mismatches = None
        if int(self._store.add("accelerate/hang_reports", 0)) == self._reports:
            self._report()

    def _is_first(self, name: str, value: str) -> bool:
        """Whether no rank has written another value to a key of the store. This rank writes its own if it is empty."""
        written = self._store.compare_set(f"accelerate/{name}", "", value)
        return bool(written.decode() == value)

    # -- questions and answers

    def _answer(self) -> None:
        """Answer the last request of any rank."""
        number = int(self._store.add("accelerate/where", 0))
        if number >= CLOSING:
            self._ended.set()
        elif number > self._answered:
            self._answered = number
            text = stacks.dump()
            # The file first: it is there when the report is out.
            folder = stacks.write(self._store, self.rank, [*_collectives(), text])
            self.folder = folder or self.folder
            status = json.dumps(self._status(text))
            self._store.set(f"accelerate/where/{number}/{self.rank}", status)

    def request(self, ranks: list[int]) -> dict[int, Status]:
        """The status of `ranks`; one that does not answer is left out. Raises RuntimeError if the store is gone."""
        store = self._store or default_connection().store
        number = int(store.add("accelerate/where", 1))
        keys = {rank: f"accelerate/where/{number}/{rank}" for rank in ranks}
        limit = 2 * self.interval + 1.0
        for waited in pauses(self.world, limit):
            if threading.current_thread() is self._thread:
                self._answer()
            if waited >= limit or self._ended.is_set():
                break
            if store.check(list(keys.values())):
                break
        statuses = {}
        for rank, key in keys.items():
            if store.check([key]):
                statuses[rank] = json.loads(store.get(key))
        return statuses

    def _report(self) -> None:
        """Ask all ranks, and print what follows, unless another rank does."""
        since = self._since
        if not self._is_first(f"hang_report/{self._reports}", str(self.rank)):
            return
        folder = stacks.folder(self._store)
        statuses = self.request(list(range(self.world)))
        self._reports = int(self._store.add("accelerate/hang_reports", 1))
        # While the ranks answered, this one may have moved on, or the run may have ended.
        if self._ended.is_set() or self._moves() or self._since != since:
            return
        stood = time.monotonic() - since
        self._due = 2 * max(stood, self.limit)
        absent = {}
        for rank in range(self.world):
            if rank not in statuses:
                absent[rank] = marks.state_of(rank, self._store)
        text = explain(statuses, absent)
        if text is None:
            return
        if folder:
            text += (
                f"\n  The stacks and the last collectives of each rank: {folder} (on its machine)"
            )
        if any(status["child"] for status in statuses.values() if not _waiting(status)):
            # It may be as it should, or a child in an endless loop.
            messages.show(text)
            return
        self._reported = stood
        logger.warning("%s", text)
        for call in on_report:
            call(text)

    def _status(self, text: str) -> Status:
        """Where this process is, in plain JSON data.

        line, within, calls: as in `StackPlace`. is_debugged: in a debugger. child: a child process that computes.
        seconds: since the last progress; cpu: those of them on a CPU.
        call, before: the collective of this package in which it is, and those before it.
        pending, recent, last: torch's collectives, and the number of the last one in each group.
        """
        entry = LEDGER.current()
        own_call = None
        if entry is not None:
            own_call = {
                "operation": entry.operation,
                "data": entry.data_in_words(),
                "at": entry.place(),
            }
        calls = recorded()
        seconds = time.monotonic() - self._since
        # One that was begun a moment ago is under way.
        moment = 2 * self.interval
        pending = []
        if seconds > moment:
            pending = [call for call in calls if call.is_pending and call.age > moment]
        return {
            **stacks.place_in(text, self._watched)._asdict(),
            "is_debugged": stacks.has_debugger(text, self._watched),
            "child": self._child_at_work(QUIET * seconds),
            "seconds": seconds,
            "cpu": time.process_time() - self._cpu,
            "call": own_call,
            "before": LEDGER.ended(BEFORE),
            "pending": [call._asdict() for call in pending[:LISTED]],
            "recent": [call._asdict() for call in calls[-LISTED:]],
            "last": newest(calls),
        }

    def _child_at_work(self, least: float) -> str:
        """The busiest child process of the stand-still, if all had more than so many seconds on a CPU."""
        seconds = {pid: cpu - self._children.get(pid, 0.0) for pid, cpu in _children_cpu().items()}
        if sum(seconds.values()) <= least:
            return ""
        pid = max(seconds, key=seconds.__getitem__)
        with contextlib.suppress(psutil.Error):
            return f"{pid} ({shorten(' '.join(psutil.Process(pid).cmdline()), 80, placeholder=' ...')})"
        return str(pid)


def _children_cpu() -> dict[int, float]:
    """Seconds on a CPU of each process that this one has started, and that still runs."""
    seconds = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            seconds[child.pid] = sum(child.cpu_times()[:2])
    return seconds


def _collectives() -> list[str]:
    """The last collectives of this process, for its file."""
    now = time.monotonic()
    lines = [
        "",
        "Collectives of accelerate, the last one at the end: operation, data, line, when it began",
    ]
    for entry in list(LEDGER.entries)[-LISTED:]:
        age = f"{now - entry.entered:.1f} s ago, {'not ' * (entry.left is None)}ended"
        lines.append(f"  {entry.operation} {entry.data_in_words()}  {entry.place()}  {age}")
    lines += [
        "",
        "torch collectives (the flight recorder): group, number, operation, data, when it began",
    ]
    for call in recorded()[-LISTED:]:
        what = f"{'message ' * call.is_p2p}{call.number}  {call.operation} {call.data}"
        age = f"{call.age:.1f} s ago, {'not ' * call.is_pending}ended"
        lines.append(f"  {call.group}  {what}  {age}")
    return [*lines, ""]


def compared(calls: list[Recorded]) -> dict[str, str]:
    """What every rank of a group does in its last collectives, up to the oldest that has not ended: name -> text."""
    texts: dict[str, str] = {}
    for group in {call.group for call in calls}:
        begun: deque[Recorded] = deque(maxlen=COMPARED)
        for call in calls:
            if call.group != group or call.is_p2p:
                continue
            begun.append(call)
            if call.is_pending:
                break
        for call in begun:
            text = call.operation
            if text in SAME_SHAPES:
                text = f"{text} of {call.data}"
            texts[f"{group}/{call.number}"] = text
    return texts


# -- the text of a report


def explain(statuses: Mapping[int, Status], absent: Mapping[int, str]) -> str | None:
    """Explain a stand-still.

    Args:
        statuses: those of the ranks that have answered.
        absent: the other ranks, and why they do not answer, as "has ended"; empty where that is not known.

    Returns:
        The text; None where no rank waits for another, or for one in a debugger.
    """
    waiting: dict[int, str] = {}
    elsewhere: dict[int, Status] = {}
    for rank, status in statuses.items():
        text = _waiting(status)
        if text:
            waiting[rank] = text
        else:
            elsewhere[rank] = status
    if not waiting or any(status["is_debugged"] for status in elsewhere.values()):
        return None
    seconds = f"{max(statuses[rank]['seconds'] for rank in waiting):.0f} s"
    clauses = []
    silent = [rank for rank, why in absent.items() if not why]
    if silent:
        clauses.append(
            f"no answer from {ranks_in_words(silent)} (stopped, killed, or in a call that holds the interpreter lock)"
        )
    clauses += [f"rank {rank} {why}" for rank, why in absent.items() if why][:LISTED]
    clauses += [f"rank {rank} {_elsewhere(status)}" for rank, status in elsewhere.items()][:LISTED]
    waits = []
    for ranks, text in by_text(waiting):
        singular = "s" * ranks.startswith("rank ")
        waits.append(f"{ranks} wait{singular} in {text}")
    if elsewhere and not absent:
        begin = "The run has waited"
    else:
        begin = "The run stands still for"
    lines = [f"{begin} {seconds}:"]
    lines += [f"  - {line}" for line in clauses + waits]
    differing = _differences(statuses, waiting)
    before = {}
    for rank, status in statuses.items():
        if differing or rank in elsewhere:
            before[rank] = ", ".join(status["before"])
    lines += [f"  - {line}" for line in differing]
    lines += [f"  - before, on {ranks}: {text}" for ranks, text in by_text(before) if text]
    if differing or (not clauses and len(waits) > 1) or marks.HAS_ENDED in absent.values():
        lines.append(f"  {SAME_CALLS}")
    elif not clauses:
        lines.append(
            "  The ranks agree on what they do. Look at the network, and at the devices and their logs."
        )
    return "\n".join(lines)


def status_line(status: Status) -> str:
    """Where one rank is, for a line of another message."""
    text = _waiting(status)
    if text:
        return f"waits in {text}"
    return _elsewhere(status)


def _waiting(status: Status) -> str:
    """The collective in which a rank waits, and the user's line; empty if it is elsewhere."""
    if status["call"]:
        return f"`{status['call']['operation']}` ({status['call']['at']})"
    if not status["pending"]:
        return ""
    text = status["pending"][0]["operation"]
    if status["calls"]:
        text += f" of `{status['calls']}`"
    return f"{text} ({status['line']})"


def _elsewhere(status: Status) -> str:
    text = status["line"]
    function = status["calls"] or status["within"]
    if function:
        text = f"`{function}` ({text})"
    text = f"is in {text}, with {status['cpu']:.1f} s of CPU time in {status['seconds']:.0f} s"
    if status["child"]:
        text += f", while its child process {status['child']} computes"
    return text


def _differences(statuses: Mapping[int, Status], waiting: Iterable[int]) -> list[str]:
    """What differs in the collectives of the same number in a process group, at the oldest that a rank waits in."""
    oldest: dict[str, int] = {}
    for rank in waiting:
        for call in statuses[rank]["pending"]:
            if not call["is_p2p"]:
                group, number = call["group"], call["number"]
                oldest[group] = min(number, oldest.get(group, number))
    lines = []
    for group, number in sorted(oldest.items()):
        what = f"collective {number} of the process group {group}"
        operations = {}
        texts = {}
        for rank, status in statuses.items():
            call = _call_of(status, group, number)
            if call is not None:
                operations[rank] = call["operation"]
                texts[rank] = _call_in_words(call, status, group, number)
        names = set(operations.values())
        differ = len(names) > 1
        if names <= set(SAME_SHAPES):
            differ = len(set(texts.values())) > 1
        if differ:
            shown = [f"{text} on {ranks}" for ranks, text in by_text(texts)]
            lines.append(f"{what} differs: {', '.join(shown)}")
        behind = [rank for rank in waiting if statuses[rank]["last"].get(group, number) < number]
        if behind and texts:
            text = next(iter(texts.values()))
            lines.append(f"{ranks_in_words(behind)} did not begin {what} ({text})")
    return lines


def _call_of(status: Status, group: str, number: int) -> dict[str, Any] | None:
    """What torch's flight recorder has of a rank's collective; None where it has not begun, or is forgotten."""
    latest = None
    for call in (*status["pending"], *status["recent"]):
        if call["group"] == group and call["number"] == number and not call["is_p2p"]:
            latest = call
    return latest


def _call_in_words(call: dict[str, Any], status: Status, group: str, number: int) -> str:
    if status["call"] and status["last"].get(group) == number:
        # The call of this package that sends it says more.
        call = status["call"]
    text = str(call["operation"])
    if call["data"]:
        text += f" of {call['data']}"
    return text

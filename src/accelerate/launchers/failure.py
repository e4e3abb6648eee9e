# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first, why, and how the others ended: a summary for the console, and JSON for programs."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from ..core.files import atomic_write
from ..core.objects import spans
from . import tracebacks
from .process import Rank
from .streams import RankEnd
from .tracebacks import LOST, OWN

# A rank that has ended: supervised here, or reported by another program's task.
Ended = TypeVar("Ended", Rank, RankEnd)
_SIGNAL_WORDS = {
    signal.SIGSEGV: "invalid memory access: a defect in native code, an extension or the driver",
    signal.SIGABRT: "native code called abort(), as gloo does when ranks call different collectives",
    signal.SIGBUS: "shared memory (/dev/shm) is exhausted, or a memory-mapped file was truncated",
    signal.SIGILL: "an instruction that this processor does not support",
    signal.SIGFPE: "an arithmetic error in native code",
    signal.SIGTERM: "requested by another process, as a job scheduler or kill",
    signal.SIGINT: "interrupted",
}


class Failure(NamedTuple):
    """The first rank of a run that failed; `code` is its exit code, negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    code: int
    cause: str
    host: str
    time: float
    traceback: str = ""
    shown: bool = False
    log: str | None = None
    others: Mapping[int, str] = MappingProxyType({})
    # The program that started the ranks where this launcher did not; `pid` is its process id then.
    starter: str = ""
    # Where the first rank ended early without an error, the code of the rank that failed because of that.
    consequence: int = 0

    @property
    def exit_code(self) -> int:
        """The launcher's exit code."""
        return exit_code(self.code) or exit_code(self.consequence)

    def lines(self) -> list[str]:
        """The summary for the console."""
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank"
        head, *more = self.cause.splitlines() or [""]
        lines = [f"accelerate launch: {who} failed: {head}", *(f"    {line}".rstrip() for line in more)]
        pid = f"pid {self.pid}" if not self.starter else f"{self.starter} (pid {self.pid})"
        log = f", log {self.log}" if self.log else ""
        lines.append(f"  host {self.host}, {pid}, exit code {exit_code(self.code)}{log}")
        if self.others:
            lines.append(f"  other ranks: {_grouped(self.others)}")
        return lines

    def write(self, path: str) -> None:
        """Write the failure as JSON."""
        import json

        content = {key: value for key, value in self._asdict().items() if key not in ("shown", "consequence")}
        content |= {"exit_code": self.exit_code, "signal": -self.code if self.code < 0 else None}
        content["others"] = dict(self.others)
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(path).expanduser(), "w") as file:
            json.dump(content, file, indent=2)


def exit_code(code: int) -> int:
    """The launcher's exit code for a process's: the same, or as in shells 128 plus the number of the signal."""
    return code if code >= 0 else 128 - code


def report(ranks: Sequence[Rank], first: Rank) -> str:
    """The first failure in one text, for the consoles of the other machines."""
    cause = (
        early_cause(_others(ranks, first))
        if first.code == 0
        else cause_of(first.exit_code, _last_output(first), first.rank)
    )
    return f"rank {first.rank} on {first.host} (pid {first.popen.pid}) failed: {cause}"


def blame(rank: Rank) -> int:
    """How much a failed rank's last output points to another rank: see `tracebacks.blame`."""
    return tracebacks.blame(_last_output(rank), rank.rank) if rank.exit_code > 0 else OWN


def find_first(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that failed first; None where none did.

    A rank that ended without an error counts as the first where the others failed only because they needed it.
    """
    first = _first_failed(ranks)
    if first is None or (level := blame(first)) == OWN:
        return first
    early = sorted(
        (rank for rank in ranks if rank.code == 0 and not rank.spec.starter), key=lambda rank: rank.ended_at or 0
    )
    return _explaining(early, level, _last_output(first), first.rank) or first


def _first_failed(ranks: Sequence[Rank]) -> Rank | None:
    """The first of the failed ranks, those first whose output points to no other rank.

    Ranks that lost the connection may write their tracebacks before the cause ends.
    """
    failed = [rank for rank in ranks if rank.exit_code and rank.failed_at is not None]
    return min(failed, key=lambda rank: (blame(rank), rank.failed_at), default=None)


def _explaining(early: Sequence[Ended], level: int, output: str, rank: int) -> Ended | None:
    """The one of the ranks that ended early, in that order, which explains the last output of a failed rank."""
    if level != LOST:
        named = tracebacks.named_ranks(tracebacks.message_of(output, rank))
        early = [end for end in early if end.rank in named]
    return next(iter(early), None)


def _others(ranks: Sequence[Rank], first: Rank) -> list[int]:
    """The ranks that had not ended without an error when the first one had."""
    return [rank.rank for rank in ranks if rank is not first and rank.code != 0]


def early_cause(others: Sequence[int]) -> str:
    """The error of a rank that ended with exit code 0 before `others`."""
    return (
        f"it ended with exit code 0 while {_numbered(others)} still needed it. Every rank must run the same number of "
        "steps, reach the same collective operations and leave the script at the same point."
    )


def describe(ranks: Sequence[Rank], first: Rank, oom_kills: int) -> Failure:
    """Everything about the first failure. Removes the delayed tracebacks of all ranks from their streams."""
    ended_early = first.code == 0
    # Where the first rank ended without an error, the traceback of a rank that needed it shows where that was.
    source = (_first_failed(ranks) if ended_early else None) or first
    output = _last_output(source)
    others = {
        rank.rank: _outcome(rank, source, output)
        for rank in ranks
        if rank is not first and (rank.code or rank.stopped or ended_early)
    }
    # Where a process took long to end after its traceback, that was shown already.
    shown = source.error.last_traceback if source.exit_code > 0 else b""
    delayed = source.error.take_delayed()
    traceback = (delayed or shown).decode(errors="replace")
    if ended_early:
        cause = early_cause(_others(ranks, first))
    else:
        cause = cause_of(
            first.exit_code, traceback or first.error.tail.decode(errors="replace"), first.rank, oom_kills
        )
    failure = Failure(
        rank=first.rank,
        local_rank=first.spec.local_rank,
        pid=first.popen.pid,
        code=first.exit_code,
        cause=cause,
        host=first.host,
        time=time.time(),
        traceback=traceback,
        shown=not delayed,
        log=str(first.log_folder / "stderr.log") if first.log_folder else None,
        others=others,
        consequence=source.exit_code,
    )
    for rank in ranks:
        rank.error.take_delayed()
    return _of_starter(first, failure) if first.spec.starter else failure


def end_report(rank: int, code: int) -> str:
    """The line in which a rank started by another program reports its end; code is negative for a signal."""
    return f"accelerate launch: rank {rank} ended, code {code}\n"


def first_cause(ends: Sequence[RankEnd], text: str) -> tuple[RankEnd, str] | None:
    """Which of the ranks that ended was the first cause, and why; None where none failed.

    Args:
        ends: in the order of the reports.
        text: the last output of the ranks before the first failure was reported.
    """
    failed = next((end for end in ends if end.code), None)
    if failed is None:
        return None
    # srun labels each line with its task.
    labelled = re.findall(rf"^{failed.rank}: .*", text, re.MULTILINE)
    output = "\n".join(labelled) if labelled else text
    if failed.code > 0 and (level := tracebacks.blame(output, failed.rank)) != OWN:
        early = [end for end in ends[: ends.index(failed)] if end.code == 0]
        if (end := _explaining(early, level, output, failed.rank)) is not None:
            return end, early_cause([failed.rank])
    return failed, cause_of(failed.code, output, failed.rank)


def _of_starter(starter: Rank, failure: Failure) -> Failure:
    """The failure of the rank that failed under a starter, from the starter's, without the starter's own messages."""
    failure = failure._replace(starter=starter.spec.starter, rank=-1)
    ends = starter.error.ends
    # Output after the first reported failure comes from the starter and from ranks that it stopped.
    text = starter.error.before_failure.decode(errors="replace")
    if tracebacks.HEADER in text:
        failure = failure._replace(traceback=text)
    found = first_cause(ends, text or starter.error.tail.decode(errors="replace"))
    if found is None:
        return failure
    (rank, code), cause = found
    consequence = next(end.code for end in ends if end.code)
    return failure._replace(rank=rank, code=code, cause=cause, consequence=consequence)


def _outcome(rank: Rank, first: Rank, output: str) -> str:
    """How another rank ended, in a few words."""
    if rank.code == 0 and not rank.stopped:
        return "ended with exit code 0"
    if rank.failed_at is None:
        return "stopped by the launcher"
    if rank.exit_code < 0:
        return f"killed by {_signal_name(-rank.exit_code)}"
    message = tracebacks.message_of(_last_output(rank), rank.rank)
    if not message:
        return f"ended with exit code {rank.exit_code}"
    if tracebacks.blame(_last_output(rank), rank.rank) == LOST:
        return tracebacks.loss_of(message)
    if tracebacks.fingerprint(message) == tracebacks.fingerprint(tracebacks.message_of(output, first.rank)):
        return "failed with the same error"
    return tracebacks.first_line(message)


def _grouped(others: Mapping[int, str]) -> str:
    """The outcomes in one line, with the ranks of the same outcome together."""
    by_outcome: dict[str, list[int]] = {}
    for rank, outcome in sorted(others.items()):
        by_outcome.setdefault(outcome, []).append(rank)
    listed = [f"{_numbered(ranks)}: {outcome}" for outcome, ranks in list(by_outcome.items())[:8]]
    if len(by_outcome) > 8:
        listed.append(f"and {sum(len(ranks) for ranks in list(by_outcome.values())[8:])} more")
    return "; ".join(listed)


def _numbered(ranks: Sequence[int]) -> str:
    """Format ranks as words, such as "ranks 0 to 5, 7"."""
    listed = [
        str(low) if low == high else f"{low}{' to ' if high > low + 1 else ', '}{high}"
        for low, high in spans(sorted(ranks))
    ]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(listed)}" if listed else "other ranks"


def _last_output(rank: Rank) -> str:
    return (rank.error.delayed or rank.error.tail).decode(errors="replace")


def cause_of(code: int, output: str, rank: int | None = None, oom_kills: int = 0) -> str:
    """Why a process ended with this code, given its last output. The message of an exception is complete."""
    if code >= 0:
        if message := tracebacks.message_of(output, rank):
            return message + _remark(output)
        last = next((line.strip() for line in reversed(tracebacks.plain_lines(output, rank)) if line.strip()), "")
        suffix = f"; the last line of its standard error: {tracebacks.first_line(last)}" if last else ""
        return f"it ended with exit code {code}{suffix}"
    number = -code
    name = _signal_name(number)
    if number == signal.SIGKILL:
        if oom_kills:
            return f"killed by {name}: out of memory (recorded by the kernel for this control group)"
        return f"killed by {name}: by the kernel when memory runs out, by a job scheduler, or by hand (see dmesg)"
    meaning = next((words for known, words in _SIGNAL_WORDS.items() if known == number), None)
    place = tracebacks.crash_place(output)
    return f"killed by {name}" + (f": {meaning}" if meaning else "") + (f" (at {place})" if place else "")


def _remark(output: str) -> str:
    """What the message of an exception leaves out."""
    if "torch/utils/data/dataloader.py" in output and "multiprocessing/connection.py" in output:
        return "\nA worker process of the data loader has died: killed for lack of memory, or crashed."
    return ""


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """The number of processes in this control group that the kernel killed for lack of memory."""
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)", events, re.MULTILINE)
    return int(found.group(1)) if found else 0

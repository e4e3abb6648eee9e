# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first, why, and how the others ended: a summary for the console, and JSON for programs."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..core.files import atomic_write
from ..core.objects import spans
from . import tracebacks
from .process import Rank
from .tracebacks import LOST, Cause, End, first_failure

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
        # Lines of a traceback that is right above are not repeated.
        more = [
            line for line in more if self.shown or not self.traceback or line not in self.traceback
        ]
        lines = [f"accelerate: {who} failed: {head}", *(f"    {line}".rstrip() for line in more)]
        if not self.starter:
            pid = f"pid {self.pid}"
        else:
            pid = f"{self.starter} (pid {self.pid})"
        log = f", log {self.log}" if self.log else ""
        lines.append(f"  host {self.host}, {pid}, exit code {exit_code(self.code)}{log}")
        if self.others:
            lines.append(f"  other ranks: {_grouped(self.others)}")
        return lines

    def write(self, path: str) -> None:
        """Write the failure as JSON."""
        import json

        content = {
            key: value
            for key, value in self._asdict().items()
            if key not in ("shown", "consequence")
        }
        content |= {"exit_code": self.exit_code, "signal": -self.code if self.code < 0 else None}
        content["others"] = dict(self.others)
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(path).expanduser(), "w") as file:
            json.dump(content, file, indent=2)


def exit_code(code: int) -> int:
    """The launcher's exit code for a process's: the same, or as in shells 128 plus the number of the signal."""
    if code >= 0:
        return code
    return 128 - code


def report(ranks: Sequence[Rank], cause: Cause) -> str:
    """The first failure in one text, for the consoles of the other machines."""
    first = next(rank for rank in ranks if rank.rank == cause.end.rank)
    if first.code == 0:
        text = _early(ranks, first)
    else:
        text = cause_of(cause.end.code, cause.end.output, first.rank)
    return f"rank {first.rank} on {first.host} (pid {first.popen.pid}) failed: {text}"


def find_first(ranks: Sequence[Rank]) -> Cause | None:
    """The first failure of supervised ranks; None where none failed by itself."""
    ends = [
        End(rank.rank, rank.exit_code, rank.failed_at or rank.ended_at or 0.0, _last_output(rank))
        for rank in ranks
        if (
            rank.failed_at is not None
            if rank.exit_code
            else rank.code == 0 and not rank.spec.starter
        )
    ]
    return first_failure(ends)


def _early(ranks: Sequence[Rank], first: Rank) -> str:
    return early_cause([rank.rank for rank in ranks if rank is not first and rank.code != 0])


def early_cause(others: Sequence[int]) -> str:
    """The error of a rank that ended with exit code 0 before `others`."""
    return (
        f"it ended with exit code 0 while {_numbered(others)} still needed it. Every rank must run the same number of "
        "steps, reach the same collective operations and leave the script at the same point."
    )


def describe(ranks: Sequence[Rank], cause: Cause, oom_kills: int) -> Failure:
    """Everything about the first failure. Removes the delayed tracebacks of all ranks from their streams."""
    by_number = {rank.rank: rank for rank in ranks}
    first, source = by_number[cause.end.rank], by_number[cause.source.rank]
    ended_early = first.code == 0
    output = cause.source.output
    others = {
        rank.rank: _outcome(rank, source, output)
        for rank in ranks
        if rank is not first and (rank.code or rank.stopped or ended_early)
    }
    # Where a process took long to end after its traceback, that was shown already.
    if source.exit_code > 0:
        shown = source.error.last_traceback
    else:
        shown = b""
    delayed = source.error.take_delayed()
    traceback = (delayed or shown).decode(errors="replace")
    last = traceback or first.error.tail.decode(errors="replace")
    if ended_early:
        text = _early(ranks, first)
    else:
        text = cause_of(first.exit_code, last, first.rank, oom_kills)
    failure = Failure(
        rank=first.rank,
        local_rank=first.spec.local_rank,
        pid=first.popen.pid,
        code=first.exit_code,
        cause=text,
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
    if first.spec.starter:
        return _of_starter(first, failure)
    return failure


def end_report(rank: int, code: int) -> str:
    """The line in which a rank started by another program reports its end; code is negative for a signal."""
    return f"accelerate: rank {rank} ended, code {code}\n"


def _of_starter(starter: Rank, failure: Failure) -> Failure:
    """The failure of the rank that failed under a starter, from the starter's, without the starter's own messages."""
    failure = failure._replace(starter=starter.spec.starter, rank=-1)
    ends = starter.error.ends
    # Output after the first reported failure comes from the starter and from ranks that it stopped.
    text = starter.error.before_failure.decode(errors="replace")
    if tracebacks.HEADER in text:
        failure = failure._replace(traceback=text)
    failed = next((end for end in ends if end.code), None)
    if failed is None:
        return failure
    # srun labels each line with its task.
    output = text or starter.error.tail.decode(errors="replace")
    output = "\n".join(re.findall(rf"^{failed.rank}: .*", output, re.MULTILINE)) or output
    before = ends[: ends.index(failed) + 1]
    cause = first_failure(
        [End(end.rank, end.code, number, output) for number, end in enumerate(before)]
    )
    assert cause is not None
    if cause.end.code == 0:
        text = early_cause([failed.rank])
        return failure._replace(rank=cause.end.rank, code=0, cause=text, consequence=failed.code)
    return failure._replace(
        rank=failed.rank, code=failed.code, cause=cause_of(failed.code, output, failed.rank)
    )


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
    if tracebacks.blame(_last_output(rank), rank.rank) == LOST or tracebacks.is_lost_connection(
        message
    ):
        return tracebacks.loss_of(message)
    if message == tracebacks.message_of(output, first.rank):
        return "failed with the same error"
    return tracebacks.first_line(message)


def _grouped(others: Mapping[int, str]) -> str:
    """The outcomes in one line, with the ranks of the same outcome together."""
    by_outcome: dict[str, list[int]] = {}
    for rank, outcome in sorted(others.items()):
        by_outcome.setdefault(outcome, []).append(rank)
    return "; ".join(f"{_numbered(ranks)}: {outcome}" for outcome, ranks in by_outcome.items())


def _numbered(ranks: Sequence[int]) -> str:
    """Format ranks as words, such as "ranks 0 to 5, 7"."""
    listed = [
        str(low) if low == high else f"{low}{' to ' if high > low + 1 else ', '}{high}"
        for low, high in spans(sorted(ranks))
    ]
    if listed:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(listed)}"
    return "other ranks"


def _last_output(rank: Rank) -> str:
    return (rank.error.delayed or rank.error.tail).decode(errors="replace")


def cause_of(code: int, output: str, rank: int | None = None, oom_kills: int = 0) -> str:
    """Why a process ended with this code, given its last output. The message of an exception is complete."""
    if code >= 0:
        message = tracebacks.message_of(output, rank)
        if message:
            if (
                "torch/utils/data/dataloader.py" in output
                and "multiprocessing/connection.py" in output
            ):
                message += "\nA worker process of the data loader has died: killed for lack of memory, or crashed."
            return message
        last = next(
            (
                line.strip()
                for line in reversed(tracebacks.plain_lines(output, rank))
                if line.strip()
            ),
            "",
        )
        if last:
            suffix = f"; the last line of its standard error: {tracebacks.first_line(last)}"
        else:
            suffix = ""
        return f"it ended with exit code {code}{suffix}"
    number = -code
    name = _signal_name(number)
    if number == signal.SIGKILL:
        if oom_kills:
            return (
                f"killed by {name}: out of memory (recorded by the kernel for this control group)"
            )
        return f"killed by {name}: by the kernel when memory runs out, by a job scheduler, or by hand (see dmesg)"
    meaning = next((words for known, words in _SIGNAL_WORDS.items() if known == number), None)
    place = tracebacks.crash_place(output)
    return (
        f"killed by {name}"
        + (f": {meaning}" if meaning else "")
        + (f" (at {place})" if place else "")
    )


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
    if found:
        return int(found.group(1))
    return 0

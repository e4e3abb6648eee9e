# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first, why, and who was only its victim: told once, in words, and as JSON."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..core.files import atomic_write
from .process import Rank

# What a rank says whose partner is gone. Such a rank is a victim where another one failed of itself.
_PARTNER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|connection.*closed|DistBackendError|"
    r"DistStoreError|DistNetworkError|recvValue|Socket (Timeout|closed)|has been aborted|NCCL (error|communicator)|"
    r"Connection refused|gloo::"
)
# How it is known which task of a foreign starter failed first, and how: what a watched rank says, what Slurm does.
_TOLD = re.compile(
    r"^accelerate launch: rank (\d+) ended, code (-?\d+)\n|^srun: error: .*: task (\d+): Exited with exit code (\d+)",
    re.MULTILINE,
)
# What srun, then torch put before each line of a traceback when several ranks run.
_MARKS = re.compile(r"^(\d+: )?(\[rank\d+\]: ?)?")
_SIGNAL_WORDS = {
    signal.SIGSEGV: "it touched memory that is not its own: a defect in native code, an extension or the driver",
    signal.SIGABRT: "native code gave up (abort)",
    signal.SIGBUS: "a memory-mapped file or shared memory (/dev/shm) is exhausted or was cut short",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGFPE: "an arithmetic error in native code",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGINT: "interrupted",
}


@dataclass
class Failure:
    """The first failing rank of a run. code: its exit code, negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    code: int
    cause: str
    host: str = field(default_factory=socket.gethostname)
    traceback: str = ""
    shown: bool = False
    log: str | None = None
    time: float = field(default_factory=time.time)
    others: dict[int, str] = field(default_factory=dict)
    # The program that started the ranks, where this launcher did not: pid and code are its own.
    starter: str = ""

    @property
    def exit_code(self) -> int:
        return exit_code(self.code)

    def lines(self) -> list[str]:
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank"
        told = [f"accelerate launch: {who} failed: {self.cause}"]
        pid = f"pid {self.pid}" if not self.starter else f"{self.starter} (pid {self.pid})"
        told.append(f"  host {self.host}, {pid}, exit code {self.exit_code}")
        if self.log:
            told.append(f"  log  {self.log}")
        if self.others:
            told.append("  the other ranks are its victims:" if len(self.others) > 1 else "  the other is its victim:")
            told += [f"    rank {rank}: {what}" for rank, what in sorted(self.others.items())[:16]]
            if len(self.others) > 16:
                told.append(f"    and {len(self.others) - 16} more")
        return told

    def write(self, path: str) -> None:
        """The same as JSON, for programs."""
        told = {key: value for key, value in asdict(self).items() if key != "shown"}
        told |= {"exit_code": self.exit_code, "signal": -self.code if self.code < 0 else None}
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(path).expanduser(), "w") as file:
            json.dump(told, file, indent=2)


def exit_code(code: int) -> int:
    """What the launcher returns for a process's code: its own, or 128 and the signal's number as shells do."""
    return code if code >= 0 else 128 - code


def in_a_line(rank: Rank) -> str:
    """A failed rank for the other machines' consoles."""
    cause = cause_of(rank.exit_code, _last_words(rank))
    return f"rank {rank.rank} on {socket.gethostname()} (pid {rank.popen.pid}) failed: {cause}"


def speaks_of_lost_partner(words: str) -> bool:
    """Whether an error only says that another rank is gone."""
    return _PARTNER_LOST.search(words) is not None


def is_partner_lost(rank: Rank) -> bool:
    """Whether a failed rank only says that another one is gone."""
    return rank.exit_code > 0 and speaks_of_lost_partner(_last_words(rank))


def find_first(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that failed first of itself, or None where no rank did."""
    failed = [rank for rank in ranks if rank.exit_code and rank.trouble_at is not None]
    # A killed rank is noticed at its very end, its victims write their tracebacks a moment later.
    return min(failed, key=lambda rank: (is_partner_lost(rank), rank.trouble_at), default=None)


def describe(ranks: Sequence[Rank], first: Rank, oom_kills: int) -> Failure:
    """Everything about the first failure. Takes the traceback that was held back."""
    held = first.error.drop()
    # Where a process took long to end after its traceback, that was shown already: only programs are told it again.
    traceback = (held or _last_shown(first)).decode(errors="replace")
    failure = Failure(
        rank=first.rank,
        local_rank=first.spec.local_rank,
        pid=first.popen.pid,
        code=first.exit_code,
        cause=cause_of(first.exit_code, traceback or first.error.tail.decode(errors="replace"), oom_kills),
        host=first.host,
        traceback=traceback,
        shown=not held,
        log=str(first.log_folder / "stderr.log") if first.log_folder else None,
    )
    if first.spec.starter:
        _of_starter(first, failure)
    for rank in ranks:
        if rank is not first and (rank.code or rank.stopped):
            failure.others[rank.rank] = _fate(rank, failure)
    return failure


def _last_shown(rank: Rank) -> bytes:
    """The traceback that was shown too early, where it is the last thing the process has said."""
    shown = rank.error.shown.rstrip()
    return shown if rank.exit_code > 0 and rank.error.tail.rstrip().endswith(shown[-1024:]) else b""


def told_by_rank(rank: int, code: int) -> str:
    """The line in which a rank under a foreign starter tells its end; code is negative for a signal."""
    return f"accelerate launch: rank {rank} ended, code {code}\n"


def _of_starter(starter: Rank, failure: Failure) -> None:
    """Make the failure of a starter that of the rank that failed under it; what the starter adds is left out."""
    words = starter.error.tail.decode(errors="replace")
    found = _TOLD.search(words)
    failure.starter, failure.rank = starter.spec.starter, -1
    if found is None:
        return
    failure.rank, failure.code = int(found.group(1) or found.group(3)), int(found.group(2) or found.group(4))
    if found.group(1):
        failure.traceback = failure.traceback.partition(found.group())[0]
        words = failure.traceback or words
    else:
        # srun marks lines with their task, and speaks before the last of the rank's own have come.
        words = "\n".join(re.findall(rf"^{failure.rank}: .*", words, re.MULTILINE))
    failure.cause = cause_of(failure.code, words)


def _fate(rank: Rank, failure: Failure) -> str:
    line = _error_line(rank.error.drop().decode(errors="replace"))
    if rank.trouble_at is None:
        return "stopped by the launcher"
    line = line or _error_line(rank.error.tail.decode(errors="replace"))
    if line and line == _error_line(failure.traceback):
        return "failed in the same way"
    if rank.exit_code < 0:
        return f"killed by {_signal_name(-rank.exit_code)}"
    return line or f"exit code {rank.exit_code}"


def _last_words(rank: Rank) -> str:
    return (rank.error.held or rank.error.tail).decode(errors="replace")


def _error_line(text: str) -> str:
    """The line of a traceback that names the exception; empty where there is no traceback."""
    if "Traceback (most recent call last)" not in text:
        return ""
    for line in reversed(text.rsplit("Traceback (most recent call last)", 1)[1].splitlines()):
        line = _MARKS.sub("", line)
        if re.match(r"[A-Za-z_][\w.]*(:|$)", line):
            return line[:300]
    return ""


def cause_of(code: int, words: str, oom_kills: int = 0) -> str:
    """Why a process ended with this code, in words; `words` is what it printed last."""
    if code >= 0:
        return _error_line(words) or f"it ended with exit code {code}"
    number = -code
    name = _signal_name(number)
    if number == signal.SIGKILL:
        if oom_kills:
            return f"killed by {name}: out of memory (the kernel's record of this control group says so)"
        return f"killed by {name}: by the kernel when memory runs out, by a job scheduler, or by hand (see dmesg)"
    meaning = next((words for known, words in _SIGNAL_WORDS.items() if known == number), None)
    return f"killed by {name}" + (f": {meaning}" if meaning else "")


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """How often the kernel has killed for lack of memory in this control group."""
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)", events, re.MULTILINE)
    return int(found.group(1)) if found else 0

# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first, why, and how the others ended: told once, in words, and as JSON."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..core.files import atomic_write
from . import tracebacks
from .process import Rank
from .tracebacks import LOST, OWN

# How it is known which task of a foreign starter failed first, and how: what a watched rank says, what Slurm does.
_TOLD = re.compile(
    r"^accelerate launch: rank (\d+) ended, code (-?\d+)\n|^srun: error: .*: task (\d+): Exited with exit code (\d+)",
    re.MULTILINE,
)
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
    # Where the first cause is a rank that ended too early without an error, the code of the one that failed for it.
    consequence: int = 0

    @property
    def exit_code(self) -> int:
        return exit_code(self.code) or exit_code(self.consequence)

    def lines(self) -> list[str]:
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank"
        head, *more = self.cause.splitlines() or [""]
        told = [f"accelerate launch: {who} failed: {head}", *(f"    {line}".rstrip() for line in more)]
        pid = f"pid {self.pid}" if not self.starter else f"{self.starter} (pid {self.pid})"
        log = f", log {self.log}" if self.log else ""
        told.append(f"  host {self.host}, {pid}, exit code {exit_code(self.code)}{log}")
        if self.others:
            told.append(f"  other ranks: {_grouped(self.others)}")
        return told

    def write(self, path: str) -> None:
        """The same as JSON, for programs."""
        told = {key: value for key, value in asdict(self).items() if key not in ("shown", "consequence")}
        told |= {"exit_code": self.exit_code, "signal": -self.code if self.code < 0 else None}
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(path).expanduser(), "w") as file:
            json.dump(told, file, indent=2)


def exit_code(code: int) -> int:
    """What the launcher returns for a process's code: its own, or 128 and the signal's number as shells do."""
    return code if code >= 0 else 128 - code


def report(ranks: Sequence[Rank], first: Rank) -> str:
    """The first failure for the other machines' consoles."""
    cause = (
        early_cause(_others(ranks, first))
        if first.code == 0
        else cause_of(first.exit_code, _last_words(first), first.rank)
    )
    return f"rank {first.rank} on {first.host} (pid {first.popen.pid}) failed: {cause}"


def blame(rank: Rank) -> int:
    """How much a failed rank's last words point at another one: see `tracebacks.blame`."""
    return tracebacks.blame(_last_words(rank), rank.rank) if rank.exit_code > 0 else OWN


def find_first(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that failed first, or None where none did.

    A rank that ended without an error is the first one where the others failed only because they needed it.
    """
    failed = [rank for rank in ranks if rank.exit_code and rank.trouble_at is not None]
    # A killed rank is noticed at its very end, while those that lost it write their tracebacks a moment later.
    ordered = sorted(failed, key=lambda rank: (blame(rank), rank.trouble_at))
    if not ordered:
        return None
    first = ordered[0]
    level = blame(first)
    early = [rank for rank in ranks if rank.code == 0 and not rank.spec.starter]
    if level != LOST:
        named = tracebacks.named_ranks(tracebacks.message_of(_last_words(first), first.rank)) if level else set()
        early = [rank for rank in early if rank.rank in named]
    return min(early, key=lambda rank: rank.ended_at or 0.0, default=first)


def _others(ranks: Sequence[Rank], first: Rank) -> list[int]:
    """The ranks that had not ended well when the first one had."""
    return [rank.rank for rank in ranks if rank is not first and rank.code != 0]


def early_cause(others: Sequence[int]) -> str:
    """What is wrong with a rank that ended without an error, but before `others`."""
    return (
        f"it ended with exit code 0 while {_numbered(others)} still needed it. Every rank must run the same number of "
        "steps, reach the same collective operations and leave the script at the same point."
    )


def describe(ranks: Sequence[Rank], first: Rank, oom_kills: int) -> Failure:
    """Everything about the first failure. Takes the traceback that was held back."""
    ended_early = first.code == 0
    # Where nothing failed on the first rank itself, the traceback of one that needed it shows where that was.
    speaker = first
    if ended_early:
        failed = [rank for rank in ranks if rank.exit_code and rank.trouble_at is not None]
        speaker = min(failed, key=lambda rank: (blame(rank), rank.trouble_at), default=first)
    # What happened to the others is read before their tracebacks are dropped.
    last_words = _last_words(speaker)
    fates = {
        rank.rank: _fate(rank, speaker, last_words)
        for rank in ranks
        if rank is not first and (rank.code or rank.stopped or ended_early)
    }
    held = speaker.error.drop()
    # Where a process took long to end after its traceback, that was shown already: only programs are told it again.
    traceback = (held or _last_shown(speaker)).decode(errors="replace")
    if ended_early:
        cause = early_cause(_others(ranks, first))
    else:
        words = traceback or first.error.tail.decode(errors="replace")
        cause = cause_of(first.exit_code, words, first.rank, oom_kills)
    failure = Failure(
        rank=first.rank,
        local_rank=first.spec.local_rank,
        pid=first.popen.pid,
        code=first.exit_code,
        cause=cause,
        host=first.host,
        traceback=traceback,
        shown=not held,
        log=str(first.log_folder / "stderr.log") if first.log_folder else None,
        others=fates,
        consequence=speaker.exit_code,
    )
    if first.spec.starter:
        _of_starter(first, failure)
    for rank in ranks:
        rank.error.drop()
    return failure


def _last_shown(rank: Rank) -> bytes:
    """The traceback that was shown too early, where it is the last thing the process has said."""
    return rank.error.last_traceback if rank.exit_code > 0 else b""


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
    failure.cause = cause_of(failure.code, words, failure.rank)


def _fate(rank: Rank, first: Rank, words: str) -> str:
    """How another rank ended, in a few words that follow its number."""
    if rank.code == 0 and not rank.stopped:
        return "ended with exit code 0"
    if rank.trouble_at is None:
        return "stopped by the launcher"
    if rank.exit_code < 0:
        return f"killed by {_signal_name(-rank.exit_code)}"
    message = tracebacks.message_of(_last_words(rank), rank.rank)
    if not message:
        return f"ended with exit code {rank.exit_code}"
    if tracebacks.blame(_last_words(rank), rank.rank) == LOST:
        return "lost the connection to another rank"
    if tracebacks.fingerprint(message) == tracebacks.fingerprint(tracebacks.message_of(words, first.rank)):
        return "failed with the same error"
    return tracebacks.first_line(message)


def _grouped(others: Mapping[int, str]) -> str:
    """Fates in one line: ranks of the same fate together."""
    by_fate: dict[str, list[int]] = {}
    for rank, fate in sorted(others.items()):
        by_fate.setdefault(fate, []).append(rank)
    told = [f"{_numbered(ranks)}: {fate}" for fate, ranks in list(by_fate.items())[:8]]
    if len(by_fate) > 8:
        told.append(f"and {sum(len(ranks) for ranks in list(by_fate.values())[8:])} more")
    return "; ".join(told)


def _numbered(ranks: Sequence[int]) -> str:
    """ranks 0 to 5, 7"""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    told = [str(low) if low == high else f"{low}{' to ' if high > low + 1 else ', '}{high}" for low, high in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(told)}" if told else "other ranks"


def _last_words(rank: Rank) -> str:
    return (rank.error.held or rank.error.tail).decode(errors="replace")


def cause_of(code: int, words: str, rank: int | None = None, oom_kills: int = 0) -> str:
    """Why a process ended with this code, in words; `words` is what it printed last.

    An exception's message comes whole, however many lines it has.
    """
    if code >= 0:
        message = tracebacks.message_of(words, rank)
        if message:
            return message + _remark(words)
        last = next((line for line in reversed(tracebacks.plain_lines(words, rank)) if line.strip()), "")
        said = f"; the last line of its standard error: {tracebacks.first_line(last.strip())}" if last else ""
        return f"it ended with exit code {code}{said}"
    number = -code
    name = _signal_name(number)
    if number == signal.SIGKILL:
        if oom_kills:
            return f"killed by {name}: out of memory (the kernel's record of this control group says so)"
        return f"killed by {name}: by the kernel when memory runs out, by a job scheduler, or by hand (see dmesg)"
    meaning = next((words for known, words in _SIGNAL_WORDS.items() if known == number), None)
    return f"killed by {name}" + (f": {meaning}" if meaning else "")


def _remark(words: str) -> str:
    """What an exception alone does not say."""
    if "torch/utils/data/dataloader.py" in words and "multiprocessing/connection.py" in words:
        return "\nA worker process of the data loader has died: killed for lack of memory, or crashed."
    return ""


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

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
from ..core.objects import ranks_in_words, values_in_words
from ..core.stacks import user_line_of
from . import tracebacks
from .process import Rank
from .streams import RANK_FAILED
from .tracebacks import Cause, End, first_failure

# By name: Windows has no SIGBUS.
_MEANINGS = {
    "SIGSEGV": "invalid memory access: a defect in native code, an extension or the driver",
    "SIGABRT": "native code called abort(), as gloo does when ranks call different collectives",
    "SIGBUS": "shared memory (/dev/shm) is exhausted, or a memory-mapped file was truncated",
    "SIGKILL": "by the kernel when memory runs out, by a job scheduler, or by hand (see dmesg)",
}


class Failure(NamedTuple):
    """The first rank of a run that failed.

    `code` is its exit code, negative for a signal, and `exit_code` that of the launcher. `shown`: the traceback is on
    the console already. `starter` is the program that started the ranks where this launcher did not; `pid` is its
    process id then.
    """

    rank: int
    local_rank: int
    pid: int
    code: int
    exit_code: int
    cause: str
    host: str
    time: float
    traceback: str = ""
    shown: bool = False
    log: str | None = None
    others: Mapping[int, str] = MappingProxyType({})
    starter: str = ""

    def lines(self) -> list[str]:
        """The summary for the console. Lines of a traceback that is right above are not repeated."""
        name = "a rank"
        if self.rank >= 0:
            name = f"rank {self.rank}"
        process = f"pid {self.pid}"
        if self.starter:
            process = f"{self.starter} (pid {self.pid})"
        log = ""
        if self.log:
            log = f", log {self.log}"
        head, _, details = self.cause.partition("\n")
        lines = [f"accelerate: {name} failed: {head}"]
        for line in details.splitlines():
            if self.shown or not self.traceback or line not in self.traceback:
                lines.append(f"    {line}".rstrip())
        lines.append(f"  host {self.host}, {process}, exit code {exit_code(self.code)}{log}")
        if self.others:
            lines.append(f"  other ranks: {values_in_words(self.others)}")
        return lines

    def write(self, path: str) -> None:
        """Write the failure as JSON."""
        import json

        content = self._asdict()
        del content["shown"]
        content["others"] = dict(self.others)
        content["signal"] = None
        if self.code < 0:
            content["signal"] = -self.code
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target, "w") as file:
            json.dump(content, file, indent=2)


def exit_code(code: int) -> int:
    """The launcher's exit code for a process's: the same, or as in shells 128 plus the number of the signal."""
    if code >= 0:
        return code
    return 128 - code


def find_first(ranks: Sequence[Rank]) -> Cause | None:
    """The first failure of supervised ranks; None where none failed by itself."""
    ends = []
    for rank in ranks:
        ended_early = rank.code == 0 and not rank.stopped and not rank.spec.starter
        if rank.failed_at is not None:
            ends.append(End(rank.rank, rank.exit_code, rank.failed_at, rank.last_output))
        elif ended_early:
            ends.append(End(rank.rank, 0, rank.ended_at or 0.0, rank.last_output))
    return first_failure(ends)


def early_cause(others: Sequence[int]) -> str:
    """The error of a rank that ended with exit code 0 before `others`."""
    return (
        f"it ended with exit code 0 while {ranks_in_words(others)} still needed it. Every rank must run the same "
        "number of steps and reach the same collective operations."
    )


def text_of(ranks: Sequence[Rank], cause: Cause, oom_kills: int = 0) -> str:
    """Why the rank that failed first has ended."""
    if cause.end.code == 0:
        return early_cause([rank.rank for rank in ranks if rank.code != 0])
    return cause_of(cause.end.code, cause.end.output, cause.end.rank, oom_kills)


def report(ranks: Sequence[Rank], cause: Cause) -> str:
    """The first failure in one text, for the consoles of the other machines."""
    first = next(rank for rank in ranks if rank.rank == cause.end.rank)
    return (
        f"rank {first.rank} on {first.host} (pid {first.popen.pid}) failed: {text_of(ranks, cause)}"
    )


def describe(ranks: Sequence[Rank], cause: Cause, oom_kills: int) -> Failure:
    """Everything about the first failure. Removes the delayed tracebacks of all ranks from their streams."""
    by_number = {rank.rank: rank for rank in ranks}
    first = by_number[cause.end.rank]
    source = by_number[cause.source.rank]
    others = {}
    for rank in ranks:
        if rank is not first and (rank.code or rank.stopped or first.code == 0):
            others[rank.rank] = _outcome(rank, cause.source)
    log = None
    if first.log_folder:
        log = str(first.log_folder / "stderr.log")
    failure = Failure(
        rank=first.rank,
        local_rank=first.spec.local_rank,
        pid=first.popen.pid,
        code=first.exit_code,
        exit_code=exit_code(first.exit_code) or exit_code(source.exit_code),
        cause=text_of(ranks, cause, oom_kills),
        host=first.host,
        time=time.time(),
        traceback=source.error.last_traceback.decode(errors="replace"),
        shown=not source.error.delayed,
        log=log,
        others=others,
        starter=first.spec.starter,
    )
    if first.spec.starter:
        failure = _of_starter(first, failure)
    for rank in ranks:
        rank.error.take_delayed()
    return failure


def _of_starter(starter: Rank, failure: Failure) -> Failure:
    """The failure of the rank that failed first under a starter, without the starter's own messages."""
    failure = failure._replace(rank=-1)
    report = re.search(RANK_FAILED, starter.error.rank_failure)
    if report is None:
        return failure
    # Later output comes from the starter and from ranks that it stopped.
    text = starter.error.rank_failure[: report.start()].decode(errors="replace")
    rank = int(report[1])
    code = int(report[2])
    # srun labels each line with its task.
    labelled = re.findall(rf"^{rank}: .*", text, re.MULTILINE)
    output = "\n".join(labelled) or text
    traceback = ""
    if tracebacks.HEADER in text:
        traceback = text
    return failure._replace(
        rank=rank,
        code=code,
        exit_code=exit_code(code),
        cause=cause_of(code, output, rank),
        traceback=traceback,
    )


def _outcome(rank: Rank, source: End) -> str:
    """How another rank ended, in a few words."""
    if rank.code == 0 and not rank.stopped:
        return "ended with exit code 0"
    if rank.failed_at is None:
        return "stopped by the launcher"
    if rank.exit_code < 0:
        return f"killed by {_signal_name(-rank.exit_code)}"
    message = tracebacks.message_of(rank.last_output, rank.rank)
    if not message:
        return f"ended with exit code {rank.exit_code}"
    if message == tracebacks.message_of(source.output, source.rank):
        return "failed with the same error"
    if tracebacks.is_lost_connection(message):
        return "lost the connection to another rank"
    return message.partition("\n")[0][:200]


def cause_of(code: int, output: str, rank: int | None = None, oom_kills: int = 0) -> str:
    """Why a process ended with this code, given its last output. The message of an exception is complete."""
    if code < 0:
        return _cause_of_signal(-code, output, oom_kills)
    message = tracebacks.message_of(output, rank)
    if message:
        if "torch/utils/data/dataloader.py" in output and "multiprocessing/connection.py" in output:
            message += "\nA worker process of the data loader has died: killed for lack of memory, or crashed."
        return message
    lines = [line.strip() for line in tracebacks.plain_lines(output, rank) if line.strip()]
    if lines:
        return f"it ended with exit code {code}; the last line of its standard error: {lines[-1][:200]}"
    return f"it ended with exit code {code}"


def _cause_of_signal(number: int, output: str, oom_kills: int) -> str:
    text = f"killed by {_signal_name(number)}"
    if oom_kills and "SIGKILL" in text:
        return f"{text}: out of memory (recorded by the kernel for this control group)"
    for name, meaning in _MEANINGS.items():
        if name in text:
            text += f": {meaning}"
    # The stacks that Python's faulthandler has written.
    _, header, stacks = output.rpartition("Fatal Python error: ")
    if header:
        line = user_line_of(stacks)
        if line:
            text += f" (at {line})"
    return text


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
    count = re.search(r"^oom_kill (\d+)", events, re.MULTILINE)
    if count is None:
        return 0
    return int(count.group(1))

# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first and why, from the ends of all ranks: the one rule of all launchers.

The rank whose last traceback points to no other rank comes first, then the time of the failure. Where even that
rank only lost its connection to another, or names it, a rank that ended without an error is the cause.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core import errors
from ..core.files import atomic_write
from ..core.objects import ranks_in_words, values_in_words
from ..core.stacks import user_line_of

HEADER = "Traceback (most recent call last):"
# Patterns are text, which `re` compiles at the first use: most launches never need them.
# The prefixes of srun and of torch before each line of a rank.
_PREFIX = r"^(?:\d+: )?(?:\[rank(\d+)\]: ?)?"
_LINK = "During handling of the above exception|The above exception was the direct cause of"
# Lines that end a message: the next exception of a chain, native logs, output at the exit.
_END = (
    _LINK + r"|\[[WEIF]\d{4} |[WEIF]\d{4} \d\d:|Exception ignored |terminate called |"
    r"Fatal Python error|accelerate: |srun: |slurmstepd: |wandb: |\S+\.py:\d+: \w*Warning: "
)
# Connections other than those between ranks: Python's own sockets and pipes, and clients of web services.
_FOREIGN = (
    r"(builtins\.)?(Connection(Reset|Refused|Aborted)?Error|BrokenPipeError|EOFError|OSError|URLError|HTTPError)(:|$)|"
    r"(requests|urllib3?|http|httpx|httpcore|aiohttp|botocore|huggingface_hub|wandb|multiprocessing)\."
)
# The signals by which a run is told to save and end: its code is 128 plus the number. Windows has one of them.
_REQUESTS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
# By name: Windows has no SIGBUS.
_MEANINGS = {
    "SIGSEGV": "invalid memory access: a bug in native code, an extension or the driver",
    "SIGABRT": "native code called abort(), as gloo does when ranks call different collectives",
    "SIGBUS": "shared memory (/dev/shm) is exhausted, or a memory-mapped file was truncated",
    "SIGKILL": "by the kernel when memory runs out, by a job scheduler, or by hand (see dmesg)",
}


def plain_lines(text: str, rank: int | None = None) -> list[str]:
    """The lines without their prefixes; where a traceback is prefixed as that of `rank`, only its lines."""
    lines = []
    lines_of_rank = []
    for line in text.splitlines():
        prefix = re.match(_PREFIX, line)
        assert prefix is not None
        number = prefix.group(1)
        lines.append(line[prefix.end() :])
        if number is not None and (rank is None or int(number) == rank):
            lines_of_rank.append(lines[-1])
    if any(HEADER in line for line in lines_of_rank):
        return lines_of_rank
    return lines


def chain(text: str, rank: int | None = None) -> list[str]:
    """The messages of the last traceback's exceptions, first cause first; empty without a traceback."""
    messages: list[list[str]] = []
    is_linked = False
    # The frames of a traceback are indented; the first other line begins its message.
    in_frames = False
    in_message = False
    for line in plain_lines(text, rank):
        if line.startswith(HEADER):
            if not is_linked:
                # Without a link in between, two tracebacks are independent.
                messages.clear()
            is_linked = False
            in_frames = True
            in_message = False
        elif in_frames and line.strip() and not line[0].isspace():
            messages.append([line])
            in_frames = False
            in_message = True
        elif re.match(_END, line):
            is_linked = is_linked or re.match(_LINK, line) is not None
            in_message = False
        elif in_message:
            messages[-1].append(line)
    return ["\n".join(lines).strip() for lines in messages]


def message_of(text: str, rank: int | None = None) -> str:
    """The message of the exception that ends the last traceback of a text; empty without one."""
    messages = chain(text, rank)
    if messages:
        return messages[-1]
    return ""


def is_lost_connection(message: str) -> bool:
    """Whether an exception's message reports the loss of the connection to another rank."""
    return errors.is_lost_connection(message) and re.match(_FOREIGN, message) is None


def points_elsewhere(text: str, rank: int) -> bool:
    """Whether a rank's last output points to another rank: its connection is lost, or it names one."""
    messages = chain(text, rank)
    if not messages:
        # A program that prints its own errors: only the last lines can be used.
        return is_lost_connection("\n".join(plain_lines(text, rank)[-3:]))
    if is_lost_connection(messages[0]) or is_lost_connection(messages[-1]):
        return True
    named_ranks = re.findall(r"\b(?:ranks?|Process) (\d+)\b", messages[-1])
    return bool(named_ranks) and str(rank) not in named_ranks


def comparable(text: str, rank: int) -> tuple[str, str]:
    """A traceback without what differs between ranks that fail alike, and the output after it; empty without one."""
    last_line = message_of(text, rank).rpartition("\n")[2]
    if not last_line:
        return "", text
    head, line, after = text.rpartition(last_line)
    plain = "\n".join(plain_lines(head + line, rank))
    return _without_numbers(plain), after.partition("\n")[2]


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "", text)


class End(NamedTuple):
    """The end of a rank.

    Fields:
        code: its exit code, negative for a signal.
        time: that of its traceback, else of its end.
        output: its last output on standard error, from the traceback on where there is one.
        shown: whether that is on the console.
        by_itself: False where it runs, or was stopped by the launcher.
        log: the file of its standard error.
        starter: the program that started the ranks, where this launcher did not; `pid` is that program's then.
    """

    rank: int
    code: int
    time: float
    output: str
    shown: bool = True
    by_itself: bool = True
    local_rank: int = 0
    pid: int = 0
    host: str = ""
    log: str | None = None
    starter: str = ""

    @property
    def points_elsewhere(self) -> bool:
        """Whether another rank is likely to be the cause."""
        return self.code > 0 and points_elsewhere(self.output, self.rank)

    @property
    def requested_by(self) -> str:
        """The signal on which the rank has ended as it should, after a save; empty if it has failed."""
        if self.starter or message_of(self.output, self.rank):
            return ""
        names = [name for name in _REQUESTS if hasattr(signal, name)]
        codes = {128 + signal.Signals[name]: name for name in names}
        return codes.get(self.code, "")

    @property
    def traceback(self) -> str:
        """Its last output from the line on where a traceback begins; empty without one."""
        before, header, after = self.output.partition(HEADER)
        if not header:
            return ""
        return before.rpartition("\n")[2] + header + after

    def outcome(self, source: End) -> str:
        """How the rank has ended, in a few words. `source` is the end of the rank that failed first."""
        if not self.by_itself:
            return "stopped by the launcher"
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        message = message_of(self.output, self.rank)
        if not message or self.code == 0:
            return f"ended with exit code {self.code}"
        message_of_source = message_of(source.output, source.rank)
        is_same = _without_numbers(message) == _without_numbers(message_of_source)
        if is_same and self is not source:
            return "failed with the same error"
        if is_lost_connection(message):
            return "lost the connection to another rank"
        return message.partition("\n")[0][:200]


class Failure(NamedTuple):
    """The first failure of a run: the rank that caused it, and the failed rank whose output shows where."""

    end: End
    source: End
    cause: str
    others: Mapping[int, str]

    @property
    def exit_code(self) -> int:
        """The launcher's exit code."""
        return exit_code(self.end.code or self.source.code)

    def report(self, above: str = "") -> str:
        """What has failed where. Lines of the cause that are in the text `above` are not repeated."""
        end = self.end
        name = "a rank"
        if end.rank >= 0:
            name = f"rank {end.rank}"
        head, *details = self.cause.splitlines()
        lines = [f"{name} failed: {head}"]
        lines += [f"    {line}".rstrip() for line in details if not above or line not in above]
        process = f"pid {end.pid}"
        if end.starter:
            process = f"{end.starter} (pid {end.pid})"
        where = f"  host {end.host}, {process}, exit code {exit_code(end.code)}"
        if end.log:
            where += f", log {end.log}"
        return "\n".join([*lines, where])

    def summary(self) -> str:
        """The report for the console, below the traceback, and how the other ranks have ended."""
        text = f"accelerate: {self.report(self.source.traceback)}"
        if self.others:
            text += f"\n  other ranks: {values_in_words(self.others)}"
        return text

    def write(self, path: str) -> None:
        """Write the failure as JSON."""
        import json

        end = self.end
        content = {
            "rank": end.rank,
            "local_rank": end.local_rank,
            "pid": end.pid,
            "host": end.host,
            "starter": end.starter,
            "log": end.log,
            "time": time.time(),
            "code": end.code,
            "signal": -end.code if end.code < 0 else None,
            "exit_code": self.exit_code,
            "cause": self.cause,
            "traceback": self.source.traceback,
            "others": dict(self.others),
        }
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target, "w") as file:
            json.dump(content, file, indent=2)


def exit_code(code: int) -> int:
    """The launcher's exit code for a process's: the same, or as in shells 128 plus the number of the signal."""
    if code < 0:
        return 128 - code
    return code


def first_failure(ends: Sequence[End], oom_kills_before: int | None = None) -> Failure | None:
    """The first failure among the ends of all ranks; None where no rank failed by itself.

    Args:
        ends: the end of each rank, those that still run included.
        oom_kills_before: what `oom_kills` returned when the ranks were started.
    """
    failed = [end for end in ends if end.by_itself and end.code]
    if not failed:
        return None
    source = min(failed, key=lambda end: (end.points_elsewhere, end.time))
    early = [end for end in ends if end.by_itself and not end.code]
    if source.points_elsewhere and early:
        first = min(early, key=lambda end: end.time)
        ranks = ranks_in_words([end.rank for end in ends if end not in early])
        cause = (
            f"it ended with exit code 0 while {ranks} still needed it. Every rank must run the same "
            "number of steps and reach the same collective operations."
        )
    else:
        first = source
        cause = cause_of(source.code, source.output, source.rank, oom_kills_before)
    # Starters are no ranks.
    others = [end for end in ends if end is not first and not end.starter]
    outcomes = {end.rank: end.outcome(source) for end in others}
    return Failure(first, source, cause, outcomes)


def cause_of(
    code: int, output: str, rank: int | None = None, oom_kills_before: int | None = None
) -> str:
    """Why a process ended with this code, given its last output. The message of an exception is complete."""
    if code < 0:
        return _cause_of_signal(-code, output, oom_kills_before)
    message = message_of(output, rank)
    if message:
        if "torch/utils/data/dataloader.py" in output and "multiprocessing/connection.py" in output:
            message += (
                "\nA worker process of the data loader died: it crashed, or was killed "
                "because memory ran out."
            )
        return message
    lines = [line.strip() for line in plain_lines(output, rank) if line.strip()]
    if lines:
        return f"it ended with exit code {code}; the last line of its standard error: {lines[-1][:200]}"
    return f"it ended with exit code {code}"


def _cause_of_signal(number: int, output: str, oom_kills_before: int | None) -> str:
    name = _signal_name(number)
    text = f"killed by {name}"
    if "SIGKILL" in name and oom_kills_before is not None and oom_kills() > oom_kills_before:
        return f"{text}: out of memory (recorded by the kernel for this control group)"
    for key, meaning in _MEANINGS.items():
        if key in name:
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

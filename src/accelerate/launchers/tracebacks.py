# SPDX-License-Identifier: Apache-2.0
"""Which rank's failure ended a run, from the last output of its ranks: the one rule for all launchers.

The rank whose last traceback points to no other rank comes first, then the time of the failure. Where even that
rank only lost its connection to another, or names it, a rank that ended without an error is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..core import errors

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
    return re.sub(r"0x[0-9a-f]+|\d+", "", plain), after.partition("\n")[2]


class End(NamedTuple):
    """The end of a rank: exit code (negative for a signal), time of the traceback or the end, last output."""

    rank: int
    code: int
    time: float
    output: str

    @property
    def points_elsewhere(self) -> bool:
        """Whether another rank is likely to be the cause."""
        return self.code > 0 and points_elsewhere(self.output, self.rank)


class Cause(NamedTuple):
    """The first failure of a run: the rank that caused it, and the failed rank whose output shows where."""

    end: End
    source: End


def first_failure(ends: Sequence[End]) -> Cause | None:
    """The first failure among the ends of ranks, those without an error included; None where no rank failed."""
    failed = [end for end in ends if end.code]
    if not failed:
        return None
    source = min(failed, key=lambda end: (end.points_elsewhere, end.time))
    early = [end for end in ends if not end.code]
    if source.points_elsewhere and early:
        return Cause(min(early, key=lambda end: end.time), source)
    return Cause(source, source)

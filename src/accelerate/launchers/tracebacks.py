# SPDX-License-Identifier: Apache-2.0
"""Which rank's failure ended a run, from the last output of its ranks: the one rule for all launchers.

The rank whose last traceback points to no other rank comes first, then the time of the failure. Where even that
rank only lost its connection to another, or names it, a rank that ended without an error before is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..core.stacks import user_line_of

HEADER = "Traceback (most recent call last):"
# Patterns are text, which `re` compiles at the first use: most launches never need them.
# The prefixes of srun and of torch before each line of a rank.
_PREFIX = r"^(?:\d+: )?(?:\[rank(\d+)\]: ?)?"
# Lines that end a message: the next exception of a chain, native logs, output at the exit.
_END = (
    r"During handling of the above exception, another|The above exception was the direct cause of|"
    r"\[[WEIF]\d{4} |[WEIF]\d{4} \d\d:|Exception ignored |terminate called |Fatal Python error|accelerate: |"
    r"srun: |slurmstepd: |wandb: |\S+\.py:\d+: \w*Warning: |-{20,}$|\*{20,}$"
)
_GROUP = r"\s*\+ Exception Group " + re.escape(HEADER)
# A longer message is shortened in the middle, because the remedy is at its end.
MOST_CHARACTERS = 6000
# Messages of errors that are caused by the loss of another rank.
_LOST = (
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited|connection.*closed|"
    r"DistBackendError|DistStoreError|DistNetworkError|recvValue|Socket (Timeout|closed)|has been aborted|"
    r"NCCL (error|communicator)|gloo::|CommunicationError:|other ranks cannot be reached|the store of the run is gone|"
    r"connection to another rank failed"
)
# Connections other than those between ranks: Python's own sockets and pipes, and clients of web services.
_FOREIGN = (
    r"(builtins\.)?(Connection(Reset|Refused|Aborted)?Error|BrokenPipeError|EOFError|OSError|URLError|HTTPError)(:|$)|"
    r"(requests|urllib3?|http|httpx|httpcore|aiohttp|botocore|huggingface_hub|wandb|multiprocessing)\."
)
_RANKS = r"\b(?:rank|Process) (\d+)\b|\branks (\d+(?:, \d+)*(?: and \d+)?)"

OWN, UNCLEAR, LOST = 0, 1, 2


def plain_lines(text: str, rank: int | None = None) -> list[str]:
    """The lines without their prefixes; where a traceback is prefixed as that of `rank`, only its lines."""
    found = []
    for line in text.splitlines():
        prefix = re.match(_PREFIX, line)
        assert prefix is not None
        found.append((prefix.group(1), line[prefix.end() :]))
    own = [
        line
        for number, line in found
        if number is not None and (rank is None or int(number) == rank)
    ]
    if any(HEADER in line for line in own):
        return own
    return [line for _, line in found]


def chain(text: str, rank: int | None = None) -> list[str]:
    """The messages of the last traceback's exceptions, first cause first; empty without a traceback."""
    messages: list[str] = []
    linked = False
    lines = plain_lines(text, rank)
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith(("During handling of the above", "The above exception was")):
            linked = True
        elif line.startswith(HEADER) or re.match(_GROUP, line):
            message, at = _message(lines, at, grouped=not line.startswith(HEADER))
            if message:
                # Without such a line in between, two tracebacks are independent.
                messages = [*(messages if linked else []), message]
            linked = False
    return messages


def _message(lines: list[str], at: int, grouped: bool) -> tuple[str, int]:
    """The message at the end of the traceback whose frames begin at line `at`, and the index of the next line."""
    if grouped:
        lines = [re.sub(r"^\s*\| ?", "", line) for line in lines]
    while at < len(lines) and (not lines[at].strip() or lines[at][0].isspace()):
        at += 1
    start = at
    while at < len(lines) and not (re.match(_END, lines[at]) or lines[at].startswith(HEADER)):
        if grouped and re.match(r"\s*\+-", lines[at]):
            break
        at += 1
    return "\n".join(lines[start:at]).strip(), at


def message_of(text: str, rank: int | None = None) -> str:
    """The message of the exception that ends the last traceback of a text; empty without one."""
    messages = chain(text, rank)
    if messages:
        return shortened(_without_inner_traceback(messages[-1]))
    return ""


def _without_inner_traceback(message: str) -> str:
    """Without the traceback of a data loader's worker, which torch writes into the message; its error is kept."""
    head, found, inner = message.partition("\nOriginal Traceback (most recent call last):\n")
    if not found:
        return message
    reason, _ = _message(inner.splitlines(), 0, grouped=False)
    if reason:
        return f"{head}\n{reason}"
    return message


def shortened(message: str, most: int = MOST_CHARACTERS) -> str:
    """A message of at most about `most` characters."""
    if len(message) <= most:
        return message
    half = most // 2
    return (
        f"{message[:half]}\n... ({len(message) - 2 * half} characters left out)\n{message[-half:]}"
    )


def first_line(message: str) -> str:
    """The first line of a message, at most 200 characters, for lists."""
    line = message.partition("\n")[0]
    if len(line) <= 200:
        return line
    return f"{line[:197]}..."


def is_lost_connection(message: str) -> bool:
    """Whether an exception's message reports the loss of the connection to another rank."""
    return re.search(_LOST, message) is not None and re.match(_FOREIGN, message) is None


def loss_of(message: str) -> str:
    """That a rank has lost the connection to another, and where, as far as its message has it."""
    where = re.search(r"connection to another rank failed in (.+?) \(at ([^,)]+)", message)
    return "lost the connection to another rank" + (f" in {where[1]} ({where[2]})" if where else "")


def blame(text: str, rank: int) -> int:
    """How much a rank's last output points to another rank: OWN (not at all), UNCLEAR, or LOST (its connection)."""
    messages = chain(text, rank)
    if not messages:
        # A program that prints its own errors: only the last lines can be used.
        last = "\n".join(plain_lines(text, rank)[-3:])
        if is_lost_connection(last):
            return UNCLEAR
        return OWN
    lost = [is_lost_connection(message) for message in messages]
    if lost[0]:
        return LOST
    if lost[-1]:
        return UNCLEAR
    named = named_ranks(messages[-1])
    if named and rank not in named:
        return UNCLEAR
    return OWN


def named_ranks(message: str) -> set[int]:
    """The ranks that a message mentions."""
    return {
        int(number)
        for found in re.finditer(_RANKS, message)
        for number in re.findall(r"\d+", found.group())
    }


def crash_place(text: str) -> str:
    """The user's line at which native code ended a process, from the stacks that Python's faulthandler has written."""
    _, found, stacks = text.rpartition("Fatal Python error: ")
    if found:
        return user_line_of(stacks)
    return ""


class End(NamedTuple):
    """The end of a rank: exit code (negative for a signal), time of the traceback or the end, last output."""

    rank: int
    code: int
    time: float
    output: str

    @property
    def blame(self) -> int:
        """How much the end points to another rank: OWN, UNCLEAR or LOST."""
        if self.code > 0:
            return blame(self.output, self.rank)
        return OWN


class Cause(NamedTuple):
    """The first failure of a run: the rank that caused it, and the failed rank whose output shows where."""

    end: End
    source: End


def first_failure(ends: Sequence[End]) -> Cause | None:
    """The first failure among the ends of ranks, those without an error included; None where no rank failed."""
    failed = [end for end in ends if end.code]
    if not failed:
        return None
    source = min(failed, key=lambda end: (end.blame, end.time))
    early = sorted((end for end in ends if not end.code and source.blame), key=lambda end: end.time)
    if source.blame != LOST:
        named = named_ranks(message_of(source.output, source.rank))
        early = [end for end in early if end.rank in named]
    return Cause(early[0] if early else source, source)

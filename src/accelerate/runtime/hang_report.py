# SPDX-License-Identifier: Apache-2.0
"""From where each rank is to the text that explains why a run stands still: who waits, for whom, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .calls import ranks_in_words
from .pending import SAME_SHAPES
from .place import DEBUGGER, LOADER, WORKERS

# Where a rank is, as plain JSON data; `HangWatch.status` describes the fields.
Status = dict[str, Any]
# What a rank does: it waits for others; it computes; it reads or writes files; it sleeps, and wakes up often; only its
# other threads compute; it does nothing.
WAITS, MOVES, FILES, ACTIVE, THREADS, IDLE = "waits", "moves", "files", "active", "threads", "idle"
HAS_ENDED = "has ended"

SAME_CALLS = (
    "Every rank must call the same collectives in the same order (gather, reduce, wait_for_everyone, backward, "
    "save_state, ...): look for one under an `if`, after a `break` or in a `try` that only some ranks reach. "
    "With ACCELERATE_DEBUG_MODE=1 every call is compared, and the first that differs is an error."
)


def explain(found: Mapping[int, Status], world: int, absence: Mapping[int, str] | None = None) -> str | None:
    """Explain a stand-still.

    Args:
        found: the status of each rank that has answered.
        world: the number of ranks.
        absence: why ranks do not answer, where that is known, as "has ended".

    Returns:
        The text; None where the ranks that have answered make progress, or only wait for each other in Python.
    """
    waiting = {rank: status for rank, status in found.items() if status["state"] == WAITS}
    others = {rank: status for rank, status in found.items() if status["state"] != WAITS}
    absent = [rank for rank in range(world) if rank not in found]
    if not waiting and (absent or any(status["state"] != IDLE for status in others.values())):
        return None
    seconds = f"{max(status['seconds'] for status in (waiting or others).values()):.0f} s"
    waits = _grouped({rank: _waiting(status) for rank, status in waiting.items()})
    works = not absent and all(status["state"] != IDLE for status in others.values())
    clauses = _grouped({rank: _elsewhere(status) for rank, status in others.items()}, _is)
    absence = absence or {}
    clauses += _grouped({rank: absence.get(rank, "does not answer") for rank in absent}, _verbs)
    silent = [rank for rank in absent if rank not in absence]
    if not waiting:
        return f"The run stands still for {seconds}, and no rank is in a collective: {'; '.join(clauses)}."
    if clauses:
        begin = "The run waits" if works else "The run stands still"
        had = _grouped({rank: _waiting(status) for rank, status in waiting.items()}, _has_waited(seconds))
        lines = [f"{begin}: {'; '.join([*clauses, *had])}."]
    elif len(waits) == 1:
        lines = [f"The run stands still: all ranks have waited {seconds} in {_waiting(waiting[min(waiting)])}."]
    else:
        lines = [f"The run stands still for {seconds}: {'; '.join(waits)}."]
    differing = _differences(found)
    before = {rank: ", ".join(status["before"]) for rank, status in waiting.items() if differing and status["before"]}
    lines += [f"  - {line}" for line in (*_last_calls(others), *differing, *_grouped(before, _had))]
    if silent:
        lines.append(
            "A rank that does not answer is stopped, was killed, or is in a call that holds the interpreter lock."
        )
    if differing or (not clauses and len(waits) > 1) or HAS_ENDED in absence.values():
        lines.append(SAME_CALLS)
    elif not clauses:
        lines.append("The ranks agree on what they do. Look at the network, and at the devices and their logs.")
    return "\n".join(lines)


def status_line(status: Status) -> str:
    """Where one rank is, for a line of another message."""
    return f"waits in {_waiting(status)}" if status["state"] == WAITS else f"is {_elsewhere(status)}"


def _grouped(texts: Mapping[int, str], describe: Callable[[list[int], str], str] | None = None) -> list[str]:
    """One clause for the ranks with the same text."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [(describe or _wait)(members, text) for text, members in ranks.items()]


def _had(ranks: list[int], text: str) -> str:
    return f"before, on {ranks_in_words(ranks)}: {text}"


def _wait(ranks: list[int], text: str) -> str:
    return f"{ranks_in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {text}"


def _is(ranks: list[int], text: str) -> str:
    return _verbs(ranks, f"is {text}")


def _verbs(ranks: list[int], text: str) -> str:
    """The ranks, with a text that begins with a verb."""
    if len(ranks) > 1:
        verb, _, rest = text.partition(" ")
        plural = {"is": "are", "has": "have", "was": "were", "does": "do"}[verb]
        text = f"{plural} {rest}".replace("and does not", "and do not")
    return f"{ranks_in_words(ranks)} {text}"


def _has_waited(seconds: str) -> Callable[[list[int], str], str]:
    def describe(ranks: list[int], text: str) -> str:
        return f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} waited {seconds} in {text}"

    return describe


def _waiting(status: Status) -> str:
    """The collective in which a rank waits, and the user's line."""
    calls, call, pending = status["calls"], status["call"], status["pending"]
    if call and call["inside"]:
        operation = f"`{call['operation']}`"
        if not call["operation"].isidentifier():
            return f"{call['operation']} ({status['at']})"
    elif pending:
        operation = pending[0]["operation"]
    else:
        # Ranks also wait for each other through the store.
        return f"{calls or 'a collective'} ({status['at']})"
    if calls and operation.strip("`") in calls.strip("`").split("."):
        operation = calls
    elif calls:
        operation += f" of {calls}"
    return f"{operation} ({status['at']})"


def _elsewhere(status: Status) -> str:
    does, at, state = status["calls"] or status["within"], status["at"], status["state"]
    if does == WORKERS:
        return f"waiting for {WORKERS} ({at})"
    if does in (LOADER, DEBUGGER):
        return f"in {does} ({at})"
    place = f"in {does} ({at})" if does else f"at {at}"
    if state == MOVES:
        return f"still computing {place if does else f'({at})'}"
    if state == FILES:
        return f"still reading or writing files {place}"
    if state == ACTIVE:
        return f"still active {place}, and mostly asleep"
    return f"{place}, and {'only its other threads compute' if state == THREADS else 'does not compute'}"


def _last_calls(others: Mapping[int, Status]) -> list[str]:
    """The last collectives of this package of the ranks that are in none."""
    texts = {
        rank: f"{call['operation']} ({call['at']})"
        for rank, status in others.items()
        if (call := status["call"]) is not None
    }
    return _grouped(texts, lambda ranks, text: f"the last collective of {ranks_in_words(ranks)} was {text}")


def _differences(found: Mapping[int, Status]) -> list[str]:
    """What differs in the collectives of the same number in a process group."""
    lines = []
    pending = {
        (one["group"], one["number"])
        for status in found.values()
        if status["state"] == WAITS
        for one in status["pending"]
        if not one["is_p2p"]
    }
    for group in sorted({group for group, _ in pending}):
        number = min(number for name, number in pending if name == group)
        begun = {rank: _collective(status, group, number) for rank, status in found.items()}
        known = {rank: one for rank, one in begun.items() if one is not None}
        what = f"collective {number} of the process group {group}"
        texts = {rank: _named(found[rank], one) for rank, one in known.items()}
        operations = {one["operation"] for one in known.values()}
        if len(operations) > 1 or (operations <= set(SAME_SHAPES) and len(set(texts.values())) > 1):
            shown = _grouped(texts, lambda ranks, text: f"{text} on {ranks_in_words(ranks)}")
            lines.append(f"{what} differs: {', '.join(shown)}")
        behind = [
            rank
            for rank, status in found.items()
            if status["state"] == WAITS and status["last"].get(group, number) < number
        ]
        if behind and known:
            text = next(iter(texts.values()))
            verb = "has" if len(behind) == 1 else "have"
            lines.append(f"{ranks_in_words(behind)} {verb} not begun {what} ({text} on {ranks_in_words(known)})")
    return lines


def _named(status: Status, one: Any) -> str:
    """A collective of torch, or that of this package which sends it."""
    call = status["call"]
    if call and call["inside"] and status["last"].get(one["group"]) == one["number"]:
        one = call
    return f"{one['operation']} of {one['data']}" if one["data"] else str(one["operation"])


def _collective(status: Status, group: str, number: int) -> Any:
    for one in (*status["pending"], *status["recent"]):
        if one["group"] == group and one["number"] == number and not one["is_p2p"]:
            return one
    return None

# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a run: its figures, curves, events and summary, and the bytes in which they are sent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .run import Run
from .sentences import sentences
from .summary import Summary
from .verdict import advice, verdict
from .view import ALL_PHASES, View, heat_rows

_MOST_EVENTS = 400
# Equal events of several ranks within as many seconds are shown as one.
_TOGETHER = 5.0


def run_data(run: Run, shown: View, summary: Summary) -> dict[str, Any]:
    """The data of a run under the names that the page knows, with arrays of the buckets of `shown`."""
    rows, own, seconds, slow = heat_rows(shown)
    weight = np.maximum(shown.weight.sum(axis=0), 1)
    phases = {}
    for phase in ALL_PHASES:
        values = shown.phases[phase]
        if np.isfinite(values).any():
            total = np.nan_to_num(values) * shown.weight
            phases[phase] = total.sum(axis=0) / weight
    ranks = []
    for rank in shown.ranks:
        header = run.ranks[rank].header
        ranks.append({"rank": rank, "host": header.host, "device": header.device})
    return {
        "name": run.name,
        "folder": str(run.folder),
        "empty": run.is_empty,
        "ended": run.has_ended,
        "first": run.first_step,
        "last": run.last_step,
        "time": run.last_time,
        "ranks": ranks,
        "notes": run.notes(),
        "events": grouped_events(run),
        "summary": {
            **asdict(summary),
            "verdict": asdict(verdict(summary)),
            "sentences": sentences(summary),
            "advice": advice(summary),
        },
        "width": shown.width,
        "x": shown.x,
        "unit": shown.unit,
        "curves": {name: vars(curve) for name, curve in shown.curves.items()},
        "rows": rows,
        "own": own,
        "step": seconds,
        "slow": slow,
        "phases": phases,
        "logged": {name: vars(logged) for name, logged in shown.logged.items()},
    }


def grouped_events(run: Run, most: int = _MOST_EVENTS) -> list[dict[str, Any]]:
    """The newest events, oldest first. Equal ones of several ranks are one, whose field `ranks` lists these."""
    groups: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for event in run.events[-8 * most :]:
        seconds = event["time"]
        key = (event["event"], str(event.get("step")), str(event.get("message")))
        for other_key, group in reversed(groups[-16:]):
            if (
                other_key == key
                and seconds - group["time"] < _TOGETHER
                and event["rank"] not in group["ranks"]
            ):
                group["ranks"].append(event["rank"])
                break
        else:
            shown = {"time": seconds, "event": event["event"][:80], "ranks": [event["rank"]]}
            for name in ("message", "path"):
                if event.get(name) is not None:
                    shown[name] = str(event[name])[:2000]
            for name in ("step", "seconds", "restart"):
                number: Any = event.get(name)
                if type(number) in (int, float) and abs(number) < 2**53:
                    shown[name] = number
            if isinstance(event.get("path"), str):
                file = run.file(event["path"])
                if file is not None:
                    shown["file"] = file.as_uri()
            groups.append((key, shown))
    return [group for _, group in groups[-most:]]


def plain(value: Any, array: Callable[[np.ndarray[Any, Any]], Any]) -> Any:
    """A value as JSON has it: None instead of numbers that are not finite, and what `array` returns for arrays."""
    if isinstance(value, np.ndarray):
        return array(value)
    if isinstance(value, dict):
        return {name: plain(item, array) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, array) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def packed(version: str, runs: Sequence[dict[str, Any]]) -> bytes:
    """The data of runs as a JSON object in which each array stands for its place in the 4-byte floats that follow.

    The first four bytes are the length of the JSON text. An array is `{"at": first element, "shape": [...]}`.
    """
    buffers: list[bytes] = []
    position = 0

    def reference(values: np.ndarray[Any, Any]) -> dict[str, Any]:
        nonlocal position
        with np.errstate(over="ignore"):
            floats = values.astype("<f4")
        buffers.append(floats.tobytes())
        start = position
        position += values.size
        return {"at": start, "shape": values.shape}

    data = plain({"version": version, "runs": runs}, reference)
    text = json.dumps(data).encode()
    text += b" " * (-len(text) % 4)
    length = len(text).to_bytes(4, "little")
    return b"".join([length, text, *buffers])

# SPDX-License-Identifier: Apache-2.0
"""Files of JSON objects, one a line, that are read as they grow: the events of ranks, and logged values."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.files import open_regular

# Bytes that one call reads, so that a page does not wait for a long file. The next call continues.
MOST_BYTES = 8 << 20
# JSON has no such numbers; they are written as text.
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Tail:
    """Follows a file. A line that is not a JSON object is left out and counted.

    Args:
        path: the file; it may appear later.
        newest: bytes at the end of the file with which to begin. Default: all.
    """

    def __init__(self, path: Path, newest: int | None = None) -> None:
        self.path = path
        self.error: str | None = None
        """Why the file, which is there, cannot be read."""
        self._newest = newest
        self._identity: tuple[int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self.bad: int = 0
        """Lines left out."""
        self._position = 0
        self._rest = b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new objects, and whether the file is another one than before, so that the old ones are gone."""
        was_there = self._identity is not None
        self.error = None
        try:
            with open(self.path, "rb", buffering=0, opener=open_regular) as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                is_shorter = status.st_size < self._position
                replaced = was_there and (identity != self._identity or is_shorter)
                if replaced:
                    self._begin()
                self._identity = identity
                skipped = 0
                if not was_there and self._newest is not None:
                    skipped = max(0, status.st_size - self._newest)
                    self._position = skipped
                file.seek(self._position)
                # A buffer of the size is allocated.
                data = file.read(min(MOST_BYTES, status.st_size - self._position))
        except OSError as error:
            # It is not there yet, was deleted, or cannot be read now.
            if not isinstance(error, FileNotFoundError):
                self.error = error.strerror or str(error)
            self._identity = None
            self._begin()
            return [], was_there
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if skipped:
            # The first line is not complete.
            lines = lines[1:]
        if len(self._rest) > MOST_BYTES:
            self._rest = b""
            self.bad += 1
        objects = []
        for line in lines:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                objects.append(value)
            else:
                self.bad += 1
        return objects, replaced


class Series:
    """The values that a run has logged under one name."""

    def __init__(self) -> None:
        self.steps: array[float] = array("d")
        """NaN where a value was logged without one."""
        self.times: array[float] = array("d")
        self.values: array[float] = array("d")

    @property
    def last_step(self) -> int:
        """The highest step; without steps the number of values, which are then numbered from 0."""
        steps = np.array(self.steps)
        if np.isnan(steps).any():
            return len(steps) - 1
        return int(steps.max(initial=0))

    def points(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Steps, times and values; of several values for one step the last logged one."""
        steps, times, values = map(np.array, (self.steps, self.times, self.values))
        if not np.isnan(steps).any():
            _, last = np.unique(steps[::-1], return_index=True)
            last = len(steps) - 1 - last
            return steps[last], times[last], values[last]
        return steps, times, values


def add_values(series: dict[str, Series], record: Mapping[str, Any], prefix: str = "") -> None:
    """Add the numbers of one line of `values.jsonl` to their series."""
    values = record.get("values")
    if not isinstance(values, dict):
        return
    step = number_of(record.get("step"))
    time = number_of(record.get("time"))
    if not abs(step) < 2**53:
        step = math.nan
    for name, value in values.items():
        if isinstance(value, str):
            value = _SPECIAL.get(value)
        if isinstance(value, int | float):
            logged = series.setdefault(prefix + name, Series())
            logged.steps.append(step)
            logged.times.append(time)
            logged.values.append(number_of(value))


def number_of(value: object) -> float:
    """A number as a float, infinite if it is too large; NaN for anything else."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        if value > 0:
            return math.inf
        return -math.inf


def time_of(event: Mapping[str, Any]) -> float | None:
    """The time of an event in seconds since 1970; None if it has none that a calendar has."""
    time = number_of(event.get("time"))
    if 0 <= time < 1e12:
        return time
    return None

# SPDX-License-Identifier: Apache-2.0
"""A recorded run: the steps of all ranks, events and logged values, read as they are written."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError
from ..core.files import user_path
from ..core.objects import ranks_in_words
from ..telemetry.records import FOLDER, HEADER_SIZE
from .lines import Series, Tail, add_values, time_of
from .steps import RankSteps

_STEPS = re.compile(r"rank_(\d+)\.steps")
_EVENTS = re.compile(r"rank_(\d+)\.events\.jsonl")
# Seconds between two searches for new files.
_SEARCH = 1.0
# Seconds in which the files of all ranks appear, and the largest number of ranks that is believed.
_ARRIVAL = 30.0
_MOST_RANKS = 1 << 20
# Most events that are kept; the oldest are dropped.
MOST_EVENTS = 20_000
# The rank whose time stands for that of the run.
LEAD = 0
# What a run that is read in part has of each other rank: records of steps, and bytes of events.
NEWEST_RECORDS = 512
NEWEST_BYTES = 512


class Run:
    """The folder of a run.

    Args:
        folder: the folder. It may be absent or empty: the files may appear later.
        name: the name to show.
        is_partial: whether to read only the newest steps and events of ranks other than 0: enough for `current_state`.
    """

    def __init__(self, folder: Path, name: str, is_partial: bool = False) -> None:
        self.folder = folder
        self.name = name
        self._most_records: int | None = None
        self._most_bytes: int | None = None
        if is_partial:
            self._most_records = NEWEST_RECORDS
            self._most_bytes = NEWEST_BYTES
        self.lock: threading.RLock = threading.RLock()
        """Held while the run is read or viewed."""
        self.version: int = 0
        """Increases with everything new that was read."""
        self.ranks: dict[int, RankSteps] = {}
        self.series: dict[str, Series] = {}
        self.events: list[dict[str, Any]] = []
        """Each has its fields, and `rank`."""
        self.lead_events: list[dict[str, Any]] = []
        """All events of rank 0, as they were written."""
        self.work: dict[str, Any] | None = None
        """What training computes, as the run has declared it: `flops` for each `unit`, and `peak` of a device."""
        self._is_running: dict[
            int, bool
        ] = {}  # ranks with a file of events: whether the last is not their end
        self._bad: dict[Path, str] = {}  # files of steps that cannot be read, and why
        self._values: dict[Path, Tail] = {}
        self._tails: dict[Path, tuple[int, Tail]] = {}
        self._was_there = self._is_gone = False
        # Ranks of whom no file is there although others have begun.
        self._missing: list[int] = []
        self._searched = -_SEARCH
        self._refreshed = -1.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded yet."""
        return not self.series and not any(rank.last_step for rank in self.ranks.values())

    @property
    def first_step(self) -> int:
        """The first step with a record, 1 if there is none."""
        return min((rank.first_step for rank in self.ranks.values() if rank.last_step), default=1)

    @property
    def last_step(self) -> int:
        """The newest step of any rank; without telemetry that of the logged values."""
        newest = max((rank.last_step for rank in self.ranks.values()), default=0)
        if newest:
            return newest
        return max((series.last_step for series in self.series.values()), default=0)

    @property
    def last_time(self) -> float | None:
        """Seconds since 1970 of the newest record."""
        return max(
            (float(rank.last["time"]) for rank in self.ranks.values() if rank.last is not None),
            default=None,
        )

    @property
    def has_ended(self) -> bool:
        """Whether every rank that has started has ended."""
        return bool(self._is_running) and not any(self._is_running.values())

    def notes(self) -> list[str]:
        """What could not be read, one sentence each."""
        notes = list(self._bad.values())
        notes += [rank.note for rank in self.ranks.values() if rank.note]
        if self._is_gone:
            notes.append(f"the folder {self.folder} was deleted")
        if self._missing:
            world_size = len(self._missing) + len(self.ranks) + len(self._bad)
            notes.append(
                f"{world_size} ranks have started, but nothing was recorded for "
                f"{ranks_in_words(self._missing)}: "
                f"{'its file is' if len(self._missing) == 1 else 'their files are'} missing"
            )
        for tail in [*self._values.values(), *(tail for _, tail in self._tails.values())]:
            if tail.error:
                notes.append(f"{tail.path} cannot be read: {tail.error}")
            if tail.bad:
                notes.append(
                    f"{tail.path.name}: {tail.bad} lines that are not JSON objects are skipped"
                )
        return notes

    def refresh(self, age: float = 0.0) -> int:
        """Read what is new, unless that was done less than `age` seconds ago.

        Returns:
            The version.
        """
        with self.lock:
            now = time.monotonic()
            if now - self._refreshed < age:
                return self.version
            if now - self._searched >= _SEARCH:
                self._searched = now
                self._search()
            changed = self._refresh_steps()
            changed |= self._refresh_events()
            for path, tail in list(self._values.items()):
                records, replaced = tail.read()
                if replaced:
                    self.series.clear()
                    self._values = {other: Tail(other) for other in self._values}
                if len(self._values) == 1 or path.parent == self.folder:
                    prefix = ""
                else:
                    prefix = f"{path.parent.name}: "
                for record in records:
                    add_values(self.series, record, prefix)
                changed |= bool(records) or replaced
            self.version += changed
            self._refreshed = time.monotonic()
            return self.version

    def read_all(self) -> None:
        """Read to the present end of the files."""
        while self.version < self.refresh():
            pass

    def _search(self) -> None:
        folder = self.folder / FOLDER
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            names = []
        self._bad = {path: note for path, note in self._bad.items() if path.name in names}
        for name in names:
            path = folder / name
            steps = _STEPS.fullmatch(name)
            if steps and int(steps[1]) not in self.ranks:
                self._open(int(steps[1]), path)
            events = _EVENTS.fullmatch(name)
            if events and path not in self._tails:
                number = int(events[1])
                most_bytes = None if number == LEAD else self._most_bytes
                self._tails[path] = number, Tail(path, most_bytes)
                self._is_running[number] = True
        for path in values_files(self.folder):
            self._values.setdefault(path, Tail(path))
        before = self._is_gone, self._missing
        is_there = self.folder.is_dir()
        self._is_gone, self._missing = self._was_there and not is_there, self._ranks_missing()
        self._was_there |= is_there
        self.version += before != (self._is_gone, self._missing)

    def _ranks_missing(self) -> list[int]:
        """Ranks without a file, although others have begun some time ago."""
        headers = [rank.header for rank in self.ranks.values()]
        if not headers or time.time() - min(header.started for header in headers) < _ARRIVAL:
            return []
        bad = {int(_STEPS.sub(r"\1", path.name)) for path in self._bad}
        world_size = min(max(header.world_size for header in headers), _MOST_RANKS)
        return sorted(set(range(world_size)) - set(self.ranks) - bad)

    def _open(self, number: int, path: Path) -> None:
        try:
            status = path.stat()
            # A new file has no complete header for a moment.
            if status.st_size < HEADER_SIZE and time.time() - status.st_mtime < 5:
                return
            most_records = None if number == LEAD else self._most_records
            self.ranks[number] = RankSteps(path, most_records)
            self._bad.pop(path, None)
        except (ConfigurationError, OSError) as error:
            self._leave_out(number, path, error)

    def _leave_out(self, number: int, path: Path, error: Exception) -> None:
        """Forget a rank whose file cannot be read, and note why. The next search tries again."""
        self.ranks.pop(number, None)
        if isinstance(error, FileNotFoundError):
            return  # the run was deleted, or is about to begin anew
        if isinstance(error, OSError):
            note = f"{path} cannot be read: {error.strerror or error}"
        else:
            note = str(error)
        self.version += self._bad.get(path) != note
        self._bad[path] = note

    def _refresh_steps(self) -> bool:
        def refresh(item: tuple[int, RankSteps]) -> bool:
            number, rank = item
            note = rank.note
            try:
                return rank.refresh() or rank.note != note
            except (ConfigurationError, OSError) as error:
                self._leave_out(number, rank.path, error)
                return True

        # NumPy and the reads release the interpreter lock, which matters for long files.
        items = list(self.ranks.items())
        if len(items) > 1 and any(rank.last_step == 0 for _, rank in items):
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                changed = list(pool.map(refresh, items))
        else:
            changed = list(map(refresh, items))
        return any(changed)

    def _refresh_events(self) -> bool:
        events = []
        has_replaced = False
        for rank, tail in self._tails.values():
            records, replaced = tail.read()
            if replaced:
                has_replaced = True
                self._is_running.pop(rank, None)
                self.events = [event for event in self.events if event["rank"] != rank]
                if rank == LEAD:
                    self.lead_events = []
            for record in records:
                if time_of(record) is None:
                    continue
                name = str(record.get("event", ""))
                if name == "work":
                    self.work = record
                    continue
                self._is_running[rank] = name != "end"
                event = {**record, "event": name, "rank": rank}
                events.append(event)
                if rank == LEAD:
                    self.lead_events.append(event)
        if events:
            self.events = sorted([*self.events, *events], key=itemgetter("time"))[-MOST_EVENTS:]
        return bool(events) or has_replaced

    def file(self, name: str) -> Path | None:
        """A file that an event names, if it is a regular file within the folder of the run; else None."""
        if "\0" in name:
            return None
        # A run that was copied from another machine names files by their former place.
        if os.path.isabs(name):
            copied = [self.folder.joinpath(*Path(name).parts[-2:])]
        else:
            copied = []
        for candidate in (self.folder / name, *copied):
            try:
                path = candidate.resolve()
                if path.is_relative_to(self.folder.resolve()) and path.is_file():
                    return path
            except OSError:
                continue
        return None


def values_files(folder: Path) -> list[Path]:
    """The files of logged values in the folder of a run, and in the folders in it that are not runs of their own."""
    try:
        with os.scandir(folder) as entries:
            folders = sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []
    folders = [folder, *(found for found in folders if not (found / FOLDER).is_dir())]
    return [path for path in (found / "values.jsonl" for found in folders) if path.is_file()]


def open_runs(
    paths: Sequence[str], *, may_be_absent: bool = False, are_partial: bool = False
) -> list[Run]:
    """Open the folders of runs.

    Args:
        paths: the folders. One that is empty may be that of a run that has not begun.
        may_be_absent: whether a folder may be that of a run that has not begun.
        are_partial: whether to read only the newest steps and events of ranks other than 0.

    Raises:
        ConfigurationError: a path is not a folder, or a folder that is not of a run.
    """
    folders = [user_path(path, "RUN") for path in paths]
    for folder in folders:
        try:
            _check_folder(folder)
        except FileNotFoundError:
            if not may_be_absent:
                raise ConfigurationError(f"the folder {folder} does not exist") from None
        except NotADirectoryError:
            raise ConfigurationError(f"{folder} is a file: pass the folder of a run") from None
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be read: {error.strerror or error}"
            ) from None
    absolute = [folder.resolve() for folder in folders]
    names = [folder.name or str(folder) for folder in absolute]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in absolute]
    return [Run(folder, name, are_partial) for folder, name in zip(absolute, names, strict=True)]


def _check_folder(folder: Path) -> None:
    entries = sorted(folder.iterdir())
    records = folder / FOLDER
    if records.is_dir():
        # Raises an error if it cannot be read.
        next(records.iterdir(), None)
    elif entries and not values_files(folder):
        inside = [entry.name for entry in entries if (entry / FOLDER).is_dir()]
        raise ConfigurationError(
            f"{folder} is not the folder of a run: it contains neither {FOLDER}/ nor values.jsonl"
            + (f". It contains these run folders: {', '.join(inside[:8])}" if inside else "")
        )

# SPDX-License-Identifier: Apache-2.0
"""The beginning of a save: its options, and the temporary folder that the ranks write to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import follow_links
from ..core.json_text import JSONObject
from ..runtime.agreement import Process
from .blocks import Segment
from .commit import drop_temporary, open_temporary, save_target
from .kinds import ObjectState
from .layout import rank_document_name, set_aside
from .run_lock import RunLocks

logger: logging.Logger = logging.getLogger(__name__)

ARRIVAL = 30.0  # seconds within which every rank must have called
COMPLETION = 1800.0  # seconds within which every rank must have written its files
_VISIBLE = 10.0  # seconds until a folder made on another machine must be visible here


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that a load has skipped, with the identity of its folder at that time."""

    name: str
    reason: str
    identity: tuple[int, int, int] | None

    @classmethod
    def found(cls, folder: Path, reason: str) -> DamagedCheckpoint:
        """Create the record of a damaged checkpoint in `folder`."""
        return cls(folder.name, reason, _identity(folder))


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """What identifies a folder: another folder of the same name has another identity."""
    try:
        found = folder.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


@dataclass
class Options:
    """How a run is saved.

    Fields:
        checkpoints: the directory to rotate in after the commit; None for no rotation.
        locks: the locks that the run keeps until its end. None takes a lock for this save only.
        damaged: checkpoints that a load has skipped. Those in the same directory are renamed before the save.
    """

    layout: str = "native"
    safe_serialization: bool = True
    save_on_each_node: bool = False
    arrival_timeout: float = ARRIVAL
    timeout: float = COMPLETION
    checkpoints: Path | None = None
    total_limit: int | None = None
    locks: RunLocks | None = None
    damaged: Sequence[DamagedCheckpoint] = ()

    def __post_init__(self) -> None:
        if self.layout not in ("native", "compat"):
            raise ConfigurationError(
                f"layout={self.layout!r}: a checkpoint's layout is 'native' or 'compat'"
            )


@dataclass
class PendingCheckpoint:
    """A save in progress: what this rank writes, and where.

    Args:
        given: the folder as the caller names it, to compare with other ranks.
    """

    given: Path
    process: Process
    options: Options
    folder: Path = field(init=False)
    world_size: int = field(init=False)
    # that of the folder next to `folder` that is written to; empty until it is known
    temporary_name: str = ""
    is_alone: bool = False  # only rank 0 saves; then `process` is a run of one
    home: int = 0  # the rank that owns the folder this rank writes to
    files: dict[str, list[Segment]] = field(default_factory=dict)
    pickled: dict[str, object] = field(default_factory=dict)
    sharded: Callable[[Path, BaseException | None], list[str]] | None = None
    locks: RunLocks | None = None  # on the rank that owns the folder
    error: BaseException | None = None  # of this rank; all raise it at the next exchange
    about: JSONObject = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # what the layout has no place for
    # the states of this rank that are written once
    entries: list[ObjectState] = field(default_factory=list)
    digests: dict[str, str] | None = None  # of `entries`, by key

    def __post_init__(self) -> None:
        self.folder = self.given.absolute()
        self.world_size = self.process.num_processes

    @property
    def temporary(self) -> Path:
        """The folder that this rank writes to."""
        return self.folder.with_name(self.temporary_name)

    @property
    def is_home(self) -> bool:
        """Whether this rank owns the folder, and writes what is written once."""
        return self.home == self.process.process_index

    @property
    def may_be_home(self) -> bool:
        """Whether `find_home` may find that this rank is one."""
        is_first_here = self.options.save_on_each_node and self.process.local_process_index == 0
        return self.process.process_index == 0 or is_first_here

    def open(self) -> None:
        """Follow links to the folder; rank 0 also prepares it."""
        if self._is_damaged:
            # A damaged checkpoint that is a link is renamed itself, not its target.
            self.folder = follow_links(self.folder.parent, "save_state") / self.folder.name
        else:
            self.folder = follow_links(self.folder, "save_state")
        if self.process.process_index == 0:
            self._make_temporary()

    def find_home(self) -> None:
        """Find the folder of rank 0, or, on a machine that does not share it, that of this machine's first rank."""
        longest = 0.5 if self.options.save_on_each_node else _VISIBLE
        if self.process.process_index == 0 or _appears(self.temporary, longest):
            return
        if not self.options.save_on_each_node:
            raise CheckpointError(
                f"the folder {self.folder.parent}, where rank 0 writes, is not shared with this rank's machine. "
                "Save to a shared file system, or set ProjectConfiguration(save_on_each_node=True)"
            )
        self.home = self.process.process_index - self.process.local_process_index
        if self.is_home:
            self._make_temporary()
        elif not _appears(self.temporary, _VISIBLE):
            raise CheckpointError(
                f"the folder {self.folder.parent} is not shared by the ranks of this machine"
            )

    def keep_own_files(self) -> None:
        """Drop what is written once: another rank writes it."""
        mine = f"{rank_document_name(self.process.process_index)}."
        self.files = {name: pieces for name, pieces in self.files.items() if name.startswith(mine)}
        self.pickled = {
            name: value for name, value in self.pickled.items() if name.startswith(mine)
        }

    def _make_temporary(self) -> None:
        """Take the folder's lock, free its name, create the temporary folder."""
        self.locks = self.options.locks or RunLocks()
        self.locks.acquire(
            self.folder if self._is_damaged else save_target(self.folder), self.options.checkpoints
        )
        self._free_numbers()
        self.folder = save_target(self.folder)
        self.temporary_name = open_temporary(self.folder, self.temporary_name).name

    @property
    def _is_damaged(self) -> bool:
        return any(self.folder.name == damaged.name for damaged in self.options.damaged)

    def _free_numbers(self) -> None:
        """Rename the damaged checkpoints that the run has skipped, so that it can use their numbers."""
        for damaged in self.options.damaged:
            folder = self.folder.with_name(damaged.name)
            identity = _identity(folder)
            if identity is None:
                continue
            if identity != damaged.identity:
                if folder == self.folder:
                    raise CheckpointError(
                        f"{folder} has been saved by another run since this one was loaded"
                    )
                continue
            moved = set_aside(folder)
            logger.warning(
                "skipped damaged checkpoint %s, which is now %s: %s",
                folder,
                moved.name,
                damaged.reason,
            )

    def close(self) -> None:
        """Release a lock that is not the run's."""
        if self.locks is not None and self.options.locks is None:
            self.locks.release()

    def discard(self) -> None:
        """Clean up after a failed save: remove its temporary folder, then release the lock."""
        try:
            if self.is_home and self.temporary_name:
                drop_temporary(self.temporary)
        finally:
            self.close()


def _appears(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

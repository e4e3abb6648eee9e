# SPDX-License-Identifier: Apache-2.0
"""The beginning of a save: all ranks agree on its folder, and find the temporary folder that they write to."""

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
from .layout import set_aside
from .ranks import SaveRanks
from .run_lock import RunLocks, SaveLock

logger: logging.Logger = logging.getLogger(__name__)

ARRIVAL = 30.0  # seconds within which every rank must have called
COMPLETION = 1800.0  # seconds within which every rank must have written its files
_VISIBLE = 10.0  # seconds until a folder made on another machine must be visible here
_ABSENT = (
    "Every process must call it, at the same place of the loop: not under `if accelerator.is_main_process`. If a rank "
    "may come later than that, call `accelerator.wait_for_everyone()` before."
)


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
            raise ConfigurationError(f"layout={self.layout!r}: a checkpoint's layout is 'native' or 'compat'")


@dataclass
class PendingCheckpoint:
    """A save in progress: what this rank writes, and where."""

    folder: Path
    temporary: Path
    process: Process
    options: Options
    home: int = 0  # the rank that commits the folder this rank writes to
    files: dict[str, list[Segment]] = field(default_factory=dict)
    pickled: dict[str, object] = field(default_factory=dict)
    sharded: Callable[[Path], None] | None = None
    extras: bool = False  # hooks or sharded writers have written into the folder too
    lock: SaveLock | None = None  # on the rank that commits the folder
    error: BaseException | None = None
    about: JSONObject = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # what the layout has no place for
    shared: dict[str, object] | None = None  # the content of the shared document, on a rank that writes one

    @property
    def is_home(self) -> bool:
        """Whether this rank commits the folder, and writes what is written once."""
        return self.home == self.process.process_index

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.close()

    def discard(self) -> None:
        """Clean up after a failed save: remove its temporary folder, then release the lock."""
        try:
            if self.is_home:
                drop_temporary(self.temporary)
        finally:
            self.close()


def open_pending(given: Path, process: Process, options: Options) -> tuple[PendingCheckpoint, SaveRanks]:
    """The temporary folder this rank writes to. Raises CheckpointError on every rank when the ranks disagree."""
    folder = given.absolute()
    ranks = SaveRanks(process, folder, options.timeout)
    pending: PendingCheckpoint | None = None
    error: Exception | None = None
    try:
        if any(folder.name == damaged.name for damaged in options.damaged):
            # A damaged checkpoint that is a link is renamed itself, not its target.
            folder = follow_links(folder.parent, "save_state") / folder.name
        else:
            folder = follow_links(folder, "save_state")
        if process.process_index == 0:
            pending = _start(folder, process, options)
            folder = pending.folder
    except Exception as caught:
        error = caught
    ranks.folder = folder
    mine = {"folder": str(given), "layout": options.layout, "temporary": pending and pending.temporary.name}
    try:
        rows = ranks.exchange("save_state", error, mine, options.arrival_timeout, _ABSENT)
        _check_same(rows)
        if pending is None:
            pending = PendingCheckpoint(folder, folder.with_name(rows[0]["temporary"]), process, options)
            try:
                _find_home(pending)
            except Exception as caught:
                error = caught
        # A rank that fails in a hook removes the folder: by then every rank must have found it.
        ranks.exchange("save_state: folder", error)
    except BaseException:
        if pending is not None:
            pending.discard()
        raise
    return pending, ranks


def _start(folder: Path, process: Process, options: Options) -> PendingCheckpoint:
    """On the rank that commits the folder: take its lock, free its name, create the temporary folder."""
    is_damaged = any(folder.name == damaged.name for damaged in options.damaged)
    lock = SaveLock(folder if is_damaged else save_target(folder), options.locks)
    try:
        _free_numbers(folder, options)
        target = save_target(folder)
        return PendingCheckpoint(target, open_temporary(target), process, options, lock=lock)
    except BaseException:
        lock.close()
        raise


def _free_numbers(target: Path, options: Options) -> None:
    """Rename the damaged checkpoints that the run has skipped, so that it can use their numbers."""
    for damaged in options.damaged:
        folder = target.with_name(damaged.name)
        identity = _identity(folder)
        if identity is None:
            continue
        if identity != damaged.identity:
            if folder == target:
                raise CheckpointError(f"{folder} has been saved by another run since this one was loaded")
            continue
        moved = set_aside(folder)
        logger.warning("skipped damaged checkpoint %s, which is now %s: %s", folder, moved.name, damaged.reason)


def _check_same(rows: list[dict[str, object]]) -> None:
    for name in ("folder", "layout"):
        if len({row[name] for row in rows}) > 1:
            values = "; ".join(f"rank {rank}: {row[name]}" for rank, row in enumerate(rows))
            raise CheckpointError(
                f"save_state was called with another {name} on other ranks: {values}. Use one on all."
            )


def _find_home(pending: PendingCheckpoint) -> None:
    """Find the folder of rank 0, or, on a machine that does not share it, that of this machine's first rank."""
    process, options = pending.process, pending.options
    if _appears(pending.temporary, 0.5 if options.save_on_each_node else _VISIBLE):
        return
    if not options.save_on_each_node:
        raise CheckpointError(
            f"the folder {pending.temporary.parent}, where rank 0 writes, is not shared with this rank's machine. "
            "Save to a shared file system, or set ProjectConfiguration(save_on_each_node=True)"
        )
    pending.home = process.process_index - process.local_process_index
    if process.local_process_index == 0:
        own = _start(pending.folder, process, options)
        pending.lock = own.lock
        try:
            own.temporary.rename(pending.temporary)
        except OSError:
            drop_temporary(own.temporary)
            raise
    elif not _appears(pending.temporary, _VISIBLE):
        raise CheckpointError(f"the folder {pending.temporary.parent} is not shared by the ranks of this machine")


def _appears(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

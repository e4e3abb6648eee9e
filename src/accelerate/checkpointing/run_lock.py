# SPDX-License-Identifier: Apache-2.0
"""One run at a time saves into a folder: a lock file names it, on local and on network file systems."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from ..core.system import machine_identity
from ..runtime.agreement import Agreement, Process
from .layout import is_numbered

logger: logging.Logger = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two updates of a lock file's modification time
SILENCE = 20.0  # seconds without an update after which a run on another machine counts as dead
_LONG_DEAD = 120.0  # seconds by the file server's own clock: no need to watch such a lock
_BUSY = 20.0  # seconds within which another thread of this process must finish its save
_RESUME_TIMEOUT = 60.0  # seconds within which every rank must have called resume
_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_SAME_START = 3.0  # seconds: a start time is computed from the boot time, which clock corrections shift


class FolderInUse(CheckpointError):
    """Another live run saves into the folder."""


@dataclass(frozen=True)
class Holder:
    """The process that owns a lock: the main process of a run."""

    token: str
    host: str
    machine: str  # boot and process namespace: equal where the process ids of both mean the same
    pid: int
    started: float  # of the process, seconds since the epoch
    command: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"host {self.host}, pid {self.pid}, started {since}: {self.command}"


def lock_path(folder: Path) -> Path:
    """The lock file of a folder to save into, next to it. Numbered checkpoints of a directory share one."""
    return folder.with_name(".checkpoints.lock" if is_numbered(folder) else f".{folder.name}.lock")


class FolderLock:
    """A lock file of this process. Threads and `RunLocks` of the process share it; a forked child does not.

    The file is created with a hard link (or O_EXCL where there are none): both are atomic on network file systems.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid: int = os.getpid()
        self.holder: Holder = _this_process()
        self.owners: set[object] = set()
        self.saving: threading.Lock = threading.Lock()  # locked during a save, which may end in another thread

    def take(self) -> None:
        """Create the lock file, or replace that of a dead run. Raises FolderInUse when its run is alive."""
        candidate = self.path.with_name(f"{self.path.name}.{self.holder.token}")
        try:
            _write(candidate, self.holder)
            while not self._place(candidate):
                found = _read(self.path)
                if found is None:
                    continue
                holder, _ = found
                alive = _is_alive(holder) if holder is not None else None
                if alive is None:
                    alive = _shows_life(self.path, candidate, holder)
                if alive:
                    raise FolderInUse(_in_use(self.path, holder))
                if alive is False:
                    self._remove_stale(holder)
        finally:
            with contextlib.suppress(OSError):
                candidate.unlink(missing_ok=True)
        _remove_leftovers(self.path)

    def _place(self, candidate: Path) -> bool:
        try:
            os.link(candidate, self.path)
        except FileExistsError:
            # A network file system may repeat a request whose answer was lost.
            return self.is_ours()
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            try:
                _write(self.path, self.holder)
            except FileExistsError:
                return False
        return True

    def _remove_stale(self, holder: Holder | None) -> None:
        aside = self.path.with_name(f"{self.path.name}.{self.holder.token}-stale")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        found = _read(aside)
        if found is not None and _token(found[0]) != _token(holder):
            # Another run has replaced the stale lock since it was read. This is the new one: put it back.
            with contextlib.suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)

    def is_ours(self) -> bool:
        """Whether this process owns the lock file."""
        found = _read(self.path)
        return found is not None and _token(found[0]) == self.holder.token and self.pid == os.getpid()

    def keep(self) -> None:
        """Raise FolderInUse if another run has taken the lock. A deleted lock file is created again."""
        if not self.is_ours():
            self.take()

    def touch(self) -> None:
        """Update the time of the lock file, as a heartbeat."""
        with contextlib.suppress(OSError):
            if self.is_ours():
                os.utime(self.path)

    def remove(self) -> None:
        """Remove the lock file if this process owns it."""
        with contextlib.suppress(OSError):
            if self.is_ours():
                self.path.unlink()


class RunLocks:
    """The locks of one run, taken at a save and kept until `release`, so that no other run saves in between.

    Only the process that commits a folder takes its lock. Remaining locks are released when the process exits.
    """

    _LIMIT = 8  # folders; a run that saves under ever new names keeps the locks of its last ones

    def __init__(self) -> None:
        self._locks: dict[Path, FolderLock] = {}

    def acquire(self, folder: Path) -> FolderLock:
        """The lock of a folder to save into, whose parent exists. Raises FolderInUse, or OSError of the system."""
        lock = _acquire(lock_path(folder), self)
        self._locks.pop(lock.path, None)
        self._locks[lock.path] = lock
        while len(self._locks) > self._LIMIT:
            oldest = next(iter(self._locks))
            _release(self._locks.pop(oldest), self)
        return lock

    def release(self) -> None:
        """Release all locks. A lock file is removed unless another run of this process uses it."""
        while self._locks:
            _release(self._locks.popitem()[1], self)


class SaveLock:
    """The lock of a folder during one save, from `SaveLock(...)` to `close()`, which another thread may call.

    Without the `locks` of a run, the lock file is removed at the end of the save. If another thread of this process
    saves into the same folder, the constructor waits for it.
    """

    def __init__(self, folder: Path, locks: RunLocks | None) -> None:
        self._own = RunLocks()  # empty where the run has its own
        self._lock = (locks or self._own).acquire(folder)
        if not self._lock.saving.acquire(timeout=_BUSY):
            self._own.release()
            raise FolderInUse(f"another thread of this process is still saving into {folder}")
        self._open = True

    def keep(self) -> None:
        """Raise FolderInUse when another run has taken the folder since."""
        self._lock.keep()

    def close(self) -> None:
        """Release the lock for the next save. Further calls do nothing."""
        if self._open:
            self._open = False
            self._lock.saving.release()
            self._own.release()


def claim_directory(directory: Path, locks: RunLocks, process: Process) -> None:
    """Take the lock of a directory of numbered checkpoints for a run that resumes in it; every rank calls it.

    Nothing is done for a directory that does not exist or is not writable: the first save takes the lock.
    Raises CheckpointError on every rank when another live run saves into it.
    """
    mine = None
    if process.process_index == 0:
        try:
            if directory.is_dir():
                locks.acquire(directory.resolve() / "checkpoint_0")
        except CheckpointError as error:
            mine = str(error)
        except OSError as error:
            logger.debug("no lock for %s: %s", directory, error)
    found = Agreement(process).exchange("resume: lock", mine, _RESUME_TIMEOUT)[0]
    if found is not None:
        raise FolderInUse(f"nothing was resumed: {found}")


def in_use_elsewhere(folder: Path) -> bool:
    """Whether a process other than this one may be saving into the folder now."""
    path = lock_path(folder)
    found = _read(path)
    if found is None:
        return False
    own = _LOCKS.get(path)
    if own is not None and own.is_ours():
        return own.saving.locked()
    return found[0] is None or _is_alive(found[0]) is not False


# --- this process's locks -----------------------------------------------------------------------------------------

_LOCKS: dict[Path, FolderLock] = {}
_GUARD = threading.RLock()
_wake = threading.Event()
_beating: list[int] = []  # the id of the process whose heartbeat thread runs; a forked child has none


def _acquire(path: Path, owner: object) -> FolderLock:
    with _GUARD:
        lock = _LOCKS.get(path)
        if lock is None or lock.pid != os.getpid():
            lock = FolderLock(path)
            lock.take()
            _LOCKS[path] = lock
        else:
            lock.keep()
        lock.owners.add(owner)
        if _beating != [os.getpid()]:
            _beating[:] = [os.getpid()]
            threading.Thread(target=_beat, name="checkpoint-lock", daemon=True).start()
        return lock


def _release(lock: FolderLock, owner: object) -> None:
    with _GUARD:
        lock.owners.discard(owner)
        if not lock.owners and _LOCKS.get(lock.path) is lock:
            del _LOCKS[lock.path]
            lock.remove()


def _release_all() -> None:
    with _GUARD:
        for lock in list(_LOCKS.values()):
            if lock.pid == os.getpid():
                lock.remove()
        _LOCKS.clear()


def _beat() -> None:
    while not _wake.wait(HEARTBEAT):
        for lock in list(_LOCKS.values()):
            lock.touch()


def _after_fork() -> None:
    # The child owns no lock. A thread that does not exist in the child may have locked the guard.
    global _GUARD
    _GUARD = threading.RLock()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
# Functions registered here run in reverse order, also in children of multiprocessing, which run no `atexit` function.
# The background writer registers later, so its save is complete before the locks are released.
threading._register_atexit(_release_all)  # type: ignore[attr-defined]


# --- lock files ---------------------------------------------------------------------------------------------------


def _write(path: Path, holder: Holder) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(holder), file)


def _read(path: Path) -> tuple[Holder | None, float] | None:
    """(holder, last update) of a lock file; None without a file. The holder is None if it cannot be parsed."""
    try:
        # Opening the file makes a network file system query its server; `stat` alone may return a cached time.
        with open(path, "rb") as file:
            text = file.read(1 << 16)
            updated = os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None
        raise
    return _parse(text), updated


def _parse(text: bytes) -> Holder | None:
    try:
        found: JSONObject = json.loads(text)
        values = {one.name: found[one.name] for one in fields(Holder)}
        return Holder(**values) if isinstance(values["pid"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


def _token(holder: Holder | None) -> str | None:
    return None if holder is None else holder.token


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of runs on this machine that were killed while they took the lock."""
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{32}(-stale)?")
    with contextlib.suppress(OSError):
        for entry in path.parent.iterdir():
            if pattern.fullmatch(entry.name):
                found = _read(entry)
                if found is not None and found[0] is not None and _is_alive(found[0]) is False:
                    entry.unlink(missing_ok=True)


def _in_use(path: Path, holder: Holder | None) -> str:
    if path.name == ".checkpoints.lock":
        subject = f"{path.parent}"
    else:
        subject = f"{path.with_name(path.name.removeprefix('.').removesuffix('.lock'))}"
    other = "a run that its lock file does not name" if holder is None else f"another run ({holder})"
    return (
        f"{subject} is in use: {other} saves into it. Stop that run, or use another folder for this one. A run "
        f"releases its folders when it exits and at end_training(). If that run is dead, delete {path}"
    )


# --- who is alive -------------------------------------------------------------------------------------------------


def _this_process() -> Holder:
    return Holder(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=machine_identity(),
        pid=os.getpid(),
        started=_start_of(os.getpid()) or 0.0,
        command=" ".join(sys.argv)[:200] or sys.executable,
    )


def _start_of(pid: int) -> float | None:
    """When a process started; None for one that is not there, or is a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _is_alive(holder: Holder) -> bool | None:
    """Whether the holder is alive and excludes this process; None if this machine cannot find out.

    A child process of the holder may take over its lock: for example a script that a notebook runs.
    """
    if holder.machine != machine_identity():
        return None
    if holder.pid == os.getpid():
        return False
    import psutil

    try:
        started = _start_of(holder.pid)
        if started is None or abs(started - holder.started) > _SAME_START:
            return False
        return all(parent.pid != holder.pid for parent in psutil.Process().parents())
    except psutil.Error:
        return True


def _shows_life(path: Path, probe: Path, holder: Holder | None) -> bool | None:
    """Watch a lock of another machine: True if it is updated, False if not, None if its owner changes.

    Uses the file server's clock and durations on this machine, and never compares the clocks of two machines.
    """
    first = _read(path)
    if first is None or _token(first[0]) != _token(holder):
        return None
    os.utime(probe)
    if probe.stat().st_mtime - first[1] > _LONG_DEAD:
        return False
    logger.warning("%s belongs to %s: waiting up to %.0f s for a sign that it is alive", path, holder, SILENCE)
    deadline = time.monotonic() + SILENCE
    while time.monotonic() < deadline:
        time.sleep(0.25)
        now = _read(path)
        if now is None or _token(now[0]) != _token(holder):
            return None
        if now[1] != first[1]:
            return True
    return False

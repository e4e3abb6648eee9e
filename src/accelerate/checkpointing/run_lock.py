# SPDX-License-Identifier: Apache-2.0
"""One run at a time saves into a folder: its process has the system's lock (flock) of a file.

The lock ends with the process, also on a network file system that has such locks. On one that has none, a run whose
lock file another run has written to fails at its next commit.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import BinaryIO

import psutil

from ..core.errors import CheckpointError
from ..core.json_text import JSONObject

logger: logging.Logger = logging.getLogger(__name__)

# By lock file: the file, open and locked, with its content, and the `RunLocks` of this process that use it.
_FILES: dict[Path, tuple[BinaryIO, JSONObject]] = {}
_OWNERS: dict[Path, set[RunLocks]] = {}
# The system's lock is shared with a forked child until the child closes the file.
os.register_at_fork(after_in_child=_FILES.clear)
os.register_at_fork(after_in_child=_OWNERS.clear)


class FolderInUse(CheckpointError):
    """Another live run saves into the folder."""


class RunLocks:
    """The locks of one run, from `acquire` to `release`, or to the end of the process.

    Only the process that prepares a folder takes its lock. Several runs of one process share a lock.
    """

    def __init__(self) -> None:
        self._paths: set[Path] = set()

    def acquire(self, folder: Path, directory: Path | None = None) -> JSONObject:
        """Take or keep the lock of a folder to save into, or of the directory of its kind. Returns its content.

        Raises FolderInUse when another live run has it, or OSError of the system.
        """
        path = lock_path(folder, directory)
        if path not in _FILES or not _is_at(path, _FILES[path][0]):
            _FILES[path] = _take(path)
        _OWNERS.setdefault(path, set()).add(self)
        self._paths.add(path)
        return _FILES[path][1]

    def release(self) -> None:
        """Release all locks. A lock file is removed unless another run of this process uses it."""
        while self._paths:
            path = self._paths.pop()
            owners = _OWNERS.get(path, set())
            owners.discard(self)
            if not owners and path in _FILES:
                file, content = _FILES.pop(path)
                with file, contextlib.suppress(OSError):
                    if content["pid"] == os.getpid() and _read(path) == content:
                        path.unlink()


def lock_path(folder: Path, directory: Path | None = None) -> Path:
    """The lock file of a folder to save into, next to it; or next to `directory`, whose checkpoints share one."""
    locked = folder if directory is None else directory.absolute()
    return locked.with_name(f".{locked.name}.lock")


def check_lock(folder: Path, directory: Path | None, content: JSONObject) -> None:
    """Raise FolderInUse unless a lock has the content that another process of this run has put there."""
    path = lock_path(folder, directory)
    present = _read(path)
    if present != content:
        raise FolderInUse(_in_use(path, present))


def in_use_elsewhere(folder: Path) -> bool:
    """Whether a process other than this one saves into the folder now."""
    for path in (lock_path(folder), lock_path(folder, folder.parent)):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return path not in _FILES
        except OSError:
            continue
    return False


def _take(path: Path) -> tuple[BinaryIO, JSONObject]:
    """Open the lock file, lock it, and write what this process is. Raises FolderInUse when another process has it."""
    while True:
        file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(path)
            if holder is not None and _is_parent(holder):
                return file, holder
            file.close()
            raise FolderInUse(_in_use(path, holder)) from None
        except OSError as error:
            logger.debug("%s: no lock on this file system: %s", path, error)
        if _is_at(path, file):
            command = " ".join(sys.argv)[:200] or sys.executable
            content = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": time.time(),
                "command": command,
            }
            file.truncate()
            file.write(json.dumps(content).encode())
            file.flush()
            return file, content
        file.close()  # its run has removed it since it was opened


@atexit.register
def _release_all() -> None:
    for owners in list(_OWNERS.values()):
        for locks in list(owners):
            locks.release()


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether a path still leads to an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _read(path: Path) -> JSONObject | None:
    """The content of a lock file; None where there is none, or it cannot be understood."""
    try:
        holder = json.loads(path.read_bytes()[: 1 << 16])
        return holder if {"host", "pid", "since", "command"} <= set(holder) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def _is_parent(holder: JSONObject) -> bool:
    """Whether a process above this one has the lock, as a notebook that runs a script."""
    is_here = holder["host"] == socket.gethostname()
    return is_here and any(parent.pid == holder["pid"] for parent in psutil.Process().parents())


def _in_use(path: Path, holder: JSONObject | None) -> str:
    folder = path.with_name(path.name.removeprefix(".").removesuffix(".lock"))
    other = "a run that its lock file does not name"
    if holder is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        other = f"another run (host {holder['host']}, pid {holder['pid']}, since {since}: {holder['command']})"
    return (
        f"{folder} is in use: {other} saves into it. Stop that run, or use another folder for this one. A run "
        "releases its folders when it exits and at end_training()"
    )

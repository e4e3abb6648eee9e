# SPDX-License-Identifier: Apache-2.0
"""A folder that appears complete or not at all, saved by one run at a time.

It is written next to its place, synced, then renamed atomically. During a save the process that prepares it has the
system's lock (flock) of a file next to it, which ends with the process, also on a network file system that has such
locks. On one that has none, a run whose lock file another run has written to fails at its commit. Between the saves of
a run, its lock is in a folder of this machine: nothing of ours is in the user's folders then.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import ctypes.util
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import psutil

from ..core.bucket_path import BucketPath
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import (
    follow_links,
    fsync_path,
    lock_file,
    named_errors,
    open_regular,
    read_regular,
)
from ..core.json_text import JSONObject
from .layout import (
    MANIFEST,
    REPLACED,
    Manifest,
    free_name,
    is_api_file,
    parse_manifest,
    read_manifest,
    siblings,
)

logger: logging.Logger = logging.getLogger(__name__)

# By lock file: the file, open and locked, with its content, and the `RunLocks` of this process that use it.
_FILES: dict[Path, tuple[BinaryIO, JSONObject]] = {}
_OWNERS: dict[Path, weakref.WeakSet[RunLocks]] = {}
if hasattr(os, "register_at_fork"):
    # The system's lock is shared with a forked child until the child closes the file.
    os.register_at_fork(after_in_child=_FILES.clear)
    os.register_at_fork(after_in_child=_OWNERS.clear)


class FolderInUse(CheckpointError):
    """Another live run saves into the folder."""


class RunLocks:
    """The locks of one run, from `acquire` to `release`, until it is freed, or to the end of the process.

    Only the process that prepares a folder takes its lock. Several runs of one process share a lock.
    """

    def __init__(self) -> None:
        self._paths: set[Path] = set()
        weakref.finalize(self, _close_unused, self._paths).atexit = False

    def acquire(self, folder: Path, directory: Path | None = None) -> JSONObject:
        """Take or keep the lock of a folder to save into, or of the directory of its kind. Returns its content.

        Raises FolderInUse when another live run has it, or OSError of the system.
        """
        return self._acquire(lock_path(folder, directory), directory or folder)

    def acquire_run(self, directory: Path) -> None:
        """Take or keep a directory for the saves of this run, among the runs of this machine.

        It is a lock outside of the user's folders. Raises FolderInUse when another live run has it.
        """
        if isinstance(directory, BucketPath):
            return  # the commit decides
        path = _run_lock_path(directory)
        if path is not None:
            self._acquire(path, directory)

    def _acquire(self, path: Path, folder: Path) -> JSONObject:
        if path not in _FILES or not _is_at(path, _FILES[path][0]):
            _FILES[path] = _take(path, folder)
        _OWNERS.setdefault(path, weakref.WeakSet()).add(self)
        self._paths.add(path)
        return _FILES[path][1]

    def release(self) -> None:
        """Release all locks. A lock file is removed unless another run of this process uses it."""
        for path in self._paths:
            if path in _OWNERS:
                _OWNERS[path].discard(self)
        _close_unused(self._paths)


def _close_unused(paths: set[Path]) -> None:
    """Close and remove the lock files that no run of this process uses any more. Empties `paths`."""
    while paths:
        path = paths.pop()
        if list(_OWNERS.get(path, ())) or path not in _FILES:
            continue
        file, content = _FILES.pop(path)
        with file, contextlib.suppress(OSError):
            if content["pid"] == os.getpid() and _read(path) == content:
                try:
                    path.unlink()
                except PermissionError:
                    # Windows removes no open file, and so none that another run has opened meanwhile.
                    file.close()
                    path.unlink()


def lock_path(folder: Path, directory: Path | None = None) -> Path:
    """The lock file of a folder to save into, next to it; or next to `directory`, whose checkpoints share one."""
    locked = folder if directory is None else directory.absolute()
    return locked.with_name(f".{locked.name}.lock")


def _run_lock_path(directory: Path) -> Path | None:
    """The lock file of a run that saves into a directory, in a folder of this user; None where there can be none."""
    real = os.path.realpath(directory)
    if hasattr(os, "geteuid"):
        user = os.geteuid()
    else:
        user = 0  # Windows has a temporary folder for each user
    folder = Path(tempfile.gettempdir(), f"accelerate-runs-{user}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_own = status.st_uid == user or not hasattr(os, "geteuid")
        if stat.S_ISDIR(status.st_mode) and is_own:
            name = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
            return folder / f"{name}.lock"
    return None


def check_lock(folder: Path, directory: Path | None, content: JSONObject) -> None:
    """Raise FolderInUse unless a lock has the content that another process of this run has put there."""
    path = lock_path(folder, directory)
    present = _read(path)
    if present != content:
        raise FolderInUse(_in_use(directory or folder, present))


def in_use_elsewhere(folder: Path) -> bool:
    """Whether a process other than this one saves into the folder now."""
    for path in (lock_path(folder), lock_path(folder, folder.parent)):
        try:
            with open(path, "rb", opener=open_regular) as file:
                lock_file(file.fileno(), shared=True)
        except BlockingIOError:
            return path not in _FILES
        except OSError:
            continue
    return False


def _take(path: Path, folder: Path) -> tuple[BinaryIO, JSONObject]:
    """Open the lock file, lock it, and write what this process is. Raises FolderInUse when another process has it."""
    while True:
        file: BinaryIO = os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT), "r+b")
        try:
            lock_file(file.fileno())
        except BlockingIOError:
            holder = _read(path)
            if holder is not None and holder["host"] == socket.gethostname():
                # A process above this one may have it, as a notebook that runs a script.
                parents = psutil.Process().parents()
                if any(parent.pid == holder["pid"] for parent in parents):
                    return file, holder
            file.close()
            raise FolderInUse(_in_use(folder, holder)) from None
        except OSError as error:
            logger.debug("%s: this file system does not support locks: %s", path, error)
        if file.read(1) not in (b"", b"{", b"\0"):
            file.close()
            raise ConfigurationError(
                f"{path} is not a lock file of this package: rename or remove it"
            )
        file.seek(0)
        if _is_at(path, file):
            command = " ".join(sys.argv)[:200] or sys.executable
            content = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": time.time(),
                "command": command,
            }
            with named_errors(path):
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
        holder: JSONObject = json.loads(read_regular(path, 1 << 16))
        if {"host", "pid", "since", "command"} <= set(holder):
            return holder
    except (OSError, ValueError, TypeError):
        pass
    return None


def _in_use(folder: Path, holder: JSONObject | None) -> str:
    other = "a run that its lock file does not name"
    if holder is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        other = f"another run (host {holder['host']}, pid {holder['pid']}, since {since}: {holder['command']})"
    return (
        f"{folder} is in use: {other} saves into it. Stop that run, or use another folder for "
        "this one. A run releases its folders at end_training() and when it exits"
    )


UNFINISHED = ".unfinished"  # in a temporary folder, until its commit


def save_target(folder: Path) -> Path:
    """The folder that a save into `folder` replaces: without symbolic links, so that a link stays what it is.

    Its parent is made. Raises ConfigurationError where a folder cannot be replaced: a file, the current folder, the
    home folder, a mount point, the root.
    """
    target = follow_links(folder, "save_state")
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: pass a folder")
    if os.path.ismount(target) or _same(target, Path.home) or _same(target, Path.cwd):
        raise ConfigurationError(
            f"{target} is the current folder, the home folder or a mount point. A save replaces "
            f"the entire folder: use a separate folder, such as {target / 'checkpoint'}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in target.parents if path.exists())
        raise ConfigurationError(f"{target} cannot be created: {file} is a file") from None
    return target


def _same(folder: Path, other: Callable[[], Path]) -> bool:
    try:
        return folder.samefile(other())
    except (OSError, RuntimeError):
        return False


def open_temporary(folder: Path, name: str = "") -> Path:
    """A new hidden folder next to `folder`, on the same file system, to write its next content to.

    An interrupted save of the same folder is recovered or removed first. The caller owns the folder's lock.
    Errors of the system pass through.
    """
    recover_interrupted_commit(folder)
    for old in siblings(folder, "tmp"):
        shutil.rmtree(old, ignore_errors=True)
    temporary = folder.with_name(name or f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    (temporary / UNFINISHED).touch()
    return temporary


def drop_temporary(temporary: Path) -> None:
    """Remove a temporary folder. Errors are ignored."""
    shutil.rmtree(temporary, ignore_errors=True)


def commit(temporary: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `temporary`, sync it, and make it `folder`.

    Where `folder` holds an older checkpoint, the two are exchanged in one step and the older one is removed; files in
    it that no checkpoint has written stay. A folder with other content only gets the new files, the manifest last.
    """
    try:
        (temporary / UNFINISHED).unlink()
    except FileNotFoundError:
        # torch's writer of shards makes a folder that is not there.
        raise CheckpointError(f"{temporary} was removed while the checkpoint was written") from None
    path = temporary / MANIFEST
    with named_errors(path), open(path, "xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    for entry in temporary.rglob("*"):
        if entry.is_dir():
            fsync_path(entry)
    fsync_path(temporary)
    if not folder.exists():
        os.rename(temporary, folder)
    elif (folder / MANIFEST).exists() or any(is_api_file(entry.name) for entry in folder.iterdir()):
        _replace(temporary, folder)
    else:
        _move_in(temporary, folder)
    fsync_path(folder.parent)


def _move_in(temporary: Path, folder: Path) -> None:
    """Commit into a folder that is no checkpoint yet. It becomes one with the last rename, that of the manifest.

    A file of the same name is replaced. Nothing else in the folder changes, also in subfolders.
    """
    for path in sorted(temporary.rglob("*")):
        target = folder / path.relative_to(temporary)
        if os.path.lexists(target) and (target.is_symlink() or path.is_dir() != target.is_dir()):
            # Found before the first rename, so that nothing is moved.
            if target.is_symlink():
                kind = "link"
            elif target.is_dir():
                kind = "folder"
            else:
                kind = "file"
            raise CheckpointError(
                f"{target} is a {kind}, but the checkpoint has a file or folder of that name: "
                "rename or remove it"
            )
    for entry in sorted(temporary.iterdir()):
        if entry.name != MANIFEST:
            _merge_into(entry, folder / entry.name)
    fsync_path(folder)
    os.replace(temporary / MANIFEST, folder / MANIFEST)
    fsync_path(folder)
    temporary.rmdir()


def _merge_into(entry: Path, target: Path) -> None:
    if not (entry.is_dir() and target.is_dir()):
        os.replace(entry, target)
        return
    for inner in sorted(entry.iterdir()):
        _merge_into(inner, target / inner.name)
    entry.rmdir()
    fsync_path(target)


def _replace(temporary: Path, folder: Path) -> None:
    # A folder of this name is never removed as a leftover: it may contain files of the user until the end.
    swap = folder.with_name(f".{folder.name}.swap-{uuid.uuid4().hex[:8]}")
    os.rename(temporary, swap)
    # Entries that no checkpoint has written stay where they are: a volume may be mounted on one.
    written = {name.partition("/")[0] for name in _listed(folder)}
    names = {entry.name for entry in folder.iterdir()} - written
    older = None
    if all(map(is_api_file, names)):
        older = _swapped(swap, folder)
    if older is None:
        _move_over(swap, folder)
        return
    fsync_path(folder.parent)
    _clear(older, folder)


def _swapped(swap: Path, folder: Path) -> Path | None:
    """Put `swap` in the place of `folder`, and return the older one; None where that cannot be renamed.

    It cannot in a lower layer of an overlay, as the image of a container.
    """
    if _exchange(swap, folder):
        return swap
    # There is no atomic exchange (macOS, some network file systems). After a kill between the two renames,
    # `recover_interrupted_commit` completes the second.
    aside = folder.with_name(f".{folder.name}.swap-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(folder, aside)
    except OSError as error:
        logger.debug("%s cannot be renamed: %s", folder, error)
        return None
    os.rename(swap, folder)
    return aside


def _move_over(swap: Path, folder: Path) -> None:
    """Replace a checkpoint file by file, the manifest last. Nothing else in its folder changes.

    Until the end `swap` has what is missing, and `recover_interrupted_commit` goes on here after a kill.
    """
    marker = swap / REPLACED
    if not marker.exists():
        if (folder / MANIFEST).exists():
            os.rename(folder / MANIFEST, marker)
        else:
            marker.touch()
        fsync_path(swap)
        fsync_path(folder)
    if (swap / MANIFEST).exists():
        names = {*read_manifest(swap).files}
        for name in _foreign_names(folder, marker) - names:
            with contextlib.suppress(IsADirectoryError, FileNotFoundError):
                (folder / name).unlink()
        for name in sorted(names):
            if not (swap / name).exists():
                continue  # moved before the kill
            target = folder / name
            if target.is_dir() and not target.is_symlink():
                os.rename(target, free_name(target, "earlier"))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(swap / name, target)
            fsync_path(target.parent)
        os.replace(swap / MANIFEST, folder / MANIFEST)
        fsync_path(folder)
    shutil.rmtree(swap)


def _foreign_names(folder: Path, marker: Path) -> set[str]:
    """The files of the replaced checkpoint that are in a folder, and others that a load could take for such."""
    names: set[str] = set()
    with contextlib.suppress(CheckpointError, OSError):
        names.update(parse_manifest(marker).files)
    for entry in folder.iterdir():
        if is_api_file(entry.name):
            names.add(entry.name)
            names.update(path.relative_to(folder).as_posix() for path in entry.rglob("*"))
    return names


def recover_interrupted_commit(folder: Path) -> None:
    """Complete a replacement of `folder` that a kill has interrupted. Nothing is lost.

    The caller owns the folder's lock, or knows that no run saves into it.
    """
    leftovers = []
    for swap in siblings(folder, "swap"):
        if (swap / REPLACED).exists() and folder.exists():
            _move_over(swap, folder)
        else:
            leftovers.append(swap)
    if leftovers and not folder.exists():
        # Killed between the two renames: the newest complete checkpoint takes the place.
        manifests = [old / MANIFEST for old in leftovers if (old / MANIFEST).exists()]
        if manifests:
            newest = max(manifests, key=lambda path: path.stat().st_mtime_ns).parent
        else:
            newest = leftovers[0]
        os.rename(newest, folder)
        leftovers.remove(newest)
    for old in leftovers:
        _clear(old, folder)


def can_restore(folder: Path) -> bool:
    """Whether a kill has left a checkpoint next to its place, for `restore`."""
    if isinstance(folder, BucketPath):
        return False
    return any(siblings(Path(os.path.realpath(folder)), "swap"))


def restore(folder: Path) -> None:
    """Before a load: complete a commit that a kill has interrupted, with what it has left next to the folder.

    Nothing is done while a run saves into the folder, nor where nothing can be written.
    """
    if isinstance(folder, BucketPath):
        return
    with contextlib.suppress(OSError, ConfigurationError):
        target = follow_links(folder, "load_state")
        if not (target / MANIFEST).exists() and not in_use_elsewhere(target):
            recover_interrupted_commit(target)


def _clear(old: Path, folder: Path) -> None:
    """Remove the files of a checkpoint from `old`, move all others to `folder`, and remove what is empty then."""
    try:
        _carry(old, old, folder, _listed(old) | _listed(folder))
    except OSError as error:
        # The checkpoint in `folder` is complete. The next save continues here.
        logger.warning(
            "%s: files that do not belong to the checkpoint are still in %s: %s", folder, old, error
        )


def _listed(folder: Path) -> set[str]:
    try:
        return {MANIFEST, *read_manifest(folder).files}
    except CheckpointError:
        return {MANIFEST}


def _carry(old: Path, inside: Path, folder: Path, listed: set[str]) -> None:
    for entry in list(inside.iterdir()):
        path = entry.relative_to(old)
        name = path.as_posix()
        target = folder / path
        # What a load could take for a file of the API's format, or for a shard, must go.
        is_owned = name in listed or is_api_file(path.parts[0])
        if entry.is_dir() and not entry.is_symlink():
            has_owned = any(file.startswith(f"{name}/") for file in listed)
            if is_owned or target.is_dir() or has_owned:
                _carry(old, entry, folder, listed)
                continue
        elif is_owned:
            entry.unlink()
            continue
        if os.path.lexists(target):  # somebody has made it anew since the folder was replaced
            target = free_name(target, "earlier")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(entry, target)
    inside.rmdir()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    name = ctypes.util.find_library("c")
    if name:
        return getattr(ctypes.CDLL(name, use_errno=True), "renameat2", None)
    return None


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one atomic step (Linux's renameat2); False where the system cannot."""
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV, errno.EBUSY):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))

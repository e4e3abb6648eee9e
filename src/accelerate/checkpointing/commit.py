# SPDX-License-Identifier: Apache-2.0
"""A folder that appears whole or not at all: written beside its place, synced, put there by one atomic rename."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import functools
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from ..core.files import fsync_path
from .layout import owned_entries, siblings
from .manifest import MANIFEST, Manifest, read_manifest


def open_temporary(folder: Path) -> Path:
    """A new hidden folder beside `folder` to write its next content to.

    What a killed save of the same folder has left is put right or removed first. Errors of the system pass through.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    settle(folder)
    for old in siblings(folder, "tmp"):
        shutil.rmtree(old, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    return temporary


def drop_temporary(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)


def commit(temporary: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `temporary`, sync it, and make it `folder`.

    Where `folder` holds an older checkpoint, the two are exchanged in one step and the older one is removed; files in
    it that no checkpoint has written stay. A folder with other content only gets the new files, the manifest last.
    """
    path = temporary / MANIFEST
    with open(path, "xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    for entry in temporary.rglob("*"):
        if entry.is_dir():
            fsync_path(entry)
    fsync_path(temporary)
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(temporary, folder)
    elif owned_entries(folder):
        _replace(temporary, folder)
    else:
        _move_in(temporary, folder)
    fsync_path(folder.parent)


def _move_in(temporary: Path, folder: Path) -> None:
    """Into a folder that was no checkpoint before: it becomes one with the last rename, that of the manifest."""
    for entry in sorted(temporary.iterdir()):
        if entry.name == MANIFEST:
            continue
        target = folder / entry.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        os.rename(entry, target)
    fsync_path(folder)
    os.rename(temporary / MANIFEST, folder / MANIFEST)
    fsync_path(folder)
    temporary.rmdir()


def _replace(temporary: Path, folder: Path) -> None:
    # Under this name the sibling is never taken for rubbish: it may hold files of the user's until the end.
    swap = folder.with_name(f".{folder.name}.swap-{uuid.uuid4().hex[:8]}")
    os.rename(temporary, swap)
    if not _exchange(swap, folder):
        # Without an atomic exchange (macOS, some network file systems) `settle` mends a kill between the two renames.
        aside = folder.with_name(f".{folder.name}.swap-{uuid.uuid4().hex[:8]}")
        os.rename(folder, aside)
        os.rename(swap, folder)
        swap = aside
    fsync_path(folder.parent)
    _clear(swap, folder)


def settle(folder: Path) -> None:
    """Put right what a kill in the middle of a replacement has left beside `folder`: nothing of it is lost."""
    leftovers = list(siblings(folder, "swap"))
    if not leftovers:
        return
    if not folder.exists():
        # Killed between the two renames: the newest whole checkpoint takes the place.
        whole = [old for old in leftovers if (old / MANIFEST).exists()] or leftovers
        newest = max(whole, key=_saved_at)
        os.rename(newest, folder)
        leftovers.remove(newest)
    for old in leftovers:
        _clear(old, folder)


def _saved_at(folder: Path) -> tuple[str, float]:
    try:
        created = read_manifest(folder).created
    except Exception:
        created = ""
    return created, folder.stat().st_mtime


def _clear(old: Path, folder: Path) -> None:
    """Carry the entries of `old` that no checkpoint owns over to `folder` and remove the rest."""
    owned = owned_entries(old)
    for entry in list(old.iterdir()):
        if entry.name not in owned and not os.path.lexists(folder / entry.name):
            os.rename(entry, folder / entry.name)
    shutil.rmtree(old, ignore_errors=True)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    name = ctypes.util.find_library("c")
    return getattr(ctypes.CDLL(name, use_errno=True), "renameat2", None) if name else None


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one atomic step (Linux's renameat2); False where the system cannot."""
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))

# SPDX-License-Identifier: Apache-2.0
"""A folder that appears complete or not at all: written next to its place, synced, then renamed atomically."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import functools
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import follow_links, fsync_path, named_errors
from .layout import owned_entries, siblings
from .manifest import MANIFEST, Manifest, is_api_file, read_manifest
from .run_lock import in_use_elsewhere

UNFINISHED = ".unfinished"  # in a temporary folder, until its commit


def save_target(folder: Path) -> Path:
    """The folder that a save into `folder` replaces: without symbolic links, so that a link stays what it is.

    Its parent is made. Raises ConfigurationError where a folder cannot be replaced: a file, the current folder, the
    home folder, a mount point, the root.
    """
    target = follow_links(folder, "save_state")
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: give a folder")
    reasons = {
        "the root of the file system": target == target.parent,
        "the home folder": _same(target, Path.home),
        "the current folder, and a checkpoint is replaced in one step together with its folder": _same(
            target, Path.cwd
        ),
        "a mount point, which cannot be replaced in one step": os.path.ismount(target),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(f"{target} is {reason}: give a separate folder, such as {target / 'checkpoint'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in target.parents if path.exists())
        raise ConfigurationError(f"{target} cannot be made: {file} is a file") from None
    return target


def _same(folder: Path, other: Callable[[], Path]) -> bool:
    try:
        return folder.samefile(other())
    except (OSError, RuntimeError):
        return False


def open_temporary(folder: Path) -> Path:
    """A new hidden folder next to `folder`, on the same file system, to write its next content to.

    An interrupted save of the same folder is recovered or removed first. The caller owns the folder's lock.
    Errors of the system pass through.
    """
    recover_interrupted_commit(folder)
    for old in siblings(folder, "tmp"):
        shutil.rmtree(old, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
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
    elif not any(folder.iterdir()):
        with contextlib.suppress(OSError):
            shutil.copymode(folder, temporary)
        os.rename(temporary, folder)
    elif owned_entries(folder):
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
            kind = "link" if target.is_symlink() else "folder" if target.is_dir() else "file"
            raise CheckpointError(
                f"{target} is a {kind} where the checkpoint has a file or folder of that name: rename or remove it"
            )
    for entry in sorted(temporary.iterdir()):
        if entry.name != MANIFEST:
            _merge_into(entry, folder / entry.name)
    fsync_path(folder)
    os.rename(temporary / MANIFEST, folder / MANIFEST)
    fsync_path(folder)
    temporary.rmdir()


def _merge_into(entry: Path, target: Path) -> None:
    if not (entry.is_dir() and target.is_dir()):
        os.rename(entry, target)
        return
    for inner in sorted(entry.iterdir()):
        _merge_into(inner, target / inner.name)
    entry.rmdir()
    fsync_path(target)


def _replace(temporary: Path, folder: Path) -> None:
    # A folder of this name is never removed as a leftover: it may contain files of the user until the end.
    swap = folder.with_name(f".{folder.name}.swap-{uuid.uuid4().hex[:8]}")
    os.rename(temporary, swap)
    if not _exchange(swap, folder):
        # There is no atomic exchange (macOS, some network file systems). After a kill between the two renames,
        # `recover_interrupted_commit` completes the second.
        aside = folder.with_name(f".{folder.name}.swap-{uuid.uuid4().hex[:8]}")
        os.rename(folder, aside)
        os.rename(swap, folder)
        swap = aside
    fsync_path(folder.parent)
    _clear(swap, folder)


def recover_interrupted_commit(folder: Path) -> None:
    """Complete a replacement of `folder` that a kill has interrupted. Nothing is lost.

    The caller owns the folder's lock, or knows that no run saves into it.
    """
    leftovers = list(siblings(folder, "swap"))
    if not leftovers:
        return
    if not folder.exists():
        # Killed between the two renames: the newest complete checkpoint takes the place.
        complete = [old for old in leftovers if (old / MANIFEST).exists()] or leftovers
        newest = max(complete, key=_saved_at)
        os.rename(newest, folder)
        leftovers.remove(newest)
    for old in leftovers:
        _clear(old, folder)


def can_restore(folder: Path) -> bool:
    """Whether a kill has left a checkpoint next to its place, for `restore`."""
    return any(siblings(Path(os.path.realpath(folder)), "swap"))


def restore(folder: Path) -> None:
    """Before a load: put a checkpoint back that a kill between two renames has left next to its place.

    Nothing is done while a run saves into the folder, nor where nothing can be written.
    """
    with contextlib.suppress(OSError, ConfigurationError):
        target = follow_links(folder, "load_state")
        if not target.exists() and not in_use_elsewhere(target):
            recover_interrupted_commit(target)


def _saved_at(folder: Path) -> tuple[str, float]:
    try:
        created = read_manifest(folder).created
    except Exception:
        created = ""
    return created, folder.stat().st_mtime


def _clear(old: Path, folder: Path) -> None:
    """Move files that no checkpoint has written from `old` to `folder`, and remove the rest."""
    owned = owned_entries(old)
    for entry in list(old.iterdir()):
        if entry.name not in owned:
            if not os.path.lexists(folder / entry.name):
                os.rename(entry, folder / entry.name)
        elif entry.is_dir() and not entry.is_symlink():
            _carry_files(old, entry, folder)
    shutil.rmtree(old, ignore_errors=True)


def _carry_files(old: Path, inside: Path, folder: Path) -> None:
    """Move the files of a subfolder that the manifest does not list. Shards of an unlisted save are not kept."""
    try:
        listed = set(read_manifest(old).files)
    except CheckpointError:
        return
    top = inside.relative_to(old).as_posix()
    if is_api_file(top):
        return  # a folder of shards: what a load could take for one of them must go
    for path in sorted(inside.rglob("*")):
        name = path.relative_to(old).as_posix()
        target = folder / name
        if name not in listed and (path.is_file() or path.is_symlink()) and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, target)


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

# SPDX-License-Identifier: Apache-2.0
"""Files that are written atomically, regular files that are opened without waiting, and locks of files."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from .bucket_path import BucketPath
from .buckets import is_bucket
from .errors import ConfigurationError

# For `os.open`: Windows would translate the ends of lines without it.
O_BINARY: int = getattr(os, "O_BINARY", 0)
# Windows reads and writes at a position of a file in two calls.
_POSITION = threading.Lock()
# The byte that is locked on Windows, behind any content: its locks are mandatory, and a locked byte cannot be read.
_LOCKED_BYTE = 1 << 30


def path_text(value: Any, argument: str) -> str:
    """The text of a path that a user has given (text, bytes or a path object), which is not blank.

    Raises ConfigurationError, which names `argument`, for what cannot be the name of a file or folder.
    """
    try:
        text = os.fsdecode(value)
    except TypeError:
        raise ConfigurationError(
            f"{argument}: a path is text or a path object, not {type(value).__name__}"
        ) from None
    if not text.strip():
        raise ConfigurationError(
            f"{argument}={text!r} does not name a folder: pass a path ('.' is the current folder)"
        )
    return text


def user_path(value: Any, argument: str) -> Path:
    """A local path that a user has given, with `~` expanded.

    Raises ConfigurationError as `path_text` does, and for a bucket.
    """
    if isinstance(value, BucketPath) or is_bucket(value):
        raise ConfigurationError(
            f"{argument}={str(value)!r}: only local files can be used here. Checkpoints of a run "
            "(save_state, load_state, resume) can be in a bucket"
        )
    return Path(path_text(value, argument)).expanduser()


def location(value: Any, argument: str) -> Path:
    """A path that a user has given, local or in a bucket ("s3://bucket/folder"). Raises as `path_text` does."""
    if isinstance(value, BucketPath):
        return value
    if is_bucket(value):
        return BucketPath.of(value)
    return user_path(value, argument)


def follow_links(path: Path, argument: str) -> Path:
    """The absolute path without any symbolic link, of something that need not exist yet.

    Raises ConfigurationError for links in a circle, and for a link to something in a folder that does not exist: a
    disk that is not mounted, for example, which must not be replaced by a new folder.
    """
    for link in (path, *path.parents):
        if link.is_symlink() and not link.exists():
            target = Path(os.path.realpath(link))
            if target.is_symlink():
                raise ConfigurationError(f"{argument}: {link} is a link that refers back to itself")
            if not target.parent.is_dir():
                raise ConfigurationError(
                    f"{argument}: {link} is a link to {target}, but {target.parent} does not "
                    "exist: create that folder or fix the link"
                )
    return Path(os.path.realpath(path))


def check_writable(path: str | os.PathLike[str], argument: str, folder: bool = False) -> None:
    """Raise ConfigurationError for a file (or a folder) of the user that cannot be written. Writes nothing.

    Args:
        path: the file or folder; folders that are missing on the way are made by whoever writes.
        argument: the name of the argument, for the message.
        folder: whether `path` is a folder.
    """
    path = user_path(path, argument)
    if not folder and path.is_dir():
        raise ConfigurationError(f"{argument}={str(path)!r} is a folder: name the file to write")
    first = path if folder else path.parent
    nearest = next((found for found in (first, *first.parents) if found.exists()), first)
    if not nearest.is_dir():
        raise ConfigurationError(f"{argument}={str(path)!r}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{argument}={str(path)!r}: no permission to write in {nearest}")


def make_folder(path: str | os.PathLike[str], argument: str) -> None:
    """Make a folder of the user, and in it a file that is removed again: /proc, for example, only seems writable.

    Raises ConfigurationError, which names `argument`, if that fails.
    """
    folder = user_path(path, argument)
    probe = folder / f".{os.urandom(4).hex()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"{argument}={str(folder)!r}: files cannot be written there ({error.strerror})"
        ) from None


@contextlib.contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block that writes one file: the system's errors of its descriptor (a full disk) get its name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or os.fspath(path)
        raise


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """A file object whose content appears at `path` when the block ends well, synced to disk, and not at all else.

    Where `path` is a symbolic link, the file that it leads to is written, and the link stays. A device or a pipe, such
    as /dev/stdout, is written to at once.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with named_errors(path), open(path, mode) as file:
            yield file
        return
    path = follow_links(path, "path")
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with named_errors(path), open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        raise


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. `open` takes this function as its `opener`.

    A link is followed for reading, and refused for writing: what it leads to is not ours. Raises OSError for anything
    else, and never waits: opening a named pipe would, for somebody at its other end.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a symbolic link, not a regular file", os.fspath(path))
        flags |= getattr(os, "O_NOFOLLOW", 0)
    else:
        _require_regular(os.stat(path), path)
    # The file may be another one by now.
    flags |= getattr(os, "O_NONBLOCK", 0) | O_BINARY
    descriptor = os.open(path, flags, 0o666)
    try:
        _require_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(path: str | os.PathLike[str]) -> int:
    """The size in bytes of a regular file that somebody else is going to open. Raises OSError for anything else."""
    if isinstance(path, BucketPath):
        return path.size()
    found = os.stat(path)
    _require_regular(found, path)
    return found.st_size


def _require_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        is_folder = stat.S_ISDIR(found.st_mode)
        if is_folder:
            code, kind = (errno.EISDIR, "a folder")
        else:
            code, kind = (errno.EINVAL, "a pipe, socket or device")
        raise OSError(code, f"it is {kind}, not a regular file", os.fspath(path))


def reason(error: BaseException) -> str:
    """The reason in an error from reading a file, for a message that names the file already."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file. Raises OSError for any other kind, and for one of more than `limit` bytes."""
    if isinstance(path, BucketPath):
        return path.bucket.get(path.key, limit)
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(
                errno.EFBIG, f"it has {size} bytes; at most {limit} are read", os.fspath(path)
            )
        return file.read()


def read_range(path: str | os.PathLike[str], offset: int, size: int) -> bytes | bytearray:
    """The bytes of a regular file from an offset on, at most `size`. Raises OSError for any other kind.

    An object in a bucket must have all of them.
    """
    if isinstance(path, BucketPath):
        content = bytearray(size)
        path.read_at(offset, memoryview(content))
        return content
    with open(open_regular(path), "rb") as file:
        file.seek(offset)
        return file.read(size)


def read_at(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Read from an offset of a file into pieces of memory; the number of bytes, which may be fewer than wanted."""
    if sys.platform != "win32":
        return os.preadv(descriptor, pieces, offset)
    with _POSITION, open(descriptor, "rb", buffering=0, closefd=False) as file:
        file.seek(offset)
        return file.readinto(pieces[0]) or 0


def write_at(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Write pieces of memory at an offset of a file; the number of bytes, which may be fewer than theirs."""
    if sys.platform != "win32":
        return os.pwritev(descriptor, pieces, offset)
    with _POSITION:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, pieces[0])


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    # Windows syncs only files that are open for writing, and opens no folder: NTFS logs its entries itself.
    is_folder = os.path.isdir(path)
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR | O_BINARY)
    except PermissionError:
        if is_folder:
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, shared: bool = False) -> None:
    """Lock an open file until it is closed, or its process has ended. It never waits.

    Args:
        descriptor: that of the file.
        shared: whether others may have a shared lock of it meanwhile. Windows has exclusive locks only.

    Raises:
        BlockingIOError: another process has a lock that forbids it.
        OSError: the system or its file system has no locks.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError:
        _lock_on_windows(descriptor)
        return
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)


def _lock_on_windows(descriptor: int) -> None:
    try:
        msvcrt: Any = importlib.import_module("msvcrt")
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system does not support file locks") from None
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError(error.errno, error.strerror) from None
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)

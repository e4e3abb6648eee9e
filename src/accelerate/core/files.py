# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, regular files that are opened without waiting, and checksums."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """A file object whose content appears at `path` when the block ends well, synced to disk, and not at all else."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading a regular file, or one that links lead to.

    Raises OSError for anything else, and never waits: opening a named pipe would, for somebody who writes to it.
    """
    _require_regular(os.stat(path), path)
    # The file may be another one by now.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _require_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(path: str | os.PathLike[str]) -> int:
    """The size in bytes of a regular file that somebody else is going to open. Raises OSError for anything else."""
    found = os.stat(path)
    _require_regular(found, path)
    return found.st_size


def _require_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "no file")
        code = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(code, f"it is {kind}, not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file. Raises OSError for any other kind, and for one of more than `limit` bytes."""
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes; at most {limit} are read", os.fspath(path))
        parts, left = [], limit + 1
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        if left <= 0:
            raise OSError(errno.EFBIG, f"it has more than the {limit} bytes that are read", os.fspath(path))
    return b"".join(parts)


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: str | os.PathLike[str], chunk: int = 1 << 22) -> str:
    """The CRC-32 of a file as eight hexadecimal digits, read `chunk` bytes at a time."""
    value = 0
    with open(open_regular(path), "rb", buffering=0) as file:
        buffer = bytearray(chunk)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            value = zlib.crc32(view[:count], value)
    return f"{value:08x}"

# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, and checksums."""

from __future__ import annotations

import contextlib
import os
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
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(chunk)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            value = zlib.crc32(view[:count], value)
    return f"{value:08x}"

# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save that others may have edited: what is checked before torch reads one, and what it raises."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from typing import Any

from .errors import CheckpointError
from .files import atomic_write, named_errors, require_regular

# What torch's reader of plain data raises for files that were changed or cut short.
READ_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
    MemoryError,
    struct.error,
    zlib.error,
)


def check_archive(file: Any, name: str | os.PathLike[str] = "the file") -> bool:
    """Check a file of torch.save (a path, or a file object that errors call `name`) before it is read.

    Returns whether it is a zip archive.

    Raises CheckpointError for a path that is no regular file, and for an archive whose members declare more bytes
    than the archive has: torch takes the memory first.
    """
    name = file if isinstance(file, (str, os.PathLike)) else name
    try:
        if isinstance(file, (str, os.PathLike)):
            size = require_regular(file)
            is_archive = zipfile.is_zipfile(file)
        else:
            before = file.tell()
            size = file.seek(0, os.SEEK_END)
            file.seek(before)
            is_archive = zipfile.is_zipfile(file)
            file.seek(before)
        if not is_archive:
            return False
        with zipfile.ZipFile(file) as archive:
            declared = sum(part.file_size for part in archive.infolist())
        if not isinstance(file, (str, os.PathLike)):
            file.seek(before)
    except FileNotFoundError:
        raise
    except READ_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"{name} cannot be read: {reason}") from error
    if declared > size:
        raise CheckpointError(f"{name} is damaged: its members declare {declared} bytes, the file has {size}")
    return True


def write_file(value: object, path: str | os.PathLike[str]) -> None:
    """Write a file with torch.save. Raises OSError where it cannot be written, as for a full disk."""
    import torch

    with named_errors(path):
        try:
            # For a path, torch raises a RuntimeError about the place in the file.
            with open(path, "wb") as file:
                torch.save(value, file)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None


def write_atomically(value: object, path: str | os.PathLike[str]) -> None:
    """Write a file with torch.save that appears complete or not at all."""
    import torch

    with atomic_write(path) as file:
        torch.save(value, file)

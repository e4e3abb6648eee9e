# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save that others may have edited: what is checked before torch reads one, and what it raises."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib

from .files import atomic_write, named_errors

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

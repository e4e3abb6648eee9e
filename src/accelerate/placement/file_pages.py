# SPDX-License-Identifier: Apache-2.0
"""The pages of tensors whose memory is a mapped file: whether they are in memory, whether they were written to."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import sys
from typing import Any

import torch

_MADV_WILLNEED = 3
_MADV_POPULATE_READ = 22  # Linux 5.14
# PAGEMAP_SCAN, Linux 6.7: its number, the size of its argument and the categories of pages.
_PAGEMAP_SCAN, _SCAN_SIZE = 0xC0606610, 96
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4


def read_ahead(tensor: torch.Tensor) -> None:
    """Let the system begin to read the pages of a tensor in a mapped file, in requests as large as the disk takes."""
    _advise(tensor, _MADV_WILLNEED)


def read_pages(tensor: torch.Tensor) -> None:
    """Bring the pages of a tensor in a mapped file to memory, so that computing with it does not wait for them."""
    if not _advise(tensor, _MADV_POPULATE_READ):
        # Another system, or an older Linux: touch a byte of each page.
        tensor.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()


def _advise(tensor: torch.Tensor, advice: int) -> bool:
    """Give the system advice about the pages of a tensor. Returns whether it has taken it."""
    if not tensor.nbytes:
        return True
    madvise = getattr(_libc(), "madvise", None)
    begin, length = _span(tensor.data_ptr(), tensor.nbytes)
    return madvise is not None and not madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)


def are_in_memory(address: int, size: int) -> bool:
    """Return whether all pages of so many bytes of a mapped file are in memory; False if the system cannot tell."""
    begin, length = _span(address, size)
    mincore = getattr(_libc(), "mincore", None)
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    if mincore is None or mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), pages):
        return False
    return bytes(pages).count(1) == len(pages)


def is_unwritten(address: int, size: int) -> bool:
    """Return whether all pages of so many bytes are still those of the mapped file; False if the system cannot tell.

    A page of a private mapping becomes anonymous memory when it is written to.
    """
    descriptor = _page_map()
    if descriptor is None:
        return False
    begin, length = _span(address, size)
    end = -(-(begin + length) // mmap.PAGESIZE) * mmap.PAGESIZE
    found = (ctypes.c_uint64 * 3)()
    present = _PRESENT | _SWAPPED
    # One region of pages that are not of a file, and are in memory or swapped out, is enough.
    request = struct.pack(
        "12Q", _SCAN_SIZE, 0, begin, end, 0, ctypes.addressof(found), 1, 1, _FILE, _FILE, present, present
    )
    import fcntl

    try:
        return bool(fcntl.ioctl(descriptor, _PAGEMAP_SCAN, bytearray(request)) == 0)
    except OSError:
        return False


def _span(address: int, size: int) -> tuple[int, int]:
    """The address of the first page of so many bytes, and the number of bytes from there to their end."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, address + size - begin


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


_opened: tuple[int, int] | None = None  # of this process: a forked child has a map of its own


def _page_map() -> int | None:
    global _opened
    if sys.platform != "linux":
        return None
    if _opened is None or _opened[0] != os.getpid():
        try:
            descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if _opened is not None:
            os.close(_opened[1])
        _opened = os.getpid(), descriptor
    return _opened[1]

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

# The size of a read: a disk serves the next one while this one is copied, and the kernel reads ahead of it in large
# folios. madvise(MADV_WILLNEED) took 155 ms for 201 MB on one disk, such reads 117 ms.
_READ = 1 << 18
_MAPPED_AT_ONCE = 16  # pages that Linux maps around a fault, if they are in memory
_SAMPLES = 32  # pages of a tensor that are queried; the system drops many neighbouring ones at a time
# PAGEMAP_SCAN, Linux 6.7: its number, the size of its argument and the categories of pages.
_PAGEMAP_SCAN, _SCAN_SIZE = 0xC0606610, 96
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4


def read_file(descriptor: int, begin: int, end: int) -> None:
    """Read bytes of a file to the system's cache; what maps them finds them there.

    Nothing is done where the system has no such call (Windows): `map_pages` reads them then.
    """
    if not hasattr(os, "preadv"):
        return
    block = bytearray(min(_READ, max(end - begin, 0)))
    while begin < end:
        count = os.preadv(descriptor, [memoryview(block)[: end - begin]], begin)
        if not count:
            return
        begin += count


def map_pages(tensor: torch.Tensor) -> None:
    """Map the pages of a tensor in a mapped file, so that computing with it does not wait for them."""
    # MADV_POPULATE_READ takes 200 ns for each page of 4 KiB, also if it is mapped already.
    step = mmap.PAGESIZE * (_MAPPED_AT_ONCE if sys.platform == "linux" else 1)
    if tensor.nbytes:
        tensor.detach().reshape(-1).view(torch.uint8)[::step].sum()


def are_in_memory(address: int, size: int) -> bool:
    """Return whether pages all over so many bytes of a mapped file are in memory; False if that is unknown."""
    begin, length = _span(address, size)
    mincore = getattr(_libc(), "mincore", None)
    if mincore is None:
        return False
    if not size:
        return True
    pages = -(-length // mmap.PAGESIZE)
    found = ctypes.c_ubyte()
    for page in {pages * sample // _SAMPLES for sample in range(_SAMPLES)} | {pages - 1}:
        place = ctypes.c_void_p(begin + page * mmap.PAGESIZE)
        if mincore(place, ctypes.c_size_t(1), ctypes.byref(found)) or not found.value & 1:
            return False
    return True


def is_unwritten(address: int, size: int) -> bool:
    """Return whether all pages of so many bytes are still those of the mapped file; False if that is unknown.

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


_opened: tuple[int, int] | None = None  # of this process: a forked child has its own map


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

# SPDX-License-Identifier: Apache-2.0
"""Published figures of accelerators, by the names that they report."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """What the maker of an accelerator publishes.

    Attributes:
        memory: GB.
        tflops: TFLOP/s of bf16 matrix products without sparsity.
        bandwidth: GB/s of the memory.
        link: GB/s of one device within a machine, in one direction.
    """

    memory: float
    tflops: float
    bandwidth: float
    link: float


PUBLISHED: dict[str, Published] = {
    "a100": Published(80, 312, 2039, 300),
    "h100": Published(80, 989, 3350, 450),
    "h100pcie": Published(80, 756, 2000, 32),
    "h200": Published(141, 989, 4800, 450),
    "b200": Published(192, 2250, 8000, 900),
    "mi300x": Published(192, 1307, 5300, 448),
    "l4": Published(24, 121, 300, 32),
    "l40s": Published(48, 362, 864, 32),
    "rtx4090": Published(24, 165, 1008, 32),
}


def known_name(name: str) -> str | None:
    """The row of `PUBLISHED` for a device that calls itself `name`, as "NVIDIA H100 80GB HBM3"; None without one."""
    plain = name.lower().replace(" ", "").replace("-", "")
    # Of names with the same beginning the longest is meant: an L40S is no L4.
    return max((known for known in PUBLISHED if known in plain), key=len, default=None)

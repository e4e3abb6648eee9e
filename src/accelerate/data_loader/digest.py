# SPDX-License-Identifier: Apache-2.0
"""A running checksum of an order, which does not depend on how the order is split into steps."""

from __future__ import annotations

import array
import zlib
from typing import Any

import torch


def extended(digest: int, elements: list[Any]) -> int:
    """The checksum after some more elements of an order that has had `digest` so far."""
    try:
        # By far most elements are indices.
        return zlib.crc32(array.array("q", elements), digest)
    except (TypeError, OverflowError, RuntimeError, ValueError):
        for element in elements:
            digest = zlib.crc32(_encoded(element), digest)
        return digest


def _encoded(element: Any) -> bytes:
    """Bytes that identify an element, the same in every process."""
    try:
        return array.array("q", [element]).tobytes()
    except (TypeError, OverflowError, RuntimeError, ValueError):
        pass
    if isinstance(element, (str, bytes, float, int)) or element is None:
        return repr(element).encode()
    if isinstance(element, torch.Tensor) or hasattr(element, "tolist"):
        return repr(element.tolist()).encode()
    if isinstance(element, dict):
        return b"{" + b",".join(_encoded(part) for pair in element.items() for part in pair) + b"}"
    if isinstance(element, (list, tuple, range)):
        return b"[" + b",".join(map(_encoded, element)) + b"]"
    # For any other type only the type is compared: its repr may contain an address, and an iterator is read once.
    return type(element).__qualname__.encode()

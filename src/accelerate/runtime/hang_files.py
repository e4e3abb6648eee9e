# SPDX-License-Identifier: Apache-2.0
"""The folder of a run that stands still: a file for each rank with its last collectives and its threads' stacks."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from .ledger import LEDGER, in_words
from .pending import KEPT, recorded

_KEY = "accelerate/hang_folder"


def folder(store: Any) -> str:
    """The folder of the run, whose name the ranks share; the first report makes it. Empty where that is impossible."""
    if not store.check([_KEY]):
        try:
            path = tempfile.mkdtemp(prefix="accelerate-hang-")
        except OSError:
            path = ""
        store.compare_set(_KEY, "", path)
    return str(store.get(_KEY).decode())


def write(path: str, rank: int, watched: int) -> None:
    """Write this rank's file. A disk that is full must not end the watch."""
    with contextlib.suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        Path(path, f"rank_{rank:05d}.txt").write_text("\n".join(_lines(rank, watched)), errors="replace")


def _lines(rank: int, watched: int) -> list[str]:
    now = time.monotonic()
    lines = [f"rank {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", ""]
    lines.append("Collectives of accelerate, the last one at the end: number, operation, data, line, when it began")
    for one in LEDGER.recent(KEPT):
        took = "not ended" if one.left is None else f"took {one.left - one.entered:.3f} s"
        what = " ".join(filter(None, (one.operation, in_words(one.data))))
        lines.append(f"  {one.number}  {what}  {one.file}:{one.line}  {now - one.entered:.1f} s ago, {took}")
    lines += ["", "Collectives of torch (the flight recorder): group, number, operation, data, when it began"]
    for call in recorded()[-KEPT:]:
        ends = "not ended" if call.is_pending else "ended"
        kind = "message " if call.is_p2p else ""
        what = f"{kind}{call.number}  {call.operation} {call.data}"
        lines.append(f"  {call.group}  {what}  {call.age:.1f} s ago, {ends}")
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sorted(frames, key=lambda ident: ident != watched):
        if ident != threading.get_ident():
            lines += ["", f"Thread {names.get(ident, ident)}, most recent call last:"]
            lines += "".join(traceback.format_stack(frames[ident])).rstrip().splitlines()
    return [*lines, ""]

# SPDX-License-Identifier: Apache-2.0
"""Debug mode: a thread of each rank reports through the store where the rank's main thread is."""

from __future__ import annotations

import itertools
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist

from . import group

# Seconds between two looks for a request, and the time limit of an answer.
INTERVAL = 0.25
ANSWER = 2.0

_questions = itertools.count(1)
_ended = threading.Event()


def start() -> None:
    """Answer the other ranks' requests until this process leaves the run."""
    # A separate connection: calls on one connection wait for each other.
    default: Any = dist.distributed_c10d._get_default_store()
    store, me = default.clone(), dist.get_rank()
    _ended.clear()

    def watch() -> None:
        answered = b""
        while not _ended.wait(INTERVAL):
            try:
                if not store.check([f"accelerate/where/{me}"]):
                    continue
                request = store.get(f"accelerate/where/{me}")
                if request != answered:
                    answered = request
                    store.set(f"accelerate/where/{me}/{request.decode()}", main_line())
            except (RuntimeError, ValueError):
                # The store is gone, so nobody can send a request.
                return

    watcher = threading.Thread(target=watch, name="accelerate-whereabouts", daemon=True)
    watcher.start()

    def stop() -> None:
        _ended.set()
        watcher.join(ANSWER)

    # At the exit no thread may be in a call of torch.
    group.before_leaving.append(stop)


def request(ranks: Iterable[int]) -> dict[int, str]:
    """Where the main threads of `ranks` are; a rank that does not answer is left out."""
    store = dist.distributed_c10d._get_default_store()
    question = f"{dist.get_rank()}.{next(_questions)}"
    keys = {rank: f"accelerate/where/{rank}/{question}" for rank in ranks}
    for rank in keys:
        store.set(f"accelerate/where/{rank}", question)
    found: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER
    while len(found) < len(keys) and time.monotonic() < deadline:
        for rank, key in keys.items():
            if rank not in found and store.check([key]):
                found[rank] = store.get(key).decode()
        time.sleep(0.02)
    return found


def main_line() -> str:
    """The line of the user's code at which the main thread is, and the function that it is in there."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere: its main thread has ended"
    inside = frame.f_code.co_qualname
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    package = __name__.partition(".")[0] + "."
    own = frame
    while own.f_back is not None and (
        own.f_code.co_filename.startswith(("<frozen", *installed))
        or own.f_globals.get("__name__", "").startswith(package)
    ):
        own = own.f_back
    return f"{own.f_code.co_filename}:{own.f_lineno}" + ("" if own is frame else f" (in `{inside}`)")

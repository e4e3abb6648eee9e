# SPDX-License-Identifier: Apache-2.0
"""Where the threads of this process are, as Python's faulthandler writes it, and the files with the stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..core.stacks import PACKAGE, frames_of, is_users, line_in_words

_KEY = "accelerate/hang_folder"
_DEBUGGERS = re.compile(r"[/\\\\](pdb|bdb|pydevd\w*)\.py$|[/\\\\]debugpy[/\\\\]")
# Names of functions that only call what the user has called.
_WRAPPERS = ("wrapper", "wrapped", "inner")


class StackPlace(NamedTuple):
    """Where a thread is: file and line of the user's code, the user's function, and what the line calls."""

    line: str
    within: str
    calls: str


def dump() -> str:
    """The stacks of all threads, each with its innermost call first; empty where there is no disk for it."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""


def place_in(text: str, thread: int) -> StackPlace:
    """The place of a thread in the text of `dump`."""
    frames = frames_of(text, thread)
    if not frames:
        return StackPlace("no line: its main thread has ended", "", "")
    inner = []
    for user in frames[:-1]:
        if is_users(user.path):
            break
        inner.append(user)
    else:
        user = frames[-1]
    calls = ""
    for frame in inner:
        # The outermost one counts.
        if not frame.function.startswith(("_", *_WRAPPERS)):
            calls = frame.function
            if frame.path == f"{PACKAGE}accelerator.py":
                calls = f"accelerator.{calls}"
    within = user.function
    if within == "<module>":
        within = ""
    return StackPlace(line_in_words(user.path, user.line), within, calls)


def folder(store: Any) -> str:
    """The folder of the run, whose name the ranks share; the first report makes it. Empty where that is impossible."""
    if not store.check([_KEY]):
        try:
            path = tempfile.mkdtemp(prefix="accelerate-hang-")
        except OSError:
            path = ""
        store.compare_set(_KEY, "", path)
    return str(store.get(_KEY).decode())


def has_debugger(text: str, thread: int) -> bool:
    """Whether a thread in the text of `dump` is in a debugger that waits for its user."""
    return any(_DEBUGGERS.search(frame.path) for frame in frames_of(text, thread))


def write(store: Any, rank: int, lines: Iterable[str]) -> str:
    """Write this rank's file, if a report has made the folder, and return that. A full disk does not end the watch."""
    if not store.check([_KEY]):
        return ""
    path: str = store.get(_KEY).decode()
    if path:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        head = f"rank {rank}, process {os.getpid()}, {when}"
        text = "\n".join([head, *lines, ""])
        with contextlib.suppress(OSError):
            os.makedirs(path, mode=0o700, exist_ok=True)
            Path(path, f"rank_{rank:05d}.txt").write_text(text, errors="replace")
    return path


def remove(folder: str, rank: int) -> None:
    """Remove this rank's file, and the folder after the last one of this machine."""
    with contextlib.suppress(OSError):
        Path(folder, f"rank_{rank:05d}.txt").unlink()
        os.rmdir(folder)

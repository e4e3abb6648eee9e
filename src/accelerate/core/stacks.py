# SPDX-License-Identifier: Apache-2.0
"""The line of the user's code in a stack: in that of the caller, and in what Python's faulthandler writes."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from types import FrameType
from typing import NamedTuple

PACKAGE: str = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What the names of modules begin with that are not the user's. contextlib enters `main_process_first`, for example.
_LIBRARIES = (__name__.partition(".")[0] + ".", "torch.", "contextlib", "functools")
# Paths of installed packages, and of Python's own modules.
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]")
_THREAD = re.compile(r"^(.*)\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'File "(.+?)", line (\d+) in (.+)')


class Frame(NamedTuple):
    """A frame in the text of faulthandler."""

    path: str
    line: int
    function: str


def user_frame() -> FrameType:
    """The innermost frame outside this package and torch in the stack of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    while (outer := frame.f_back) is not None and frame.f_globals.get("__name__", "").startswith(
        _LIBRARIES
    ):
        frame = outer
    return frame


def user_line() -> str:
    """File and line outside this package and torch that called into them."""
    frame = user_frame()
    return line_in_words(frame.f_code.co_filename, frame.f_lineno)


def line_in_words(path: str, number: int) -> str:
    """`path:number`, where the path is relative to the current folder if it is below it."""
    # Another process may have removed the current folder.
    with contextlib.suppress(OSError):
        path = path.removeprefix(os.getcwd() + os.sep)
    return f"{path}:{number}"


def is_users(path: str) -> bool:
    """Whether a file is the user's, and not one of an installed package or of Python."""
    return not path.startswith(("<frozen", PACKAGE)) and not _INSTALLED.search(path)


def frames_of(text: str, thread: int | None = None) -> list[Frame]:
    """The frames of a thread in a text of faulthandler, the innermost first; by default of the one that runs."""
    parts = _THREAD.split(text)[1:]
    threads = list(zip(parts[::2], parts[1::2], strict=True))
    wanted = "Current thread" if thread is None else f"{thread:016x}"
    # The main thread is the last one.
    stacks = [stack for head, stack in threads if wanted in head] or [
        stack for _, stack in threads[-1:]
    ]
    return [
        Frame(path, int(line), name) for path, line, name in _FRAME.findall("".join(stacks[:1]))
    ]


def user_line_of(text: str) -> str:
    """File and line of the user's code in the current thread, else in the main thread; empty where there is none."""
    for frames in (frames_of(text), frames_of(text, -1)):
        for frame in frames:
            if is_users(frame.path):
                return line_in_words(frame.path, frame.line)
    return ""

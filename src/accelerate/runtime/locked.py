# SPDX-License-Identifier: Apache-2.0
"""The line of a rank of this machine whose interpreter is locked by a call, such as one of an extension (Linux).

Its threads cannot answer then. A signal has Python's faulthandler write the stacks to a file in memory, which needs no
lock. Only a process that handles the signal gets it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from typing import Any

from ..core.stacks import user_line
from ..core.system import handles_signal
from . import marks

# One that nothing else is likely to use.
_SIGNAL: int = signal.SIGRTMAX - 5 if sys.platform == "linux" else 0
# Seconds in which a process writes its stacks.
_PATIENCE = 0.5


class _Stacks:
    """The file of this process, which a forked process has from its parent."""

    file: Any = None
    pid = 0


def prepare() -> None:
    """Let other ranks of this machine have the stacks of this process written."""
    if not _SIGNAL or signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        return
    if _Stacks.pid != os.getpid():
        _Stacks.pid = os.getpid()
        _Stacks.file = open(os.memfd_create("accelerate-stacks"), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(_SIGNAL, _Stacks.file, all_threads=True)
    marks.publish(marks.STACKS, _Stacks.file.fileno())


def line_of(process: Any, descriptor: int | None) -> str:
    """The user's line in a process, from its marks of these kinds; empty where it cannot be found out."""
    if descriptor is None or process is None or not marks.is_here(process) or not handles_signal(process[1], _SIGNAL):
        return ""
    with contextlib.suppress(OSError), open(f"/proc/{process[1]}/fd/{descriptor}", "rb") as file:
        file.seek(0, os.SEEK_END)
        os.kill(process[1], _SIGNAL)
        text, deadline = b"", time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            time.sleep(0.02)
            more = file.read()
            if text and not more:
                break
            text += more
        return user_line(text.decode(errors="replace"))
    return ""

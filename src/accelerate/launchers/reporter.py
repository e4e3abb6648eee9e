# SPDX-License-Identifier: Apache-2.0
"""Lines on the progress of a script that runs in the launcher's own process: a forked process writes them.

The script keeps its process, standard streams and children. There is no panel on a terminal: the script writes to the
terminal itself, so that a panel could neither stay below its output nor be gone before the shell's prompt.
"""

from __future__ import annotations

import os
import sys

from ..telemetry.status import new_folder
from .spec import LaunchSpec


def start(spec: LaunchSpec) -> str | None:
    """Start to report on the script that this process is about to become; for Linux, which has `os.pidfd_open`.

    Returns:
        The folder in which the script is to publish its state; None where no process can be started.
    """
    folder = new_folder()
    if folder is None:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    script = os.getpid()
    try:
        ended = os.pidfd_open(script)
        # Forked twice: a script that waits for its children does not find this one.
        child = os.fork()
    except OSError:
        os.rmdir(folder)
        return None
    if child:
        os.close(ended)
        os.waitpid(child, 0)
        return folder
    try:
        if not os.fork():
            _detach(ended)
            _report(spec, folder, script, ended)
    finally:
        os._exit(0)


def _detach(ended: int) -> None:
    """Keep only standard error and `ended` of what is open, and leave the group that gets the terminal's signals."""
    import signal

    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.closerange(3, ended)
    os.closerange(ended + 1, os.sysconf("SC_OPEN_MAX"))


def _report(spec: LaunchSpec, folder: str, script: int, ended: int) -> None:
    # What is imported here, and when the script has begun, does not delay it.
    import select
    import shutil
    from pathlib import Path

    poller = select.poll()
    poller.register(ended)
    if not poller.poll(1000 * min(1.0, spec.progress_interval)):
        from .panel import Display

        display = Display(spec, Path(folder), terminal=False)
        while not poller.poll(1000 * min(display.wait, spec.progress_interval)):
            line = display.tick({0: script}, {})
            if line is not None:
                os.write(2, f"{line}\n".encode())
    shutil.rmtree(folder, ignore_errors=True)

# SPDX-License-Identifier: Apache-2.0
"""The stacks of a process as Python's faulthandler writes them, and the user's line in them."""

from __future__ import annotations

import os
import re

# Paths of installed packages, and of Python's own modules.
_INSTALLED = r"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_THREAD = re.compile(r"^(.*)\(most recent call first\):$", re.MULTILINE)


def user_line(text: str) -> str:
    """File and line of the user's code in the current thread, else in the main thread; empty where there is none."""
    # Pairs of a head and a stack; the main thread is the last one.
    parts = _THREAD.split(text)[1:]
    threads = list(zip(parts[::2], parts[1::2], strict=True))
    current = [stack for head, stack in threads if "Current thread" in head]
    for stack in (*current, *(stack for _, stack in threads[-1:])):
        for path, line in re.findall(r'File "(.+?)", line (\d+) in', stack):
            if not path.startswith(("<frozen", _PACKAGE)) and not re.search(_INSTALLED, path):
                return f"{path}:{line}"
    return ""

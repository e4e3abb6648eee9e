# SPDX-License-Identifier: Apache-2.0
"""Become a command that dies with its starter: `python guard.py <starter pid> command...`. Imports nothing of ours."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process with the command. On Linux the command is killed when its starter ends."""
    starter, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:
            sys.exit(1)
    if hasattr(signal, "pthread_sigmask"):
        # Signals that a starter blocks for itself would stay blocked for the command (Ray's workers block SIGINT).
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

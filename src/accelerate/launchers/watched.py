# SPDX-License-Identifier: Apache-2.0
"""A rank under a foreign starter (mpirun): it says whose failure it was, and nobody is left behind.

`python -m accelerate.launchers.watched command...` runs the command as its child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from ..runtime.topology import Topology
from .failure import told_by_rank
from .process import die_with

HANDED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def main(command: list[str]) -> None:
    """Run the command and end as it does."""
    # A starter that is killed takes this process with it, and this one its child.
    follow = die_with(os.getppid())
    if follow is not None:
        follow()
    child = subprocess.Popen(command, preexec_fn=die_with(os.getpid()))
    stopped: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        child.send_signal(number)

    for name in HANDED_ON:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), hand_on)
    code = child.wait()
    if code == 0:
        return
    topology = Topology.from_environment()
    if not stopped:
        sys.stderr.write(told_by_rank(topology.rank, code))
        sys.stderr.flush()
    if code < 0 or topology.launcher != "openmpi":
        # Hydra (MPICH, Intel MPI, MVAPICH) lets the others go on where one only fails, and stops them where one dies.
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

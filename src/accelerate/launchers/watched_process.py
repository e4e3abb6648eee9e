# SPDX-License-Identifier: Apache-2.0
"""A rank started by another program (mpirun, srun): it reports its failure, and leaves no process behind.

`python -m accelerate.launchers.watched_process command...` runs the command as its child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from ..core.topology import Topology
from .process import FORWARDED, die_with

# srun stops a step as soon as it hears of a failure, and what it has not received by then is lost: a rank that failed
# ends this many seconds after its last words.
LAST_WORDS = 1.0


def watched(command: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs a command as the child of such a rank."""
    return (sys.executable, "-m", "accelerate.launchers.watched_process", *command)


def main(command: list[str]) -> None:
    """Run the command and end as it does."""
    topology = Topology.from_environment()
    under_slurm = topology.launcher == "slurm"
    # A starter that is killed takes this process with it, and this one its child. Slurm finds all of a task by itself.
    follow = None if under_slurm else die_with(os.getppid())
    if follow is not None:
        follow()
    child = subprocess.Popen(command, preexec_fn=die_with(os.getpid()))
    stopped: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        child.send_signal(number)

    for name in FORWARDED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), forward)
    code = child.wait()
    if code == 0:
        return
    if not stopped:
        # One write, because several ranks share the stream. `streams.RANK_FAILED` reads it.
        sys.stderr.flush()
        os.write(2, f"accelerate: rank {topology.rank} ended, code {code}\n".encode())
    if under_slurm:
        if not stopped:
            time.sleep(LAST_WORDS)
        _end_as(code)
    if sys.platform != "win32" and (code < 0 or topology.launcher != "openmpi"):
        # Hydra (MPICH, Intel MPI, MVAPICH) lets the others go on where one only fails, and stops them where one dies.
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(code)


def _end_as(code: int) -> None:
    """End with a child's exit code, or by the signal that it died of."""
    if code < 0 and sys.platform != "win32":
        if code not in (-signal.SIGKILL, -signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

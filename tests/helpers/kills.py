# SPDX-License-Identifier: Apache-2.0
"""Starting launches of workers and killing them at random moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 180.0  # seconds


class Launches:
    """The launches of a test, each of which is over before the next one starts.

    Args:
        worker: the script, which writes its process id to `rank<number>.pid` in the folder that is its first argument.
    """

    def __init__(self, worker: Path) -> None:
        self.worker = worker
        self.launcher: subprocess.Popen[str] | None = None

    def start(
        self, folder: Path, *arguments: object, ranks: int = 2, options: tuple[str, ...] = ()
    ) -> subprocess.Popen:
        """Start a launch of so many ranks."""
        for note in folder.glob("rank*.pid"):
            note.unlink()
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_processes",
            str(ranks),
        ]
        self.launcher = subprocess.Popen(
            [*command, *options, str(self.worker), str(folder), *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.launcher

    def stop(self) -> None:
        """End a launch that a failed test has left; its ranks end with it."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()


def rank_pids(folder: Path, launcher: subprocess.Popen, ranks: int = 2) -> list[int]:
    """The ranks' process ids, once all have begun."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and launcher.poll() is None:
        notes = [folder / f"rank{rank}.pid" for rank in range(ranks)]
        if all(note.exists() and note.read_text() for note in notes):
            return [int(note.read_text()) for note in notes]
        time.sleep(0.01)
    raise AssertionError(f"the ranks did not start: {launcher.communicate(timeout=LIMIT)[1]}")


def strike(target: str, pids: list[int], launcher: subprocess.Popen) -> None:
    """Send SIGKILL to the last rank, to all ranks, or to the launcher."""
    victims = {"rank": pids[-1:], "ranks": pids, "launcher": [launcher.pid]}[target]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            # It had come to its end by itself.
            pass


def gone(pids: list[int]) -> bool:
    """Whether none of the processes is left, within seconds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.01)
    return False

# SPDX-License-Identifier: Apache-2.0
"""Launches for tests to talk to: their words as they come, their ranks, their end.

A launcher of several machines imports torch for the store that they share. Here it is forked from the rank server,
which has torch imported; the ranks are started as always.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ranks import Script

LAUNCHER = Path(__file__).with_name("launcher.py")
OPTIONS = ["launch", "-q", "--cpu"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.main", *OPTIONS]


def clean_environment(home: Path, **extra: str) -> dict[str, str]:
    """This environment, with `extra`, without what another launch may have left in it."""
    names = (
        "ACCELERATE_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "OMP_",
        "TORCHELASTIC",
        "GLOO_",
    )
    kept = {name: text for name, text in os.environ.items() if not name.startswith(names)}
    return {**kept, "HF_HOME": str(home), **extra}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_launcher(
    *arguments: object, env: dict[str, str], stdout: Any, stderr: Any, namespace: str = ""
) -> Script:
    """Start `accelerate launch`, in a network namespace if one is named. The streams are open files."""
    words = [namespace, *OPTIONS, *arguments]
    return Script(LAUNCHER, *words, env=env, stdout=stdout, stderr=stderr)


class Launch:
    """A running `accelerate launch`, or a program. Its words are read as they come; the end of the block kills it."""

    def __init__(
        self,
        home: Path,
        *arguments: object,
        namespace: str = "",
        program: Sequence[str] = (),
    ) -> None:
        self.process: Any
        reading, writing = os.pipe()
        with os.fdopen(writing, "w") as stream:
            streams: Any = {"env": clean_environment(home), "stdout": stream, "stderr": stream}
            if program:
                self.process = subprocess.Popen([*program, *map(str, arguments)], **streams)
            else:
                self.process = start_launcher(*arguments, namespace=namespace, **streams)
        self._words = os.fdopen(reading)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._words:
            self.lines.extend(iter(self._words.readline, ""))

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def count(self, words: str) -> int:
        return self.text.count(words)

    def end(self, timeout: float = 120) -> int:
        """Its exit code, once it has ended and all is read."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text}") from None
        self._reader.join(10)
        return code

    def ranks(self) -> list[int]:
        """The process ids of its ranks: without the shell that waits for the end of the launcher."""
        pids = children(self.process.pid)
        return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() != "sh"]

    def kill_rank(self) -> None:
        os.kill(self.ranks()[0], signal.SIGKILL)


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def until(condition: Callable[[], object], *launches: Launch, timeout: float = 120) -> float:
    """Seconds until a condition holds; AssertionError with the launches' words when it does not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout:
            words = "\n".join(f"--- {launch.process.args}\n{launch.text}" for launch in launches)
            raise AssertionError(f"nothing for {timeout} s:\n{words}")
        time.sleep(0.02)
    return time.monotonic() - began

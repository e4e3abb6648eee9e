# SPDX-License-Identifier: Apache-2.0
"""Scripts of tests: one process, or several cooperating ranks on this machine, within a time limit.

A script runs in a process that is forked from the rank server (`rank_pool.py`), which has torch and most of what
scripts use imported. All else is as in `python script.py`: its `__main__`, arguments, environment and standard
streams, and its end, which is that of the interpreter. `fresh=True` starts new interpreters instead, for tests of what
is imported when, of variables that a library reads when it is imported, and of how a process starts.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_pool import RankPool, environment, rank_environment
from torch.distributed import TCPStore


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


class Script:
    """A running script in a forked process; what it has in common with `subprocess.Popen` is named as there.

    Args:
        script: the path of the script.
        args: its arguments.
        env: all its environment variables; None: those of this process without what a launch has left there.
        stdin, stdout, stderr: open files, `subprocess.PIPE`, or `subprocess.DEVNULL`.
    """

    def __init__(
        self,
        script: Path,
        *args: object,
        env: Mapping[str, str] | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.DEVNULL,
    ) -> None:
        self.args = (script, *args)
        self.returncode: int | None = None
        self._report, report = os.pipe()
        pipes: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, report)
            ends = [report]
            for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                if stream == subprocess.PIPE:
                    reading, writing = os.pipe()
                    ours, theirs = (writing, reading) if name == "stdin" else (reading, writing)
                    opened.callback(os.close, theirs)
                    pipes[name] = os.fdopen(ours, "w" if name == "stdin" else "r")
                elif stream == subprocess.DEVNULL:
                    theirs = os.open(os.devnull, os.O_RDWR)
                    opened.callback(os.close, theirs)
                else:
                    theirs = stream.fileno()
                ends.append(theirs)
            request = {
                "argv": [str(script), *map(str, args)],
                "environment": environment(None) if env is None else dict(env),
                "cwd": os.getcwd(),
                "path": sys.path[:],
            }
            (self.pid,) = RankPool.shared().fork(request, ends, what="script")
        self.stdin, self.stdout, self.stderr = (
            pipes.get(name) for name in ("stdin", "stdout", "stderr")
        )

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal."""
        if self.returncode is None:
            ready, _, _ = select.select([self._report], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("script", timeout or 0.0)
            told = os.read(self._report, 16)
            os.close(self._report)
            assert told, "the rank server has died, and the script with it"
            self.returncode = int(told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill it where it still runs, and close the pipes."""
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def run_ranks(
    script: str | Path,
    nproc: int,
    *args: object,
    env: dict[str, str | None] | None = None,
    timeout: float = 120,
    check: bool = True,
    fresh: bool = False,
) -> list[Result]:
    """Run a script (a path, or source text) on `nproc` ranks; their results in rank order.

    Raises AssertionError with everything that was printed when a rank fails (unless `check` is False) or when the
    limit passes. One process runs as plain `python script`, with no rank variables at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(script) if isinstance(script, Path) else Path(folder) / "worker.py"
        if not isinstance(script, Path):
            path.write_text(textwrap.dedent(script))
        # This process hosts the rendezvous store, so that its port cannot be taken between choice and use.
        store = (
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if nproc > 1 else None
        )
        logs = [
            (Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(nproc)
        ]
        processes: list[Any] = []
        for rank, (out, err) in enumerate(logs):
            variables = rank_environment(rank, nproc, store, env)
            with open(out, "w") as stdout, open(err, "w") as stderr:
                streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
                if fresh:
                    command = [sys.executable, str(path), *map(str, args)]
                    processes.append(subprocess.Popen(command, env=variables, **streams))
                else:
                    processes.append(Script(path, *args, env=variables, **streams))
        late = _join(processes, timeout)
        results = [
            Result(process.returncode, out.read_text(), err.read_text())
            for process, (out, err) in zip(processes, logs, strict=True)
        ]
    if late or (check and any(result.returncode for result in results)):
        report = [f"ranks {late} did not end within {timeout} s" if late else "a rank failed"]
        for rank, result in enumerate(results):
            report.append(
                f"--- rank {rank}: exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
            )
        raise AssertionError("\n".join(report))
    return results


def run_script(script: Path, *args: object) -> None:
    """On a rank of the pool: a script, where neither its first import nor how its process ends is what is tested."""
    sys.argv = [str(script), *map(str, args)]
    runpy.run_path(str(script), run_name="__main__")


def output_of(script: Path, *args: object) -> str:
    """What a script prints; its folder is on the path, as in `python script`."""
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_script(script, *args)
    return output.getvalue()


def _join(processes: list[Any], timeout: float) -> list[int]:
    """Wait for all; the ranks that had to be killed at the limit."""
    deadline = time.monotonic() + timeout
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for process in processes:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return late

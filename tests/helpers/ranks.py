# SPDX-License-Identifier: Apache-2.0
"""Start a script as several cooperating ranks on this machine and wait for all of them, within a time limit."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from rank_pool import rank_environment
from torch.distributed import TCPStore


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


def run_ranks(
    script: str | Path,
    nproc: int,
    *args: object,
    env: dict[str, str | None] | None = None,
    timeout: float = 120,
    check: bool = True,
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
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if nproc > 1 else None
        logs = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(nproc)]
        processes = []
        for rank, (out, err) in enumerate(logs):
            with open(out, "w") as stdout, open(err, "w") as stderr:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(path), *map(str, args)],
                        env=rank_environment(rank, nproc, store, env),
                        stdout=stdout,
                        stderr=stderr,
                        stdin=subprocess.DEVNULL,
                    )
                )
        late = _join(processes, timeout)
        results = [
            Result(process.returncode, out.read_text(), err.read_text())
            for process, (out, err) in zip(processes, logs, strict=True)
        ]
    if late or (check and any(result.returncode for result in results)):
        report = [f"ranks {late} did not end within {timeout} s" if late else "a rank failed"]
        for rank, result in enumerate(results):
            report.append(f"--- rank {rank}: exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
        raise AssertionError("\n".join(report))
    return results


def run_script(script: Path, *args: object) -> None:
    """On a rank of the pool: a script, where neither its first import nor how its process ends is what is tested."""
    sys.argv = [str(script), *map(str, args)]
    runpy.run_path(str(script), run_name="__main__")


def _join(processes: list[subprocess.Popen], timeout: float) -> list[int]:
    """Wait for all; the ranks that had to be killed at the limit."""
    deadline = time.monotonic() + timeout
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    return late

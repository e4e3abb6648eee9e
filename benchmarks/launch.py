# SPDX-License-Identifier: Apache-2.0
"""Time of the launcher: its help, the start of a script, and 64 processes with a log each."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from timing import emit

BIN = Path(sys.executable).parent
ROUNDS = 5
MANY = 64
# The launched script writes the time of its first line to a file named after its rank.
FIRST_LINE = (
    "import time; now = time.time()\n"
    "import os, sys; open(os.path.join(sys.argv[1], os.environ.get('RANK', '0')), 'w').write(repr(now))\n"
)


def run(command: list[str]) -> bool:
    """Run a command without output. Return whether it succeeded."""
    quiet = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "stdin": subprocess.DEVNULL,
    }
    return subprocess.run(command, timeout=120, **quiet).returncode == 0


def time_command(command: list[str]) -> float | None:
    begin = time.time()
    return time.time() - begin if run(command) else None


def to_first_line(prefix: list[str], processes: int) -> float | None:
    """Return the seconds until the last process runs its first line, or None if a process is missing."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(FIRST_LINE)
        times_dir = Path(folder) / "times"
        times_dir.mkdir()
        begin = time.time()
        if not run([*prefix, str(script), str(times_dir)]):
            return None
        times = [float(file.read_text()) for file in times_dir.iterdir()]
        return max(times) - begin if len(times) == processes else None


def time_many(command: Callable[[str], list[str]]) -> float | None:
    """Return the seconds to launch MANY processes with a log each, or None if a log is missing."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = time_command(command(folder))
        logs = {path.parent for path in Path(folder).rglob("stdout.log")}
        return seconds if len(logs) == MANY else None


def medians(
    measurements: dict[str, Callable[[], float | None]], rounds: int
) -> dict[str, float | None]:
    """Return the median of each measurement. They run in turn. The first round warms the file cache and is dropped."""
    results: dict[str, list[float]] = {name: [] for name in measurements}
    for round_number in range(rounds + 1):
        for name, measure in measurements.items():
            seconds = measure()
            if seconds is not None and round_number:
                results[name].append(seconds)
    for name, values in results.items():
        print(f"{name}: {[round(value, 3) for value in sorted(values)]}", file=sys.stderr)
    return {
        name: statistics.median(values) if len(values) == rounds else None
        for name, values in results.items()
    }


def report(name: str, unit: str, raw: float | None, own: float | None) -> None:
    if own is not None:
        emit(name, unit, raw, own)


def main() -> None:
    os.environ["HF_HOME"] = tempfile.mkdtemp()  # ignore the configuration of the user
    launch = [str(BIN / "accelerate"), "launch"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node"]
    cpu = [*launch, "--cpu", "--num_processes"]
    found = medians({"help": lambda: time_command([*launch, "-h"])}, ROUNDS)
    report("launch help", "ms", None, found["help"])
    one = medians(
        {
            "python": lambda: to_first_line([sys.executable], 1),
            "own": lambda: to_first_line([*cpu, "1"], 1),
            "torchrun": lambda: to_first_line([*torchrun, "1"], 1),
        },
        ROUNDS,
    )
    report("launch one", "ms", one["python"], one["own"])
    report("launch one, torchrun", "ms", one["torchrun"], one["own"])
    two = medians(
        {
            "own": lambda: to_first_line([*cpu, "2"], 2),
            "torchrun": lambda: to_first_line([*torchrun, "2"], 2),
        },
        ROUNDS,
    )
    report("launch two", "ms", two["torchrun"], two["own"])
    programs = medians(
        {
            "own": lambda: time_many(
                lambda folder: [*cpu, str(MANY), "--log_dir", folder, "--no_python", "true"]
            ),
            "torchrun": lambda: time_many(
                lambda folder: [
                    *torchrun,
                    str(MANY),
                    "--log-dir",
                    folder,
                    "-r",
                    "3",
                    "--no-python",
                    "true",
                ]
            ),
        },
        3,
    )
    report("launch many", "ms", programs["torchrun"], programs["own"])


if __name__ == "__main__":
    main()

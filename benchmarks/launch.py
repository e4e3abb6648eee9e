# SPDX-License-Identifier: Apache-2.0
"""How long a launcher takes: its help, the way to a script's first line, 64 programs started, joined and logged."""

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
# What a launched script does: its first line notes the time under the name of its rank.
FIRST_LINE = (
    "import time; now = time.time()\n"
    "import os, sys; open(os.path.join(sys.argv[1], os.environ.get('RANK', '0')), 'w').write(repr(now))\n"
)


def run(command: list[str]) -> bool:
    """Whether a command ended well. Its output is nobody's business here."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, timeout=120, **quiet).returncode == 0


def whole(command: list[str]) -> float | None:
    begin = time.time()
    return time.time() - begin if run(command) else None


def to_first_line(before: list[str], processes: int) -> float | None:
    """Seconds from the shell to the first line of the last process; None where fewer processes came."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(FIRST_LINE)
        notes = Path(folder) / "notes"
        notes.mkdir()
        begin = time.time()
        if not run([*before, str(script), str(notes)]):
            return None
        times = [float(note.read_text()) for note in notes.iterdir()]
        return max(times) - begin if len(times) == processes else None


def many(command: Callable[[str], list[str]]) -> float | None:
    """Seconds for a launch of MANY programs with a log of each; None where there are fewer logs."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = whole(command(folder))
        logs = {path.parent for path in Path(folder).rglob("stdout.log")}
        return seconds if len(logs) == MANY else None


def medians(contestants: dict[str, Callable[[], float | None]], rounds: int) -> dict[str, float | None]:
    """The median of each, in turn; the first round, which reads the files from the disk, does not count."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, measure in contestants.items():
            seconds = measure()
            if seconds is not None and turn:
                taken[name].append(seconds)
    for name, values in taken.items():
        print(f"{name}: {[round(value, 3) for value in sorted(values)]}", file=sys.stderr)
    return {name: statistics.median(values) if len(values) == rounds else None for name, values in taken.items()}


def report(what: str, unit: str, raw: float | None, own: float | None) -> None:
    if own is not None:
        emit(what, unit, raw, own)


def main() -> None:
    os.environ["HF_HOME"] = tempfile.mkdtemp()  # nobody's own configuration
    launch = [str(BIN / "accelerate"), "launch"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node"]
    cpu = [*launch, "--cpu", "--num_processes"]
    found = medians({"help": lambda: whole([*launch, "-h"])}, ROUNDS)
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
            "own": lambda: many(lambda folder: [*cpu, str(MANY), "--log_dir", folder, "--no_python", "true"]),
            "torchrun": lambda: many(
                lambda folder: [*torchrun, str(MANY), "--log-dir", folder, "-r", "3", "--no-python", "true"]
            ),
        },
        3,
    )
    report("launch many", "ms", programs["torchrun"], programs["own"])


if __name__ == "__main__":
    main()

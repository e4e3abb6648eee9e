# SPDX-License-Identifier: Apache-2.0
"""What importing `accelerate` costs over importing torch, each in a fresh interpreter, alternated."""

from __future__ import annotations

import statistics
import subprocess
import sys

from timing import emit

ROUNDS = 5
STATEMENTS = {
    "nothing": "pass",
    "torch": "import torch",
    # What the peer's users get from `import accelerate`: torch, and the package beside it.
    "package": "import torch, accelerate",
    "name": "from accelerate import Accelerator",
    "alone": "import accelerate",
}


def seconds_of(statement: str) -> float:
    """The seconds that a statement takes inside a fresh interpreter, its start not counted."""
    source = f"import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for statement in STATEMENTS.values():
        seconds_of(statement)  # the first one reads the files from the disk
    for _ in range(ROUNDS):
        for name, statement in STATEMENTS.items():
            taken[name].append(seconds_of(statement))
    median = {name: statistics.median(values) for name, values in taken.items()}
    emit("import", "ms", median["torch"], median["package"])
    emit("import a name", "ms", median["torch"], median["name"])
    emit("import alone", "ms", median["torch"], median["alone"])


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Import time of `accelerate` compared with torch, each in a fresh interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys

from timing import emit

ROUNDS = 5
STATEMENTS = {
    "nothing": "pass",
    "torch": "import torch",
    # The same modules as the peer's `import accelerate`, which imports torch.
    "package": "import torch, accelerate",
    "name": "from accelerate import Accelerator",
    "alone": "import accelerate",
}


def seconds_of(statement: str) -> float:
    """Return the time of a statement in a fresh interpreter, without the interpreter's startup."""
    source = (
        f"import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for statement in STATEMENTS.values():
        seconds_of(statement)  # warm the file cache
    for _ in range(ROUNDS):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds_of(statement))
    median = {name: statistics.median(values) for name, values in times.items()}
    emit("import", "ms", median["torch"], median["package"])
    emit("import a name", "ms", median["torch"], median["name"])
    emit("import alone", "ms", median["torch"], median["alone"])


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Train `train_gpt.py` on two processes, kill it, resume it, and compare the losses of the steps that ran twice.

    python examples/demo.py

It takes about a minute on two CPU cores, and writes to `runs/demo`. Options are those of `train_gpt.py`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

from accelerate.tracking import read_values

FOLDER = Path("runs/demo")
SCRIPT = Path(__file__).with_name("train_gpt.py")
SAVE_EVERY, KILL_AT = 250, 320


def losses() -> dict[int, float]:
    """Return the losses that the run has logged: of a step that ran twice, the later one."""
    with contextlib.suppress(FileNotFoundError):
        records = read_values(FOLDER / "train_gpt")
        return {
            record["step"]: record["values"]["loss"]
            for record in records
            if "loss" in record["values"]
        }
    return {}


def launch(*options: object) -> subprocess.Popen:
    script = SCRIPT.relative_to(Path.cwd()) if SCRIPT.is_relative_to(Path.cwd()) else SCRIPT
    options = (
        "launch",
        "--cpu",
        "--num_processes",
        2,
        "--telemetry",
        script,
        "--output_dir",
        FOLDER,
        *options,
    )
    command = [*map(str, options), *sys.argv[1:]]
    print("\n$ accelerate", *command, flush=True)
    return subprocess.Popen([sys.executable, "-m", "accelerate.commands.main", *command])


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(f"Watch it from another terminal: accelerate monitor {FOLDER}")
    run = launch("--save_every", SAVE_EVERY)
    try:
        while run.poll() is None and max(losses(), default=0) < KILL_AT:
            time.sleep(0.1)
    finally:
        run.kill()  # SIGKILL; the processes that the launcher has started end with it
    if run.wait() >= 0:
        sys.exit(f"the run ended before it was killed, with exit code {run.returncode}")
    before = losses()
    print(f"\n$ kill -9 {run.pid}        # after step {max(before)}", flush=True)
    run = launch("--save_every", SAVE_EVERY, "--resume")
    if run.wait():
        sys.exit(run.returncode)
    after = losses()

    repeated = [step for step in before if step > SAVE_EVERY]
    step = max(repeated)
    equal = all(before[step] == after[step] for step in repeated)
    print(f"""
What you have seen:
  two processes   They trained one model: each read half of every batch of 64 dates.
  a checkpoint    It was saved at step {SAVE_EVERY}, and was complete when the run was killed.
  a kill          SIGKILL ended the launcher and both processes. The loss of step {step} was {before[step]:.10f}.
  a resume        Steps {SAVE_EVERY + 1} to {step} ran again. The loss of step {step} was {after[step]:.10f}: \
{"equal to the last bit" if equal else "NOT EQUAL"}.
  a page          `accelerate monitor {FOLDER}` shows the run; `accelerate report {FOLDER} -o demo.html` keeps it.""")
    sys.exit(not equal)


if __name__ == "__main__":
    main()

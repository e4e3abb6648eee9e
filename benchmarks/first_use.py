# SPDX-License-Identifier: Apache-2.0
"""The path of a new user, from a fresh clone in a fresh environment: each command, its time, and every line it prints.

    python benchmarks/first_use.py OUTPUT.md

The demo of the README, then the program of the page "First training": on one process, on two, killed and resumed, and
certified. The packages are installed from the index that pip is configured with; nothing else is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"


class Record:
    """The commands that ran in a folder, as a page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[str] = []
        self.seconds = 0.0
        # As in the shell of a user: the programs of the environment come first.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        path = f"{folder / 'env/bin'}:{environment['PATH']}"
        # pip's own lines depend on its configuration, not on this package.
        self.environment = {**environment, "PATH": path, "PIP_QUIET": "2"}

    def title(self, text: str) -> None:
        self.parts.append(f"## {text}\n")

    def run(self, command: str, kill_after: str | None = None) -> None:
        """Run a command of the shell and record it.

        Args:
            command: The command.
            kill_after: After a line with this text, all processes of the command get SIGKILL.
        """
        print(f"$ {command}", flush=True)
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
            if kill_after is not None and kill_after in line:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        seconds = time.monotonic() - start
        self.seconds += seconds
        killed = kill_after is not None
        if code != 0 and not killed:
            raise SystemExit(f"exit code {code}: {command}")
        end = f"{seconds:.1f} s" + (", ended by `kill -9`" if killed else "")
        printed = "".join(lines).replace(str(self.folder), "~")
        self.parts.append(f"{end}:\n\n```console\n$ {command}\n{printed}```\n")


def page_program() -> str:
    """Return the program of the page "First training"."""
    page = (PROJECT / "docs/first_training.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return programs[0]


def main() -> None:
    """Run the commands and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path, help="the page to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["git", "clone", "-q", str(PROJECT), str(folder / "accelerate")], check=True)
        record = Record(folder)
        record.title("The demo")
        record.run("cd accelerate && make demo")
        record.title("Install")
        record.run(f"{sys.executable} -m venv env && env/bin/pip install -q {TORCH}")
        record.run("pip install -q ./accelerate")
        (folder / "train.py").write_text(page_program())
        record.title("Train")
        record.run("python train.py")
        record.run("rm -r circle")
        record.run("accelerate launch --num_processes 2 train.py", kill_after="epoch 1:")
        record.title("Resume")
        record.run("accelerate checkpoint list circle/checkpoints")
        record.run("accelerate launch --num_processes 2 train.py")
        record.title("Certify")
        record.run("rm -r circle")
        record.run("accelerate certify train.py --layouts ddp:2 --cpu")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True
    ).stdout.strip()
    heading = (
        f"# The first hour of a new user: {record.seconds / 60:.1f} minutes\n\n"
        f"Written by `python benchmarks/first_use.py` at commit {commit}, on {os.cpu_count()} CPU cores, with the\n"
        "CPU build of torch in pip's cache. `~` is the folder in which the user works; `train.py` is the program of\n"
        "[First training](../../docs/first_training.md).\n"
    )
    args.output.write_text("\n".join([heading, *record.parts]))


if __name__ == "__main__":
    main()

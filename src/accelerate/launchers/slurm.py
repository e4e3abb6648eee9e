# SPDX-License-Identifier: Apache-2.0
"""Slurm: submits and follows a batch script; inside an allocation, runs one step whose tasks are the ranks."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from ..core import env
from ..core.errors import ConfigurationError, LaunchError
from .base import AGENT, Launcher, handling, print_message
from .failure import exit_code, first_cause
from .spec import ProcessSpec, check_variable
from .streams import RANK_END, TAIL, RankEnd
from .watched_process import watched

# States of a job that has not ended.
ALIVE = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING"}
)
POLL = 1.0
_RESTART = b"accelerate launch: restart "
# A node's name need not resolve everywhere; the controller knows its address.
FIND_ADDRESS = (
    "# where rank 0 will be",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "export MASTER_ADDR=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
)


class SlurmLauncher(Launcher):
    """One job, or inside an allocation one step."""

    name = "slurm"
    remote = True
    uses_this_machine = False
    unused: tuple[str, ...] = (*AGENT, "rdzv_conf", "machine_rank", "tee", "mpirun_hostfile")
    reserves_port = False

    @property
    def options(self) -> list[str]:
        """The additional options of sbatch. ConfigurationError for text that is no words of a shell."""
        try:
            return shlex.split(self.spec.slurm_options)
        except ValueError as error:
            raise ConfigurationError(f"slurm_options={self.spec.slurm_options!r}: {error}") from None

    @property
    def inside(self) -> bool:
        """Whether this process runs inside an allocation."""
        return env.get("SLURM_JOB_ID") is not None and env.get("SLURM_STEP_ID") is None

    def _check(self) -> None:
        if self.spec.error_file and not self.inside:
            raise ConfigurationError(
                "error_file: Slurm supervises the submitted job and writes no such file; use it inside an allocation"
            )
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigurationError(f"slurm_options: {option!r} is not an option of sbatch; write --name=value")
            _directive(option, "slurm_options")
        for name in self.spec.variables:
            check_variable(name)

    def _check_programs(self) -> None:
        """Check the programs that a start needs; a dry run needs none."""
        needed = ["srun"] if self.inside else ["sbatch", "scontrol", "scancel"]
        absent = [name for name in needed if shutil.which(name) is None]
        if absent:
            raise ConfigurationError(f"{', '.join(absent)} not on the PATH: this machine is not a client of Slurm")

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return the process of srun, whose tasks are the ranks."""
        variables = self._variables(attempt)
        if "MASTER_ADDR" not in variables and shutil.which("scontrol") is not None:
            variables["MASTER_ADDR"] = _first_address(env.get("SLURM_JOB_NODELIST") or "")
        return [ProcessSpec(0, 0, tuple(self._srun()), variables, starter="srun")]

    def dry_run(self) -> str:
        """Return the batch script, or inside an allocation the command of the step."""
        return super().dry_run() if self.inside else self.batch_script()

    def _srun(self) -> list[str]:
        """The command of the step. Each task is a rank and reads which from Slurm's own variables."""
        spec = self.spec
        sizes = [f"--nodes={spec.num_machines}", f"--ntasks={spec.num_processes}"]
        return ["srun", *sizes, "--kill-on-bad-exit=1", "--label", *watched(spec.program.argv())]

    def _variables(self, attempt: int | None = None) -> dict[str, str | None]:
        variables = self.spec.common_variables(attempt)
        if self.spec.main_process_ip_given:
            variables["MASTER_ADDR"] = self.spec.main_process_ip
        if self.spec.main_process_port:
            variables["MASTER_PORT"] = str(self.spec.main_process_port)
        return variables

    @property
    def job_name(self) -> str:
        """The script's name, with only characters that need no quotes."""
        return re.sub(r"[^\w.+-]+", "_", Path(self.spec.program.name).stem).lstrip("-") or "accelerate"

    def batch_script(self) -> str:
        """The script that sbatch gets."""
        spec = self.spec
        lines = ["#!/bin/bash", f"#SBATCH --job-name={self.job_name}"]
        lines += [f"#SBATCH --nodes={spec.num_machines}", f"#SBATCH --ntasks={spec.num_processes}"]
        lines.append(f"#SBATCH --ntasks-per-node={spec.local_processes}")
        if spec.threads is not None:
            lines.append(f"#SBATCH --cpus-per-task={spec.threads}")
        if spec.device != "cpu":
            lines.append(f"#SBATCH --gpus-per-node={spec.local_processes}")
        lines += [f"#SBATCH {_directive(option, 'slurm_options')}" for option in self.options]
        lines.append("")
        lines += [f"export {name}={shlex.quote(text)}" for name, text in self._variables().items() if text is not None]
        if not spec.main_process_ip_given:
            lines += ["", *FIND_ADDRESS]
        lines += ["", *self._attempts(shlex.join(self._srun()))]
        return "\n".join(lines) + "\n"

    def _attempts(self, srun: str) -> list[str]:
        """The step, with restarts after a failure where they are allowed."""
        most = self.spec.max_restarts
        if not most:
            return [srun]
        again = f"accelerate launch: restart $TORCHELASTIC_RESTART_COUNT of {most}"
        return [
            f"for TORCHELASTIC_RESTART_COUNT in $(seq 0 {most}); do",
            "    export TORCHELASTIC_RESTART_COUNT",
            f'    [ "$TORCHELASTIC_RESTART_COUNT" = 0 ] || echo "{again}"',
            f"    {srun} && exit 0",
            "    code=$?",
            "done",
            "exit $code",
        ]

    def run(self) -> int:
        """Submit the job and follow it, or inside an allocation run one step. Returns the exit code."""
        self._check_programs()
        if self.inside:
            return super().run()
        folder = Path(self.spec.log_dir or ".").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"{self.job_name}.sbatch"
        script.write_text(self.batch_script())
        log = folder / f"{script.stem}-%j.log"
        job = _submit(script, log)
        log = Path(str(log).replace("%j", job))
        print_message(f"job {job} from {script}, log {log}")
        with _cancelling(job):
            return _follow(job, log)


def _directive(option: str, where: str) -> str:
    """An option as sbatch reads it in a script: one line, in quotes where it has spaces."""
    if any(ord(character) < 32 or ord(character) == 127 for character in option):
        raise ConfigurationError(f"{where}: {option!r} contains a line break or another control character")
    if not re.search(r"[^\w@%+=:,./\-\[\]*&|!~^]", option):
        return option
    # sbatch knows both kinds of quotes, and no escape between single ones.
    if "'" not in option:
        return f"'{option}'"
    if '"' in option or "\\" in option:
        raise ConfigurationError(
            f"{where}: {option!r} contains both kinds of quotes, which sbatch cannot read in a script"
        )
    return f'"{option}"'


def _first_address(nodes: str) -> str | None:
    """The address of the first node of Slurm's list of nodes."""
    names = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True).stdout.split()
    node = (
        subprocess.run(["scontrol", "show", "node", names[0]], capture_output=True, text=True).stdout if names else ""
    )
    return next((word.partition("=")[2] for word in node.split() if word.startswith("NodeAddr=")), None)


def _submit(script: Path, log: Path) -> str:
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", "--open-mode=append", str(script)], capture_output=True, text=True
    )
    if done.returncode:
        raise LaunchError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().split(";")[0]


def _cancelling(job: str) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C and SIGTERM here cancel the job there."""

    def cancel(number: int, frame: FrameType | None) -> None:
        subprocess.run(["scancel", job], check=False)
        print_message(f"job {job} is cancelled")
        raise SystemExit(128 + number)

    return handling(("SIGINT", "SIGTERM"), cancel)


def _follow(job: str, log: Path) -> int:
    """Print the job's log as it grows until the job ends; its exit code."""
    tail = _LogTail(log)
    waiting = False
    while True:
        state, code, reason = _state(job)
        tail.print_new()
        if state not in ALIVE:
            tail.print_rest()
            found = first_cause(tail.ends, tail.text)
            # Slurm's code of the job is the highest of all tasks, also of tasks that were stopped after a failure.
            code = next((exit_code(end.code) for end in tail.ends if end.code), code)
            if found is not None:
                print_message(f"rank {found[0].rank} failed: {found[1]}")
            if code or state != "COMPLETED":
                print_message(f"job {job} ended as {state}, exit code {code}")
            return code or (0 if state == "COMPLETED" else 1)
        if state == "PENDING" and not waiting and reason not in ("", "None"):
            waiting = True
            print_message(f"job {job} is pending: {reason}")
        time.sleep(POLL)


class _LogTail:
    """The log of a job, printed as it grows, without the reports of ranks that have ended. A restart begins anew."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.ends: list[RankEnd] = []
        self._position = 0
        self._line = b""
        self._text = b""

    @property
    def text(self) -> str:
        """The last lines that were printed before the first failure."""
        return self._text.decode(errors="replace")

    def print_new(self) -> None:
        """Print the lines that were added since the last call."""
        if not self.log.exists():
            return
        with open(self.log, "rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._print(line + b"\n")
        sys.stdout.flush()

    def print_rest(self) -> None:
        """Print a last line without its end."""
        self._print(self._line)
        sys.stdout.flush()

    def _print(self, line: bytes) -> None:
        if line.startswith(_RESTART):
            self.ends, self._text = [], b""
        report = re.search(RANK_END, line)
        if report is not None:
            self.ends.append(RankEnd(int(report[1]), int(report[2])))
            line = re.sub(RANK_END, b"", line)
        if not any(end.code for end in self.ends):
            self._text = (self._text + line)[-TAIL:]
        sys.stdout.buffer.write(line)


def _state(job: str) -> tuple[str, int, str]:
    """State, exit code and pending reason of a job, from the controller."""
    done = subprocess.run(["scontrol", "show", "job", job, "--oneliner"], capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"Slurm does not know job {job} any more: {done.stderr.strip()}")
    fields = dict(part.split("=", 1) for part in done.stdout.split() if "=" in part)
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    ended = int(code) or (128 + int(number) if number and int(number) else 0)
    return fields.get("JobState", "UNKNOWN"), ended, fields.get("Reason", "")

# SPDX-License-Identifier: Apache-2.0
"""Slurm: submits and follows a job that runs this launcher; inside an allocation it runs a step of all ranks."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from ..core import env, messages
from ..core.errors import ConfigurationError, LaunchError
from .base import AGENT, Launcher, handling
from .spec import ProcessSpec, check_variable
from .streams import write_all
from .watched_process import watched

# States of a job that has not ended.
ALIVE = frozenset(
    {
        "PENDING",
        "RUNNING",
        "CONFIGURING",
        "COMPLETING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "SUSPENDED",
        "RESIZING",
    }
)
POLL = 1.0
# Seconds before the end of a job's time in which its ranks may save.
SAVE_TIME = 120
# A node's name need not resolve everywhere; the controller knows its address.
FIND_ADDRESS = (
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); '
    "scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'"
)
# Options that the launch inside the job gets, where they differ from their defaults.
INSIDE = (
    "num_processes", "num_machines", "config_file", "main_process_ip", "main_process_port", "max_restarts",
    "error_file", "stop_timeout", "stop_within", "progress_interval",
)  # fmt: skip


class SlurmLauncher(Launcher):
    """One job, or inside an allocation one step."""

    name = "slurm"
    remote = True
    uses_this_machine = False
    unused: tuple[str, ...] = (*AGENT, "rdzv_conf", "machine_rank", "tee", "mpirun_hostfile")
    reserves_port = False

    @property
    def options(self) -> list[str]:
        """The additional options of sbatch. ConfigurationError for text that is not words of a shell."""
        try:
            return shlex.split(self.spec.slurm_options)
        except ValueError as error:
            raise ConfigurationError(
                f"slurm_options={self.spec.slurm_options!r}: {error}"
            ) from None

    @property
    def inside(self) -> bool:
        """Whether this process runs inside an allocation."""
        return env.get("SLURM_JOB_ID") is not None and env.get("SLURM_STEP_ID") is None

    def check(self) -> None:
        """Check what this engine requires."""
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigurationError(
                    f"slurm_options: {option!r} is not an sbatch option; write --name=value"
                )
            _directive(option)
        for name in self.spec.variables:
            check_variable(name)

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return the process of srun, whose tasks are the ranks."""
        spec = self.spec
        variables = spec.common_variables(attempt)
        if spec.main_process_ip_given:
            variables["MASTER_ADDR"] = spec.main_process_ip
        elif shutil.which("scontrol") is not None:
            done = subprocess.run(["sh", "-c", FIND_ADDRESS], capture_output=True, text=True)
            variables["MASTER_ADDR"] = done.stdout.strip()
        if spec.main_process_port:
            variables["MASTER_PORT"] = str(spec.main_process_port)
        # Each task is a rank and reads which from Slurm's own variables.
        sizes = [f"--nodes={spec.num_machines}", f"--ntasks={spec.num_processes}"]
        command = ["srun", *sizes, "--kill-on-bad-exit=1", "--label", *watched(spec.program.argv())]
        return [ProcessSpec(0, 0, tuple(command), variables, starter="srun")]

    def dry_run(self) -> str:
        """Return the batch script, or inside an allocation the command of the step."""
        if self.inside:
            return super().dry_run()
        return self.batch_script()

    @property
    def job_name(self) -> str:
        """The script's name, with only characters that need no quotes."""
        return (
            re.sub(r"[^\w.+-]+", "_", Path(self.spec.program.name).stem).lstrip("-") or "accelerate"
        )

    def batch_script(self) -> str:
        """The script that sbatch gets."""
        spec = self.spec
        lines = ["#!/bin/bash", f"#SBATCH --job-name={self.job_name}"]
        lines += [f"#SBATCH --nodes={spec.num_machines}", f"#SBATCH --ntasks={spec.num_processes}"]
        lines.append(f"#SBATCH --ntasks-per-node={spec.local_processes}")
        if spec.threads is not None and spec.threads > 1:
            lines.append(f"#SBATCH --cpus-per-task={spec.threads}")
        if spec.device != "cpu":
            lines.append(f"#SBATCH --gpus-per-node={spec.local_processes}")
        # A failed machine, or the end of the time: the ranks get SIGTERM in time to save.
        seconds = math.ceil(spec.stop_within or SAVE_TIME)
        lines += ["#SBATCH --requeue", f"#SBATCH --signal=TERM@{seconds}"]
        lines += [f"#SBATCH {_directive(option)}" for option in self.options]
        left_out = [
            name for name in ("--time", "--cpus-per-task") if f" {name}=" not in "\n".join(lines)
        ]
        if left_out:
            lines.append(
                f"# Slurm's defaults apply to {' and '.join(left_out)}: --slurm_options sets them."
            )
        lines.append("")
        variables = spec.common_variables().items()
        lines += [
            f"export {name}={shlex.quote(text)}" for name, text in variables if text is not None
        ]
        inner = [sys.executable, "-m", "accelerate.commands.launch", "--engine", self.name]
        inner += ["--cpu"] if spec.device == "cpu" else []
        lines += ["", shlex.join([*inner, *spec.launch_arguments(INSIDE)])]
        return "\n".join(lines) + "\n"

    def run(self) -> int:
        """Submit the job and follow it, or inside an allocation run one step. Returns the exit code."""
        if self.inside:
            needed = ["srun"]
        else:
            needed = ["sbatch", "scontrol", "scancel"]
        absent = [name for name in needed if shutil.which(name) is None]
        if absent:
            raise ConfigurationError(
                f"{', '.join(absent)} not on the PATH: this machine is not a Slurm client"
            )
        if self.inside:
            return super().run()
        folder = Path(self.spec.log_dir or ".").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"{self.job_name}.sbatch"
        script.write_text(self.batch_script())
        log = folder / f"{script.stem}-%j.log"
        submission = ["sbatch", "--parsable", f"--output={log}", "--open-mode=append", str(script)]
        done = subprocess.run(submission, capture_output=True, text=True)
        if done.returncode:
            raise LaunchError(f"sbatch refused {script}: {done.stderr.strip()}")
        job = done.stdout.strip().split(";")[0]
        log = Path(str(log).replace("%j", job))
        messages.show(f"job {job} from {script}, log {log}")

        def cancel(number: int, frame: FrameType | None) -> None:
            subprocess.run(["scancel", job], check=False)
            messages.show(f"job {job} was canceled")
            raise SystemExit(128 + number)

        with handling(("SIGINT", "SIGTERM"), cancel):
            return _follow(job, log)


def _directive(option: str) -> str:
    """An option as sbatch reads it in a script: one line, in quotes where it has spaces. sbatch knows no escapes."""
    if not re.search(r"[^\w@%+=:,./\-\[\]*&|!~^]", option):
        return option
    quote = '"' if "'" in option else "'"
    if quote in option or not option.isprintable() or (quote == '"' and "\\" in option):
        raise ConfigurationError(
            f"slurm_options: {option!r} contains a control character or quotes that sbatch cannot "
            "read in a script"
        )
    return f"{quote}{option}{quote}"


def _follow(job: str, log: Path) -> int:
    """Print the job's log as it grows until the job ends; its exit code."""
    position, is_pending = 0, False
    while True:
        state, code, reason = _state(job)
        if log.exists():
            with open(log, "rb") as file:
                file.seek(position)
                write_all(1, file.read())
                position = file.tell()
        if state not in ALIVE:
            if code or state != "COMPLETED":
                messages.show(f"job {job} ended as {state}, exit code {code}")
            return code or (0 if state == "COMPLETED" else 1)
        if state == "PENDING" and not is_pending and reason not in ("", "None"):
            is_pending = True
            messages.show(f"job {job} is pending: {reason}")
        time.sleep(POLL)


def _state(job: str) -> tuple[str, int, str]:
    """State, exit code and pending reason of a job, from the controller."""
    done = subprocess.run(
        ["scontrol", "show", "job", job, "--oneliner"], capture_output=True, text=True
    )
    if done.returncode:
        raise LaunchError(f"Slurm no longer knows job {job}: {done.stderr.strip()}")
    fields = dict(part.split("=", 1) for part in done.stdout.split() if "=" in part)
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    ended = int(code) or (128 + int(number) if number and int(number) else 0)
    return fields.get("JobState", "UNKNOWN"), ended, fields.get("Reason", "")

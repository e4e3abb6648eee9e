# SPDX-License-Identifier: Apache-2.0
"""Slurm: a readable batch script, submitted and followed; inside an allocation, one step whose tasks are the ranks."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ..core import env
from ..core.errors import ConfigurationError, LaunchError
from .base import Launcher
from .spec import LaunchSpec, ProcessSpec, check_variable
from .watched_process import watched

# States of a job that has not ended.
ALIVE = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING"}
)
POLL = 1.0
_TASK_FAILED = re.compile(r"^srun: error: .*: Exited with exit code (\d+)|^accelerate launch: restart ", re.MULTILINE)
# A node's name need not resolve everywhere; the controller knows its address.
FIND_ADDRESS = (
    "# where rank 0 will be",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "export MASTER_ADDR=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
)


class SlurmLauncher(Launcher):
    """`options`: further lines for sbatch, as '--partition=gpu --time=2:00:00'."""

    name = "slurm"

    def __init__(self, spec: LaunchSpec, options: str = "") -> None:
        super().__init__(spec)
        try:
            self.options = shlex.split(options)
        except ValueError as error:
            raise ConfigurationError(f"slurm_options={options!r}: {error}") from None

    @property
    def inside(self) -> bool:
        """Whether this process runs in an allocation already."""
        return env.get("SLURM_JOB_ID") is not None and env.get("SLURM_STEP_ID") is None

    def check(self) -> None:
        super().check()
        if self.spec.error_file and not self.inside:
            raise ConfigurationError(
                "the slurm engine's job is watched by Slurm, which writes no error_file: give it inside an allocation"
            )
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigurationError(f"slurm_options: {option!r} is no option of sbatch; write --name=value")
            _directive(option, "slurm_options")
        for name in self.spec.variables:
            check_variable(name)

    def _check_programs(self) -> None:
        """What a start needs; a dry run needs none of it."""
        needed = ["srun"] if self.inside else ["sbatch", "scontrol", "scancel"]
        absent = [name for name in needed if shutil.which(name) is None]
        if absent:
            raise ConfigurationError(f"{', '.join(absent)} is not on the PATH: this machine is no client of Slurm")

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        variables = self._variables()
        if self.spec.max_restarts:
            variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        if "MASTER_ADDR" not in variables and shutil.which("scontrol") is not None:
            variables["MASTER_ADDR"] = _first_address(env.get("SLURM_JOB_NODELIST") or "")
        return [ProcessSpec(0, 0, tuple(self._srun()), variables, starter="srun")]

    def dry_run(self) -> str:
        return super().dry_run() if self.inside else self.batch_script()

    def _srun(self) -> list[str]:
        """Each task is a rank, and knows which from Slurm's own variables: no shell stands in between."""
        spec = self.spec
        sizes = [f"--nodes={spec.num_machines}", f"--ntasks={spec.num_processes}"]
        return ["srun", *sizes, "--kill-on-bad-exit=1", "--label", *watched(spec.program.argv())]

    def _variables(self) -> dict[str, str | None]:
        variables = dict(self.spec.variables)
        if self.spec.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.spec.threads)
        if self.spec.main_process_ip_given:
            variables["MASTER_ADDR"] = self.spec.main_process_ip
        if self.spec.main_process_port:
            variables["MASTER_PORT"] = str(self.spec.main_process_port)
        return variables

    @property
    def job_name(self) -> str:
        """The script's name in characters that need no quotes anywhere."""
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
        """The step, and where it may be started again after a failure, how."""
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
        self._check_programs()
        if self.inside:
            return self._run_inside()
        folder = Path(self.spec.log_dir or ".").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"{self.job_name}.sbatch"
        script.write_text(self.batch_script())
        log = folder / f"{script.stem}-%j.log"
        job = _submit(script, log)
        log = Path(str(log).replace("%j", job))
        print(f"accelerate launch: job {job} from {script}, log {log}", file=sys.stderr)
        with _cancelling(job):
            return _follow(job, log)

    def _run_inside(self) -> int:
        from .supervisor import Supervisor, with_restarts

        def attempt(number: int) -> Supervisor:
            supervisor = Supervisor(self.spec)
            supervisor.run(self.processes(attempt=number))
            return supervisor

        return with_restarts(self.spec, attempt)


def _directive(option: str, where: str) -> str:
    """An option as sbatch reads it in a script: one line, in quotes where it has spaces."""
    if any(ord(character) < 32 or ord(character) == 127 for character in option):
        raise ConfigurationError(f"{where}: {option!r} has a line break or another control character in it")
    if not re.search(r"[^\w@%+=:,./\-\[\]*&|!~^]", option):
        return option
    # sbatch knows both kinds of quotes, and no escape between single ones.
    if "'" not in option:
        return f"'{option}'"
    if '"' in option or "\\" in option:
        raise ConfigurationError(
            f"{where}: {option!r} has quotes of both kinds, which a script for sbatch cannot hold"
        )
    return f'"{option}"'


def _first_address(nodes: str) -> str | None:
    """The address of the first node of Slurm's list of nodes."""
    names = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True).stdout.split()
    told = (
        subprocess.run(["scontrol", "show", "node", names[0]], capture_output=True, text=True).stdout if names else ""
    )
    return next((word.partition("=")[2] for word in told.split() if word.startswith("NodeAddr=")), None)


def _submit(script: Path, log: Path) -> str:
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", "--open-mode=append", str(script)], capture_output=True, text=True
    )
    if done.returncode:
        raise LaunchError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().split(";")[0]


@contextlib.contextmanager
def _cancelling(job: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM here cancel the job there."""

    def cancel(number: int, frame: FrameType | None) -> None:
        subprocess.run(["scancel", job], check=False)
        print(f"accelerate launch: job {job} is cancelled", file=sys.stderr)
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, cancel) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _follow(job: str, log: Path) -> int:
    """Print the job's log as it grows until the job ends; its exit code."""
    position, waiting, first = 0, False, 0
    while True:
        state, code, reason = _state(job)
        position, text = _print_from(log, position)
        # The job's own code is the highest of all tasks, of those that were stopped for another one's failure too.
        for found in _TASK_FAILED.finditer(text):
            # A restart begins anew.
            first = 0 if found.group(1) is None else first or int(found.group(1))
        if state not in ALIVE:
            code = first or code
            if code or state != "COMPLETED":
                print(f"accelerate launch: job {job} ended as {state}, exit code {code}", file=sys.stderr)
            return code or (0 if state == "COMPLETED" else 1)
        if state == "PENDING" and not waiting and reason not in ("", "None"):
            waiting = True
            print(f"accelerate launch: job {job} waits: {reason}", file=sys.stderr)
        time.sleep(POLL)


def _print_from(log: Path, position: int) -> tuple[int, str]:
    """Print what the log has from a position on; the new position and the text."""
    if not log.exists():
        return position, ""
    with open(log, "rb") as file:
        file.seek(position)
        data = file.read()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
    return position + len(data), data.decode(errors="replace")


def _state(job: str) -> tuple[str, int, str]:
    """State, exit code and the reason of waiting of a job, as the controller knows it."""
    done = subprocess.run(["scontrol", "show", "job", job, "--oneliner"], capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"Slurm does not know job {job} any more: {done.stderr.strip()}")
    fields = dict(part.split("=", 1) for part in done.stdout.split() if "=" in part)
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    ended = int(code) or (128 + int(number) if number and int(number) else 0)
    return fields.get("JobState", "UNKNOWN"), ended, fields.get("Reason", "")

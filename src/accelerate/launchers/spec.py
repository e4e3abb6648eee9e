# SPDX-License-Identifier: Apache-2.0
"""What is launched, where, how many times and with which variables: pure data, from which each process follows."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..core import system
from ..core.errors import ConfigurationError, nearest

# Variables of a process that another starter may have left in this environment, and that would mislead ours.
FOREIGN = (
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)


@dataclass(frozen=True)
class Program:
    """What each process runs: a script, a module (`python -m`) or a program of its own."""

    name: str
    args: tuple[str, ...] = ()
    kind: str = "script"

    def argv(self, python: str | None = None) -> list[str]:
        python = python or sys.executable
        # Lines of several processes come out whole and in time only without a buffer.
        before = {"script": [python, "-u"], "module": [python, "-u", "-m"], "program": []}[self.kind]
        # Python would take a script whose name begins with a hyphen for an option.
        name = f"./{self.name}" if self.kind == "script" and self.name.startswith("-") else self.name
        return [*before, name, *self.args]

    def check(self) -> None:
        """ConfigurationError where there is no such script, module or program, or where it cannot be read."""
        if not self.name:
            raise ConfigurationError(f"the name of the {self.kind} is empty")
        if self.kind == "script" and not Path(self.name).exists():
            hint = "; a module is started with -m" if "." in self.name and not self.name.endswith(".py") else ""
            here = Path(self.name).parent
            near = nearest(Path(self.name).name, [path.name for path in here.glob("*.py")] if here.is_dir() else [])
            hint += f" (did you mean {here / near}?)" if near else ""
            raise ConfigurationError(f"there is no script {self.name!r} (from {Path.cwd()}){hint}")
        if self.kind == "script" and not os.access(self.name, os.R_OK):
            raise ConfigurationError(f"the script {self.name!r} cannot be read: no permission")
        if self.kind == "script" and Path(self.name).is_dir() and not (Path(self.name) / "__main__.py").is_file():
            raise ConfigurationError(f"{self.name!r} is a folder without a __main__.py: give a script in it")
        if self.kind == "program" and shutil.which(self.name) is None:
            raise ConfigurationError(f"there is no program {self.name!r} on the PATH")
        if self.kind == "module":
            self._check_module()

    def _check_module(self) -> None:
        top = self.name.partition(".")[0]
        if (Path.cwd() / top).exists() or (Path.cwd() / f"{top}.py").exists():
            return
        try:
            found = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise ConfigurationError(f"there is no module {self.name!r}; a script file is started without -m")


_HOST = re.compile(r"[A-Za-z0-9_:\[][\w.:%\[\]-]*")


def check_host(name: str, where: str) -> str:
    """A host's name or address that no program can take for an option or for several words."""
    if not _HOST.fullmatch(name):
        raise ConfigurationError(
            f"{where}: {name!r} is no name or address of a host: it begins with a letter or digit and holds only "
            "letters, digits and . : - _"
        )
    return name


def check_variable(name: str) -> str:
    """A variable's name that a shell can export."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ConfigurationError(f"{name!r} is no name of a variable: letters, digits and _ only, no digit first")
    return name


# What is beyond these is a slip of the hand.
MOST_PROCESSES = 65536
MOST_SECONDS = 1_000_000


@dataclass(frozen=True)
class ProcessSpec:
    """One process to be: its place in the run, what it runs, and the variables set for it (None removes one).

    cpus: the processors it is bound to; None binds it to none. starter: the program that this process is where it is
    no rank itself but starts them (mpirun, srun).
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    variables: Mapping[str, str | None]
    cpus: tuple[int, ...] | None = None
    starter: str = ""


@dataclass(frozen=True)
class Place:
    """Where a process stands: its ranks, its machine among the machines, and where rank 0 listens."""

    rank: int
    local_rank: int
    local_processes: int
    machine_rank: int
    machines: int
    address: str
    port: int


@dataclass(frozen=True)
class LaunchSpec:
    """A whole launch.

    num_processes counts all machines. variables are those every process gets. device is torch's device type.
    threads: CPU threads of each process, None leaves the environment's. stop_timeout: seconds that processes get
    between the request to stop and being killed.
    """

    program: Program
    num_processes: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str = "127.0.0.1"
    main_process_port: int = 0
    device: str = "cpu"
    threads: int | None = None
    cpu_affinity: bool = False
    variables: Mapping[str, str | None] = field(default_factory=dict)
    role: str = "default"
    tee: str = "0"
    log_dir: str | None = None
    error_file: str | None = None
    stop_timeout: float = 4.0
    quiet: bool = False
    max_restarts: int = 0
    monitor_interval: float = 0.1
    rdzv_backend: str = "static"
    rdzv_conf: str = ""
    rdzv_id: str = "none"
    nnodes: str = "1"
    hostfile: str | None = None
    main_process_ip_given: bool = False

    @property
    def local_processes(self) -> int:
        return self.num_processes // self.num_machines

    def process(self, local_rank: int, port: int, attempt: int = 0) -> ProcessSpec:
        """The process of a local rank on this machine, where rank 0 listens at `port` of machine 0."""
        rank = self.machine_rank * self.local_processes + local_rank
        place = Place(
            rank, local_rank, self.local_processes, self.machine_rank, self.num_machines, self.main_process_ip, port
        )
        variables = self.variables_at(place, attempt)
        return ProcessSpec(rank, local_rank, tuple(self.program.argv()), variables, self._cpus(local_rank))

    def variables_at(self, place: Place, attempt: int = 0) -> dict[str, str | None]:
        """All variables of the process at a place."""
        variables: dict[str, str | None] = dict.fromkeys(FOREIGN)
        variables.update(self.variables)
        if self.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.threads)
        variables.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(self.num_processes),
            LOCAL_RANK=str(place.local_rank),
            LOCAL_WORLD_SIZE=str(place.local_processes),
            GROUP_RANK=str(place.machine_rank),
            GROUP_WORLD_SIZE=str(place.machines),
            MASTER_ADDR=place.address,
            MASTER_PORT=str(place.port),
        )
        if self.max_restarts:
            variables.update(TORCHELASTIC_RESTART_COUNT=str(attempt), TORCHELASTIC_MAX_RESTARTS=str(self.max_restarts))
        return variables

    def _cpus(self, local_rank: int) -> tuple[int, ...] | None:
        # Beside an accelerator each process binds itself to the processors near its device, once it knows that.
        if not self.cpu_affinity or self.device != "cpu":
            return None
        return tuple(system.share_of_cpus(local_rank, self.local_processes))

    def tee_of(self, rank: int) -> int:
        """Which streams of a rank are marked on the console: 1 standard output, 2 standard error, 3 both."""
        if ":" not in self.tee:
            return int(self.tee)
        chosen = dict(part.split(":", 1) for part in self.tee.split(","))
        return int(chosen.get(str(rank), "0"))

    def rendezvous_settings(self) -> dict[str, str]:
        """The pairs of `rdzv_conf`, written key=value,key=value."""
        pairs = [part for part in self.rdzv_conf.split(",") if part.strip()]
        wrong = [part for part in pairs if "=" not in part]
        if wrong:
            raise ConfigurationError(f"rdzv_conf={self.rdzv_conf!r}: {wrong[0]!r} is not key=value")
        return {key.strip(): value.strip() for key, value in (part.split("=", 1) for part in pairs)}

    def check(self) -> None:
        """ConfigurationError for a launch that cannot be."""
        self.rendezvous_settings()
        if self.num_processes < 1:
            raise ConfigurationError(f"num_processes={self.num_processes}: at least 1 process is needed")
        if self.num_machines < 1:
            raise ConfigurationError(f"num_machines={self.num_machines}: at least 1 machine is needed")
        if not 0 <= self.machine_rank < self.num_machines:
            raise ConfigurationError(
                f"machine_rank={self.machine_rank} is out of range: with num_machines={self.num_machines} it is "
                f"0 to {self.num_machines - 1}"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts={self.max_restarts}: it cannot be less than 0")
        if self.local_processes > MOST_PROCESSES:
            raise ConfigurationError(
                f"num_processes={self.num_processes} is more than a machine can run (at most {MOST_PROCESSES} on each)"
            )
        if self.num_processes % self.num_machines:
            raise ConfigurationError(
                f"num_processes={self.num_processes} counts the processes of all machines together and must divide "
                f"by num_machines={self.num_machines}"
            )
        check_host(self.main_process_ip, f"main_process_ip={self.main_process_ip!r}")
        if not 0 <= self.main_process_port < 65536:
            raise ConfigurationError(f"main_process_port={self.main_process_port} is no port: ports are 1 to 65535")
        for name in ("monitor_interval", "stop_timeout"):
            if not 0 <= getattr(self, name) <= MOST_SECONDS:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be from 0 to {MOST_SECONDS} seconds")
        parts = [part.split(":", 1) for part in self.tee.split(",")] if ":" in self.tee else [["0", self.tee]]
        fine = all(len(part) == 2 and part[0].isdigit() and part[1] in ("0", "1", "2", "3") for part in parts)
        if not fine:
            raise ConfigurationError(f"tee={self.tee!r}: give 0, 1, 2 or 3, or one a rank as '0:3,1:2'")

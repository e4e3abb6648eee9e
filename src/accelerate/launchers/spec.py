# SPDX-License-Identifier: Apache-2.0
"""A launch as data: what runs, where, how many times and with which variables; each process follows from it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from ..core import system
from ..core.errors import ConfigurationError, suggestion

# Variables that another launcher may have left in this environment, which would be wrong for our processes.
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


class Program(NamedTuple):
    """What each process runs: a script, a module (`python -m`) or any other program."""

    name: str
    args: tuple[str, ...] = ()
    kind: str = "script"

    @classmethod
    def of(cls, args: argparse.Namespace) -> Program:
        """The program that the arguments of a launch select."""
        if args.module:
            kind = "module"
        elif args.no_python:
            kind = "program"
        else:
            kind = "script"
        return cls(args.training_script, tuple(args.training_script_args), kind)

    def argv(self, python: str | None = None) -> list[str]:
        """Return the command line of the program."""
        python = python or sys.executable
        # Unbuffered, so that lines of several processes appear complete and in time.
        before = {"script": [python, "-u"], "module": [python, "-u", "-m"], "program": []}[
            self.kind
        ]
        return [*before, *self.words]

    @property
    def words(self) -> list[str]:
        """Name and arguments. A script whose name begins with a hyphen is named so that it is not an option."""
        return [
            f"./{self.name}" if self.kind == "script" and self.name.startswith("-") else self.name,
            *self.args,
        ]

    def check(self) -> None:
        """ConfigurationError where the script, module or program does not exist, or cannot be read or compiled."""
        if not self.name:
            raise ConfigurationError(f"the name of the {self.kind} is empty")
        if self.kind == "script":
            self._check_script(Path(self.name))
        elif self.kind == "module":
            self._check_module()
        elif shutil.which(self.name) is None:
            hint = ""
            if Path(self.name).is_file():
                start = f"; start the file in this folder as ./{self.name}"
                if os.access(self.name, os.X_OK):
                    hint = start
                else:
                    hint = "; the file with this name is not executable"
            raise ConfigurationError(f"the program {self.name!r} is not on the PATH{hint}")

    def _check_script(self, path: Path) -> None:
        if not path.exists():
            if "." in self.name and path.suffix != ".py":
                hint = "; start a module with -m"
            else:
                hint = ""
            folder = path.parent
            if folder.is_dir():
                scripts = [other.name for other in folder.glob("*.py") if other.exists()]
            else:
                scripts = []
            near = suggestion(path.name, scripts, "{}")
            if near:
                hint += f" (did you mean {folder / near}?)"
            raise ConfigurationError(
                f"the script {self.name!r} does not exist (current folder: {Path.cwd()}){hint}"
            )
        if not os.access(path, os.R_OK):
            raise ConfigurationError(f"the script {self.name!r} cannot be read: no permission")
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise ConfigurationError(
                f"{self.name!r} is a folder without a __main__.py: name a script in it"
            )
        if path.suffix == ".py" and path.is_file():
            try:
                with warnings.catch_warnings(action="ignore"):
                    compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                # One message instead of one from each rank.
                report = "".join(traceback.format_exception_only(error)).rstrip()
                raise ConfigurationError(
                    f"the script {self.name!r} cannot be compiled:\n{report}"
                ) from None

    def _check_module(self) -> None:
        if self.name.endswith(".py") and Path(self.name).is_file():
            raise ConfigurationError(
                f"{self.name!r} is a script file: remove -m, or pass the module's name with -m"
            )
        # Only the outermost package: to find what is in it means to import it.
        if PathFinder.find_spec(self.name.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise ConfigurationError(
                f"the module {self.name!r} is neither in {Path.cwd()} nor on the import path; "
                "start a script file without -m"
            )


def check_host(name: str, where: str) -> str:
    """A host's name or address that no program can read as an option or as several words."""
    if not re.fullmatch(r"[A-Za-z0-9_:\[][\w.:%\[\]-]*", name):
        raise ConfigurationError(
            f"{where}: {name!r} is not a host name or address: it must start with a letter or "
            "digit and contain only letters, digits and . : - _"
        )
    return name


def check_variable(name: str) -> str:
    """A variable's name that a shell can export."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ConfigurationError(
            f"{name!r} is not a variable name: use only letters, digits and _, and do not start "
            "with a digit"
        )
    return name


# Numbers of `rdzv_conf`, under the names of torch's rendezvous, of which launches with fixed ranks use the first one.
# All in seconds but the number of attempts.
RENDEZVOUS_SETTINGS = {
    "join_timeout": 600,
    "last_call_timeout": 1,
    "close_timeout": 6,
    "heartbeat_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "read_timeout": 15,
}


class ProcessSpec(NamedTuple):
    """A process to start: its ranks, its command, and the variables set for it (None removes one).

    `cpus` are the processors it is bound to, if any. `starter` is the name of a program that starts the ranks (mpirun,
    srun), where the process is such a program and not a rank.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    variables: Mapping[str, str | None]
    cpus: tuple[int, ...] | None = None
    starter: str = ""


class Place(NamedTuple):
    """The place of a process: its ranks, its machine among the machines, and where rank 0 listens."""

    rank: int
    local_rank: int
    local_processes: int
    machine_rank: int
    machines: int
    address: str
    port: int


class LaunchSpec(NamedTuple):
    """A launch.

    `num_processes` counts the processes of all machines. Every process gets `variables`. `device` is torch's device
    type. `threads` is the number of CPU threads of each process; None leaves the environment's. `stop_timeout` is the
    number of seconds between the request to stop and SIGKILL. `in_place`: a single process may run in this one,
    because no caller waits for it to return. `alone`: a flag requests the single process. The fields with the name of
    an option hold its value.
    """

    program: Program
    config_file: str | None = None
    num_processes: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str = "127.0.0.1"
    main_process_port: int = 0
    device: str = "cpu"
    threads: int | None = None
    cpu_affinity: bool = False
    variables: Mapping[str, str | None] = types.MappingProxyType({})
    role: str = "default"
    tee: str = "0"
    log_dir: str | None = None
    error_file: str | None = None
    stop_timeout: float = 4.0
    stop_within: float | None = None
    quiet: bool = False
    progress_interval: float = 60.0
    max_restarts: int = 0
    monitor_interval: float = 0.1
    rdzv_backend: str = "static"
    rdzv_conf: str = ""
    rdzv_id: str = "none"
    nnodes: str = "1"
    hostfile: str | None = None
    main_process_ip_given: bool = False
    slurm_options: str = ""
    ray_address: str | None = None
    image: str | None = None
    deepspeed_hostfile: str | None = None
    deepspeed_multinode_launcher: str | None = None
    deepspeed_exclusion_filter: str | None = None
    deepspeed_inclusion_filter: str | None = None
    main_training_function: str = "main"
    downcast_bf16: bool = False
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    tpu_zone: str | None = None
    vm: Sequence[str] = ()
    env: Sequence[str] = ()
    requested_processes: int | None = None
    progress_requested: bool = False
    in_place: bool = False
    alone: bool = False

    @property
    def local_processes(self) -> int:
        """The number of processes of one machine."""
        return self.num_processes // self.num_machines

    def process(self, local_rank: int, port: int, attempt: int = 0) -> ProcessSpec:
        """The process of a local rank on this machine, where rank 0 listens at `port` of machine 0."""
        rank = self.machine_rank * self.local_processes + local_rank
        position = Place(
            rank,
            local_rank,
            self.local_processes,
            self.machine_rank,
            self.num_machines,
            self.main_process_ip,
            port,
        )
        variables = self.variables_at(position, attempt)
        return ProcessSpec(
            rank, local_rank, tuple(self.program.argv()), variables, self.cpus_of(local_rank)
        )

    def common_variables(self, attempt: int | None = None) -> dict[str, str | None]:
        """The variables of each process, whatever its rank; `attempt` counts restarts (None: it is set elsewhere)."""
        variables = dict(self.variables)
        if self.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.threads)
        if self.max_restarts and attempt is not None:
            variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        return variables

    def variables_at(self, place: Place, attempt: int = 0) -> dict[str, str | None]:
        """All variables of the process at a place."""
        variables: dict[str, str | None] = {
            **dict.fromkeys(FOREIGN),
            **self.common_variables(attempt),
        }
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
            variables["TORCHELASTIC_MAX_RESTARTS"] = str(self.max_restarts)
        return variables

    def cpus_of(self, local_rank: int) -> tuple[int, ...] | None:
        """The processors that a process on the CPU is bound to; None where it may use all."""
        # With an accelerator, each process later binds itself to the processors near its device.
        if not self.cpu_affinity or self.device != "cpu":
            return None
        return tuple(system.share_of_cpus(local_rank, self.local_processes))

    def tee_of(self, rank: int) -> int:
        """Which streams of a rank are marked on the console: 1 standard output, 2 standard error, 3 both."""
        if ":" not in self.tee:
            return int(self.tee)
        chosen = dict(part.split(":", 1) for part in self.tee.split(","))
        return int(chosen.get(str(rank), "0"))

    def launch_arguments(self, names: Sequence[str]) -> list[str]:
        """The arguments of an `accelerate launch` elsewhere: those of these options that were set, and the program."""
        defaults = LaunchSpec(self.program, num_processes=0, num_machines=0)
        values = {name: getattr(self, name) for name in names}
        changed = [
            f"--{name}={value}"
            for name, value in values.items()
            if value != getattr(defaults, name)
        ]
        kind = {"script": [], "module": ["-m"], "program": ["--no_python"]}[self.program.kind]
        return [*changed, *kind, *self.program.words]

    def rendezvous_settings(self) -> dict[str, str]:
        """The pairs of `rdzv_conf`, written key=value,key=value.

        ConfigurationError for one that the rendezvous of this launch does not know.
        """
        settings: dict[str, str] = {}
        names = (*RENDEZVOUS_SETTINGS, "is_host")
        for part in self.rdzv_conf.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if part.strip() and not equals:
                raise ConfigurationError(f"rdzv_conf={self.rdzv_conf!r}: {part!r} is not key=value")
            if name and name not in names and self.rdzv_backend in ("static", "c10d"):
                raise ConfigurationError(
                    f"rdzv_conf: unknown setting {name!r}{suggestion(name, names)}"
                )
            if name:
                settings[name] = value
        return settings

    @property
    def join_timeout(self) -> float:
        """Seconds to wait for other machines or for resources: `join_timeout` of `rdzv_conf`.

        Raises ConfigurationError for one that is not a number above 0, and for an unknown setting.
        """
        text = self.rendezvous_settings().get(
            "join_timeout", str(RENDEZVOUS_SETTINGS["join_timeout"])
        )
        if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
            raise ConfigurationError(
                f"rdzv_conf: join_timeout={text!r} is not a number of seconds above 0"
            )
        return float(text)

    def check(self) -> None:
        """ConfigurationError for an invalid launch."""
        self.rendezvous_settings()
        if not 0 <= self.machine_rank < self.num_machines:
            raise ConfigurationError(
                f"machine_rank={self.machine_rank} is out of range: with num_machines={self.num_machines} it is "
                f"0 to {self.num_machines - 1}"
            )
        if self.num_processes % self.num_machines:
            raise ConfigurationError(
                f"num_processes={self.num_processes} is the total over all machines and must be "
                f"divisible by num_machines={self.num_machines}"
            )
        check_host(self.main_process_ip, f"main_process_ip={self.main_process_ip!r}")
        if ":" in self.tee:
            entries = [part.split(":", 1) for part in self.tee.split(",")]
        else:
            entries = [["0", self.tee]]
        fine = all(
            len(part) == 2 and part[0].isdigit() and part[1] in ("0", "1", "2", "3")
            for part in entries
        )
        if not fine:
            raise ConfigurationError(
                f"tee={self.tee!r}: use 0, 1, 2 or 3, or one for each rank, as in '0:3,1:2'"
            )

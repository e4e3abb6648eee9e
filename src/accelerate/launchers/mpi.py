# SPDX-License-Identifier: Apache-2.0
"""Processes started by mpirun of Open MPI, MPICH, Intel MPI or MVAPICH, whose variables contain the ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ..core import env, system
from ..core.errors import ConfigurationError
from .base import AGENT, Launcher
from .ports import DEFAULT_PORT
from .spec import LaunchSpec, ProcessSpec, check_host
from .watched_process import watched

# Further variables that the other machines need.
CARRIED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "GLOO_SOCKET_IFNAME")


def find_mpirun() -> str:
    """The path of mpirun or mpiexec. ConfigurationError where neither is installed."""
    path = system.find_program("mpirun") or system.find_program("mpiexec")
    if path is None:
        raise ConfigurationError(
            "neither mpirun nor mpiexec is on the PATH: install Open MPI, MPICH or Intel MPI"
        )
    return path


def implementation(mpirun: str) -> str:
    """openmpi, intel, mvapich or mpich, from the output of --version."""
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=30
    ).stdout.lower()
    if any(name in version for name in ("open mpi", "open-rte", "openrte", "prrte")):
        return "openmpi"
    for name in ("intel", "mvapich"):
        if name in version:
            return name
    return "mpich"


def mpirun_command(
    processes: int,
    hostfile: str | None,
    variables: Mapping[str, str | None],
    per_host: int | None = None,
) -> list[str]:
    """The beginning of the command that starts `processes` processes with the variables set on every host."""
    mpirun = find_mpirun()
    values = {
        name: text for name, text in variables.items() if text is not None and name.isidentifier()
    }
    if implementation(mpirun) == "openmpi":
        command = [mpirun, "-n", str(processes), "--bind-to", "none"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if hostfile:
            command += ["--hostfile", hostfile]
        else:
            command.append("--oversubscribe")
        for name, text in values.items():
            command += ["-x", f"{name}={text}"]
        return command
    command = [mpirun, "-n", str(processes)]
    if hostfile:
        command += ["-f", hostfile]
    if per_host:
        command += ["-ppn", str(per_host)]
    for name, text in values.items():
        command += ["-genv", name, text]
    return command


def first_host(hostfile: str) -> str:
    """The first host of a host file of any of the implementations."""
    try:
        lines = Path(hostfile).expanduser().read_text().splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"mpirun_hostfile={hostfile!r} cannot be read: {error.strerror}"
        ) from None
    names = [line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip()]
    for name in names:
        check_host(name, f"mpirun_hostfile={hostfile!r}")
    if names:
        return names[0].split(":")[0]
    raise ConfigurationError(f"mpirun_hostfile={hostfile!r} does not contain any hosts")


class MpiLauncher(Launcher):
    """One mpirun, whose processes read their ranks from its variables."""

    name = "mpi"
    unused: tuple[str, ...] = (*AGENT, "rdzv_conf", "machine_rank")

    def __init__(self, spec: LaunchSpec) -> None:
        if spec.hostfile and not spec.main_process_ip_given:
            spec = spec._replace(main_process_ip=first_host(spec.hostfile))
        super().__init__(spec)
        self.reserves_port: bool = not spec.hostfile
        self.uses_this_machine: bool = not spec.hostfile

    def check(self) -> None:
        """Check what this engine requires."""
        find_mpirun()

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return the process of mpirun, which starts the ranks."""
        spec = self.spec
        variables: dict[str, str | None] = {}
        if spec.hostfile:
            variables |= {name: env.get(name) for name in CARRIED}
        variables["OMP_NUM_THREADS"] = "1"
        variables |= spec.common_variables(attempt)
        variables["MASTER_ADDR"] = spec.main_process_ip
        variables["MASTER_PORT"] = str(port or spec.main_process_port or DEFAULT_PORT)
        per_host = None
        if spec.num_machines > 1:
            per_host = spec.local_processes
        command = mpirun_command(spec.num_processes, spec.hostfile, variables, per_host)
        return [ProcessSpec(0, 0, (*command, *watched(spec.program.argv())), {}, starter="mpirun")]

# SPDX-License-Identifier: Apache-2.0
"""Processes started by mpirun: Open MPI, MPICH, Intel MPI, MVAPICH. Ranks come from their own variables."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..core import env
from ..core.errors import ConfigurationError
from .base import Launcher
from .ports import ReservedPort
from .spec import LaunchSpec, ProcessSpec, check_host
from .static import DEFAULT_PORT
from .watched_process import watched

# Variables that other machines need although this launch did not set them.
CARRIED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "GLOO_SOCKET_IFNAME")


def find_mpirun() -> str:
    """The path of mpirun or mpiexec. ConfigurationError where neither is installed."""
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise ConfigurationError("neither mpirun nor mpiexec is on the PATH: install Open MPI, MPICH or Intel MPI")
    return found


def implementation(mpirun: str) -> str:
    """openmpi, intel, mvapich or mpich, as the program says of itself."""
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout.lower()
    if "open mpi" in told or "open-rte" in told or "openrte" in told or "prrte" in told:
        return "openmpi"
    for name in ("intel", "mvapich"):
        if name in told:
            return name
    return "mpich"


def mpirun_command(
    processes: int, hostfile: str | None, variables: Mapping[str, str | None], per_host: int | None = None
) -> list[str]:
    """The beginning of the command that starts `processes` processes with the variables set on every host."""
    mpirun = find_mpirun()
    values = {name: text for name, text in variables.items() if text is not None and name.isidentifier()}
    if implementation(mpirun) == "openmpi":
        command = [mpirun, "-n", str(processes), "--bind-to", "none"]
        if os.name == "posix" and os.geteuid() == 0:
            command.append("--allow-run-as-root")
        command += ["--hostfile", hostfile] if hostfile else ["--oversubscribe"]
        for name, text in values.items():
            command += ["-x", f"{name}={text}"]
        return command
    command = [mpirun, "-n", str(processes)]
    command += ["-f", hostfile] if hostfile else []
    command += ["-ppn", str(per_host)] if per_host else []
    for name, text in values.items():
        command += ["-genv", name, text]
    return command


def first_host(hostfile: str) -> str:
    """The first host of a host file of any of the implementations."""
    try:
        lines = Path(hostfile).expanduser().read_text().splitlines()
    except OSError as error:
        raise ConfigurationError(f"mpirun_hostfile={hostfile!r} cannot be read: {error.strerror}") from None
    names = [line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip()]
    for name in names:
        check_host(name, f"mpirun_hostfile={hostfile!r}")
    if names:
        return names[0].split(":")[0]
    raise ConfigurationError(f"mpirun_hostfile={hostfile!r} names no host")


class MpiLauncher(Launcher):
    """One mpirun, whose processes read their ranks from its variables."""

    name = "mpi"

    def __init__(self, spec: LaunchSpec) -> None:
        if spec.hostfile and not spec.main_process_ip_given:
            spec = replace(spec, main_process_ip=first_host(spec.hostfile))
        super().__init__(spec)

    def check(self) -> None:
        super().check()
        find_mpirun()

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        spec = self.spec
        variables = dict(spec.variables)
        variables["MASTER_ADDR"] = spec.main_process_ip
        variables["MASTER_PORT"] = str(port or spec.main_process_port or DEFAULT_PORT)
        variables["OMP_NUM_THREADS"] = str(spec.threads or 1)
        if spec.max_restarts:
            variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        carried = {name: env.get(name) for name in CARRIED} if spec.hostfile else {}
        per_host = spec.local_processes if spec.num_machines > 1 else None
        command = mpirun_command(spec.num_processes, spec.hostfile, {**carried, **variables}, per_host)
        return [ProcessSpec(0, 0, (*command, *watched(spec.program.argv())), {}, starter="mpirun")]

    def run(self) -> int:
        from .supervisor import Supervisor, with_restarts

        def attempt(number: int) -> Supervisor:
            supervisor = Supervisor(self.spec)
            if self.spec.hostfile:
                supervisor.run(self.processes(attempt=number))
                return supervisor
            with ReservedPort(self.spec.main_process_port) as port:
                supervisor.run(self.processes(port.number, number))
            return supervisor

        return with_restarts(self.spec, attempt)

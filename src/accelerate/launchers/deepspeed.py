# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own starter: several machines of a host file, reached through pdsh, Open MPI, Slurm and the like."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from ..core import env, system
from ..core.errors import ConfigurationError
from ..core.files import atomic_write
from .base import AGENT, Launcher
from .ports import DEFAULT_PORT
from .spec import LaunchSpec, ProcessSpec, Program, check_host

# The file from which DeepSpeed's starter takes the variables of the processes it starts elsewhere.
ENVIRONMENT_FILE = ".deepspeed_env"
_INSTEAD = "use --deepspeed_multinode_launcher standard, or put the text in a file"


def find_starter() -> str:
    """The path of DeepSpeed's starter. ConfigurationError where it is not installed."""
    path = system.find_program("deepspeed")
    if path is None:
        raise ConfigurationError(
            "the deepspeed program is neither on the PATH nor in "
            f"{os.path.dirname(sys.executable)}: pip install deepspeed"
        )
    return path


def starter_command(
    options: LaunchSpec | argparse.Namespace,
    program: Program,
    local_processes: int,
    address: str | None,
    port: int | None,
) -> list[str]:
    """The command line of DeepSpeed's starter."""
    command = [find_starter(), "--hostfile", str(options.deepspeed_hostfile), "--no_local_rank"]
    command += ["--launcher", options.deepspeed_multinode_launcher or "pdsh"]
    if options.deepspeed_exclusion_filter is not None:
        command += ["--exclude", options.deepspeed_exclusion_filter]
    elif options.deepspeed_inclusion_filter is not None:
        command += ["--include", options.deepspeed_inclusion_filter]
    else:
        command += ["--num_gpus", str(local_processes)]
    if address:
        command += ["--master_addr", address]
    command += ["--master_port", str(port or DEFAULT_PORT)]
    flag = {"script": [], "module": ["--module"], "program": ["--no_python"]}[program.kind]
    return [*command, *flag, program.name, *program.args]


class DeepSpeedLauncher(Launcher):
    """Hands the run to DeepSpeed's starter; the variables go through the file that it reads."""

    name = "deepspeed"
    uses_this_machine = False
    reserves_port = False
    unused: tuple[str, ...] = (*AGENT, "rdzv_conf", "machine_rank", "mpirun_hostfile")

    def check(self) -> None:
        """Check what this engine requires."""
        hostfile = self.spec.deepspeed_hostfile
        if hostfile is None:
            raise ConfigurationError(
                "the deepspeed engine needs --deepspeed_hostfile, the file with the hosts on "
                "which DeepSpeed's launcher starts the processes. On this machine alone, use "
                "--use_deepspeed without --engine"
            )
        if not Path(hostfile).is_file():
            raise ConfigurationError(f"deepspeed_hostfile={hostfile!r} does not exist")
        for line in Path(hostfile).read_text().splitlines():
            words = line.split("#")[0].split()
            if words:
                check_host(words[0], f"deepspeed_hostfile={hostfile!r}")
        if self.spec.deepspeed_multinode_launcher in (None, "pdsh") and self.spec.num_machines > 1:
            # Shells on the other machines read them; DeepSpeed puts double quotes around words with a space.
            for word in (self.spec.program.name, *self.spec.program.args):
                if re.search(
                    r"[$`\\!\n]|%[hun%]" if " " in word else r"[^\w@%+=:,./~^-]|%[hun%]|^$", word
                ):
                    raise ConfigurationError(
                        f"DeepSpeed's pdsh launcher does not pass on {word!r} unchanged: {_INSTEAD}"
                    )
            for name, text in self.spec.variables.items():
                if re.search(r'["$`\\!]|%[hun%]', text or ""):
                    raise ConfigurationError(
                        f"DeepSpeed's pdsh launcher does not pass on {name}={text!r}: {_INSTEAD}"
                    )
        find_starter()

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return the process of DeepSpeed's launcher."""
        spec = self.spec
        if spec.main_process_ip_given:
            address = spec.main_process_ip
        else:
            address = None
        command = starter_command(
            spec, spec.program, spec.local_processes, address, spec.main_process_port
        )
        variables = {**spec.common_variables(), "PYTHONPATH": python_path()}
        return [ProcessSpec(0, 0, tuple(command), variables, starter="deepspeed")]

    def run(self) -> int:
        """Run DeepSpeed's launcher. Returns the exit code."""
        (process,) = self.processes()
        # The file has no way to write an empty value.
        values = {name: text for name, text in process.variables.items() if text}
        with atomic_write(ENVIRONMENT_FILE, "w") as file:
            file.writelines(env.convert_dict_to_env_variables(values))
        return super().run()


def python_path() -> str:
    """The search path for modules, this folder included: the processes elsewhere start in another one."""
    return os.pathsep.join(part for part in (env.get("PYTHONPATH"), os.path.abspath(".")) if part)

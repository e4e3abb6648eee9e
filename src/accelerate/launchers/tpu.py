# SPDX-License-Identifier: Apache-2.0
"""TPU cores: torch_xla runs the script's main function on each core; on a pod, gcloud does so on each worker."""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from .base import AGENT, SUPERVISION, Launcher
from .notebook import PrepareForLaunch
from .spec import LaunchSpec, ProcessSpec, check_host, check_variable

# Holds float32 as bfloat16 on the TPU.
DOWNCAST = "XLA_DOWNCAST_BF16"


class OneCore(PrepareForLaunch):
    """The function on one core. `cores`: the requested number; torch_xla itself uses all cores or one."""

    def __init__(self, function: Callable[..., Any], cores: int | None) -> None:
        super().__init__(function, "XLA")
        self.cores = cores

    def __call__(self, index: int, *args: Any) -> Any:
        """Check the number of cores, and run the function on this core."""
        import torch_xla.runtime as runtime

        if self.cores not in (None, 1, runtime.world_size()):
            raise ConfigurationError(
                f"num_processes={self.cores}: this TPU has {runtime.world_size()} cores, and "
                "torch_xla starts a process on each of them or on 1"
            )
        return super().__call__(index, *args)


class TpuLauncher(Launcher):
    """Each core runs the script's `main_training_function`."""

    name = "tpu"
    uses_this_machine = False
    unused: tuple[str, ...] = (
        *AGENT, *SUPERVISION, "rdzv_conf", "machine_rank", "num_cpu_threads_per_process", "mpirun_hostfile",
    )  # fmt: skip

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(
            spec._replace(variables={**spec.variables, DOWNCAST: "1"})
            if spec.downcast_bf16
            else spec
        )

    @classmethod
    def create(cls, spec: LaunchSpec) -> Launcher:
        """The launcher of a launch: of this machine's cores, or of a pod."""
        if spec.tpu_use_cluster:
            return PodLauncher(spec)
        return cls(spec)

    def check(self) -> None:
        """Check that the program has a function to run, and that torch_xla is here where it runs here."""
        if self.spec.program.kind == "program":
            raise ConfigurationError(
                "--tpu runs a function of a script or module: --no_python cannot be used with it"
            )
        if not self.spec.tpu_use_cluster and not is_available("torch_xla"):
            raise ConfigurationError(
                "--tpu needs torch_xla, which is not installed: pip install torch_xla[tpu]"
            )

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """This process, from which torch_xla starts the others."""
        return [ProcessSpec(0, 0, tuple(self.spec.program.argv()), self.spec.variables)]

    def dry_run(self) -> str:
        """Return the variables and the call of torch_xla that `run` would make."""
        spec = self.spec
        call = f"torch_xla.launch({spec.main_training_function}, debug_single_process={spec.requested_processes == 1})"
        return f"{super().dry_run()}\n# with the script imported as a module, {call} in place of running it"

    def run(self) -> int:
        """Run the function on each core. Returns 0."""
        import torch_xla

        env.publish(self.spec.variables)
        cores = self.spec.requested_processes
        torch_xla.launch(OneCore(self._main(), cores), args=(), debug_single_process=cores == 1)
        return 0

    def _main(self) -> Callable[..., Any]:
        """The script's function, with the script imported as a module: the processes find it by its name."""
        program, function = self.spec.program, self.spec.main_training_function
        name = program.name
        if program.kind == "script":
            path = Path(name)
            sys.path.insert(0, str(path.parent.resolve()))
            name = path.stem
        sys.argv[:] = [program.name, *program.args]
        module = importlib.import_module(name)
        if not hasattr(module, function):
            raise ConfigurationError(
                f"{program.name} does not have a function {function!r}: name the function to run "
                "with --main_training_function"
            )
        main: Callable[..., Any] = getattr(module, function)
        return main


class PodLauncher(TpuLauncher):
    """One gcloud for each TPU VM, which runs `accelerate launch --tpu` on all its workers, in this folder."""

    reserves_port = False
    dry_run = Launcher.dry_run
    run = Launcher.run

    def check(self) -> None:
        """Check the names of the pods, and that gcloud is here."""
        super().check()
        if not self.spec.vm:
            raise ConfigurationError(
                "--tpu_cluster: the pod is missing: add --vm, or set tpu_name in the "
                "configuration file"
            )
        if not self.spec.tpu_zone:
            raise ConfigurationError(
                "--tpu_cluster: the zone is missing: set tpu_zone in the configuration file"
            )
        for name in (*self.spec.vm, str(self.spec.tpu_zone)):
            check_host(name, "--tpu_cluster")
        for text in self.spec.env:
            if "=" not in text:
                raise ConfigurationError(f"--env {text}: use NAME=VALUE")
            check_variable(text.partition("=")[0])
        if shutil.which("gcloud") is None:
            raise ConfigurationError(
                "--tpu_cluster: gcloud is not on the PATH: install the Google Cloud CLI"
            )

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return one gcloud process for each TPU VM."""
        options = ("--command", self._on_worker(), "--worker", "all")
        ssh, zone = ("gcloud", "compute", "tpus", "tpu-vm", "ssh"), str(self.spec.tpu_zone)
        return [
            ProcessSpec(
                number, number, (*ssh, name, "--zone", zone, *options), {}, starter="gcloud"
            )
            for number, name in enumerate(self.spec.vm)
        ]

    def _on_worker(self) -> str:
        """The command line of each worker's shell."""
        spec = self.spec
        variables = [
            f"{name}={text}" for name, text in sorted(spec.variables.items()) if text is not None
        ]
        command = [
            *(["sudo"] if spec.tpu_use_sudo else []), "env", *variables, *spec.env,
            "python3", "-m", "accelerate.commands.launch", "--tpu", "--no_tpu_cluster",
            *([] if spec.requested_processes is None else [f"--num_processes={spec.requested_processes}"]),
            *spec.launch_arguments(("main_training_function",)),
        ]  # fmt: skip
        return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(command)}"

# SPDX-License-Identifier: Apache-2.0
"""TPU cores: torch_xla runs the script's main function on each core; on a pod, gcloud does so on each worker."""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.launch_settings import Settings
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
        if self.cores not in (None, 1):
            import torch_xla.runtime as runtime

            present = runtime.world_size()
            if present != self.cores:
                raise ConfigurationError(
                    f"num_processes={self.cores}: this TPU has {present} cores, and torch_xla starts a process on "
                    "each of them, or on 1"
                )
        return super().__call__(index, *args)


class TpuLauncher(Launcher):
    """`function`: name of the script's function that each core runs. `cores`: the requested number, None for all."""

    name = "tpu"
    uses_this_machine = False
    unused: tuple[str, ...] = (
        *AGENT, *SUPERVISION, "rdzv_conf", "machine_rank", "num_cpu_threads_per_process", "mpirun_hostfile",
    )  # fmt: skip

    def __init__(self, spec: LaunchSpec, function: str, cores: int | None = None, downcast: bool = False) -> None:
        super().__init__(spec._replace(variables={**spec.variables, DOWNCAST: "1"}) if downcast else spec)
        self.function = function
        self.cores = cores

    @classmethod
    def create(cls, spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
        """The launcher for the settings of a launch: of this machine's cores, or of the pod that they name."""
        function, requested = settings["main_training_function"] or "main", settings["num_processes"]
        # Files of the API hold -1 for "not chosen".
        cores = None if requested in (None, "all", -1) else int(requested)
        if not settings["tpu_use_cluster"]:
            return cls(spec, function, cores, settings["downcast_bf16"])
        kept = settings.file.data if settings.file else {}
        names = settings["vm"] or ([kept["tpu_name"]] if kept.get("tpu_name") else [])
        pod = Pod(tuple(names), kept.get("tpu_zone"), tuple(settings["env"] or ()), bool(settings["tpu_use_sudo"]))
        return PodLauncher(spec, function, pod, cores, settings["downcast_bf16"])

    def check(self) -> None:
        """Check before anything starts.

        Raises:
            ConfigurationError: this launcher cannot run the launch.
        """
        super().check()
        self._check_presence()
        if self.spec.program.kind == "program":
            raise ConfigurationError("--tpu runs a function of a script or module: --no_python cannot be used with it")

    def _check_presence(self) -> None:
        if not is_available("torch_xla"):
            raise ConfigurationError("--tpu needs torch_xla, which is not installed: pip install torch_xla[tpu]")

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """This process, from which torch_xla starts the others."""
        return [ProcessSpec(0, 0, tuple(self.spec.program.argv()), self.spec.variables)]

    def dry_run(self) -> str:
        """Return the variables and the call of torch_xla that `run` would make."""
        call = f"torch_xla.launch({self.function}, debug_single_process={self.cores == 1})"
        return f"{super().dry_run()}\n# with the script imported as a module, {call} in place of running it"

    def run(self) -> int:
        """Run the function on each core. Returns 0."""
        import torch_xla

        env.publish(self.spec.variables)
        function = OneCore(self._main(), self.cores)
        torch_xla.launch(function, args=(), debug_single_process=self.cores == 1)
        return 0

    def _main(self) -> Callable[..., Any]:
        """The script's function, with the script imported as a module: the processes find it by its name."""
        program = self.spec.program
        name = program.name
        if program.kind == "script":
            path = Path(name)
            sys.path.insert(0, str(path.parent.resolve()))
            name = path.stem
        sys.argv[:] = [program.name, *program.args]
        module = importlib.import_module(name)
        if not hasattr(module, self.function):
            raise ConfigurationError(
                f"{program.name} has no function {self.function!r}: name the one to run with --main_training_function"
            )
        main: Callable[..., Any] = getattr(module, self.function)
        return main


@dataclass(frozen=True)
class Pod:
    """Which TPU VMs, and how the script is started on their workers.

    names: TPU VMs, each with all its workers. variables: NAME=VALUE for the workers. sudo: start it as root.
    """

    names: tuple[str, ...]
    zone: str | None
    variables: tuple[str, ...] = ()
    sudo: bool = False


class PodLauncher(TpuLauncher):
    """One gcloud for each TPU VM, which runs `accelerate launch --tpu` on all its workers, in this folder."""

    def __init__(
        self, spec: LaunchSpec, function: str, pod: Pod, cores: int | None = None, downcast: bool = False
    ) -> None:
        super().__init__(spec, function, cores, downcast)
        self.pod = pod

    def _check_presence(self) -> None:
        if not self.pod.names:
            raise ConfigurationError("--tpu_cluster: no pod: give --vm, or write tpu_name into the configuration file")
        if not self.pod.zone:
            raise ConfigurationError("--tpu_cluster: no zone: write tpu_zone into the configuration file")
        for name in (*self.pod.names, str(self.pod.zone)):
            check_host(name, "--tpu_cluster")
        for text in self.pod.variables:
            if "=" in text.lstrip("="):
                check_variable(text.partition("=")[0])
        wrong = [text for text in self.pod.variables if "=" not in text.lstrip("=")]
        if wrong:
            raise ConfigurationError(f"--env {wrong[0]}: give NAME=VALUE")
        if shutil.which("gcloud") is None:
            raise ConfigurationError("--tpu_cluster: gcloud is not on the PATH: install the Google Cloud CLI")

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return one gcloud process for each TPU VM."""
        options = ("--command", self._on_worker(), "--worker", "all")
        return [
            ProcessSpec(
                number,
                number,
                ("gcloud", "compute", "tpus", "tpu-vm", "ssh", name, "--zone", str(self.pod.zone), *options),
                {},
                starter="gcloud",
            )
            for number, name in enumerate(self.pod.names)
        ]

    def _on_worker(self) -> str:
        """The command line of each worker's shell."""
        program = self.spec.program
        variables = [f"{name}={text}" for name, text in sorted(self.spec.variables.items()) if text is not None]
        cores = [] if self.cores is None else ["--num_processes", str(self.cores)]
        module = ["-m"] if program.kind == "module" else []
        command = [
            *(["sudo"] if self.pod.sudo else []), "env", *variables, *self.pod.variables,
            "python3", "-m", "accelerate.commands.launch", "--tpu", "--no_tpu_cluster",
            "--main_training_function", self.function, *cores, *module, program.name, *program.args,
        ]  # fmt: skip
        return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(command)}"

    def dry_run(self) -> str:
        """What `run` would start: the command for each TPU VM."""
        return Launcher.dry_run(self)

    def run(self) -> int:
        """Run the command on all workers. Returns the exit code."""
        from .supervisor import supervise

        return supervise(self.spec, self.processes()).code

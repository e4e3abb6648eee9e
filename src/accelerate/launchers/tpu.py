# SPDX-License-Identifier: Apache-2.0
"""TPU cores of this machine: torch_xla starts the script's main function once a core."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

from ..core import env
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from .base import Launcher
from .notebook import PrepareForLaunch
from .spec import LaunchSpec


class TpuLauncher(Launcher):
    """`function`: name of the script's function that each core runs. `pod`: several machines were asked for."""

    name = "tpu"

    def __init__(self, spec: LaunchSpec, function: str, pod: bool = False, downcast: bool = False) -> None:
        super().__init__(
            spec if not downcast else replace(spec, variables={**spec.variables, "XLA_DOWNCAST_BF16": "1"})
        )
        self.function = function
        self.pod = pod

    def check(self) -> None:
        super().check()
        if not is_available("torch_xla"):
            raise ConfigurationError("--tpu needs torch_xla, which is not installed: pip install torch_xla[tpu]")
        if self.pod:
            raise ConfigurationError("--tpu_cluster: pods are started with gcloud on each worker, not from here")
        if self.spec.program.kind == "program":
            raise ConfigurationError("--tpu runs a function of a script or module: --no_python cannot be used with it")

    def run(self) -> int:
        import torch_xla

        program = self.spec.program
        env.publish(self.spec.variables)
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
        torch_xla.launch(PrepareForLaunch(getattr(module, self.function), "XLA"), args=())
        return 0

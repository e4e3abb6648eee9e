# SPDX-License-Identifier: Apache-2.0
"""The choice of the launcher that a launch needs."""

from __future__ import annotations

import importlib

from ..config.launch_settings import Settings
from ..core.errors import ConfigurationError
from ..core.options import LAUNCHERS
from .base import Launcher
from .spec import LaunchSpec


def launcher_class(engine: str) -> type[Launcher]:
    """The launcher of an engine."""
    module, name = LAUNCHERS[engine]
    kind: type[Launcher] = getattr(importlib.import_module(f".{module}", __package__), name)
    return kind


def choose(spec: LaunchSpec, settings: Settings) -> Launcher:
    """The launcher that the settings select or imply, checked."""
    engine = settings["engine"]
    if engine == "auto":
        engine = implied(spec, settings)
    if engine == "local" and spec.num_machines > 1:
        raise ConfigurationError(
            f"{settings.shown('engine')} is one machine, {settings.shown('num_machines')} is not"
        )
    if spec.nnodes != str(spec.num_machines) and engine != "elastic":
        raise ConfigurationError(
            f"{settings.shown('nnodes')} is a range of machines: only the elastic engine has it"
        )
    launcher = launcher_class(engine).create(spec)
    launcher.check()
    return launcher


def implied(spec: LaunchSpec, settings: Settings) -> str:
    """The engine for settings that name none."""
    if settings["tpu"]:
        return "tpu"
    if settings["mpirun_hostfile"]:
        return "mpi"
    if settings["rdzv_backend"] != "static" or spec.nnodes != str(spec.num_machines):
        return "elastic"
    if spec.num_machines == 1:
        return "local"
    if settings["use_deepspeed"] and settings["deepspeed_hostfile"]:
        if settings["deepspeed_multinode_launcher"] == "standard":
            return "static"
        return "deepspeed"
    return "static"

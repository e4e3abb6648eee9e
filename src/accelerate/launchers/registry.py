# SPDX-License-Identifier: Apache-2.0
"""The launchers, one row each, and the choice of the one that a launch needs."""

from __future__ import annotations

from collections.abc import Callable

from ..config.launch_settings import Settings
from ..core.errors import ConfigurationError
from ..core.options import options
from .base import Launcher
from .spec import LaunchSpec

# Each imports its launcher only when that is chosen. The last argument: a single process may run in this one.
Maker = Callable[[LaunchSpec, Settings, bool], Launcher]


def _local(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .local import LocalLauncher

    return LocalLauncher(spec, in_place)


def _static(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .static import StaticLauncher

    return StaticLauncher(spec)


def _elastic(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .elastic import ElasticLauncher

    return ElasticLauncher(spec)


def _mpi(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .mpi import MpiLauncher

    return MpiLauncher(spec)


def _deepspeed(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .deepspeed import DeepSpeedLauncher, Hosts

    hosts = Hosts(
        settings["deepspeed_hostfile"],
        settings["deepspeed_multinode_launcher"] or "pdsh",
        settings["deepspeed_exclusion_filter"],
        settings["deepspeed_inclusion_filter"],
    )
    return DeepSpeedLauncher(spec, hosts)


def _tpu(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .tpu import Pod, PodLauncher, TpuLauncher

    function = settings["main_training_function"] or "main"
    requested = settings["num_processes"]
    # Files of the API hold -1 for "not chosen".
    cores = None if requested in (None, "all", -1) else int(requested)
    if settings["tpu_use_cluster"]:
        kept = settings.file.data if settings.file else {}
        names = settings["vm"] or ([kept["tpu_name"]] if kept.get("tpu_name") else [])
        pod = Pod(tuple(names), kept.get("tpu_zone"), tuple(settings["env"] or ()), bool(settings["tpu_use_sudo"]))
        return PodLauncher(spec, function, pod, cores, settings["downcast_bf16"])
    return TpuLauncher(spec, function, cores, settings["downcast_bf16"])


def _slurm(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .slurm import SlurmLauncher

    return SlurmLauncher(spec, settings["slurm_options"])


def _ray(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .ray import RayLauncher

    return RayLauncher(spec, settings["ray_address"])


def _kubernetes(spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
    from .kubernetes import KubernetesLauncher

    return KubernetesLauncher(spec, settings["image"])


ENGINES: dict[str, Maker] = {
    "local": _local,
    "static": _static,
    "elastic": _elastic,
    "mpi": _mpi,
    "deepspeed": _deepspeed,
    "tpu": _tpu,
    "slurm": _slurm,
    "ray": _ray,
    "kubernetes": _kubernetes,
}


_AGENT = ("monitor_interval", "rdzv_id", "role")
_RUN = ("tee", "log_dir", "error_file", "stop_timeout", "max_restarts")
# Engine -> the options that only other engines use.
UNUSED: dict[str, tuple[str, ...]] = {
    "local": (*_AGENT, "rdzv_conf", "machine_rank", "mpirun_hostfile"),
    "static": (*_AGENT, "mpirun_hostfile"),
    "elastic": ("mpirun_hostfile",),
    "mpi": (*_AGENT, "rdzv_conf", "machine_rank"),
    "deepspeed": (*_AGENT, "rdzv_conf", "machine_rank", "max_restarts", "mpirun_hostfile"),
    "tpu": (*_AGENT, *_RUN, "rdzv_conf", "machine_rank", "num_cpu_threads_per_process", "mpirun_hostfile"),
    "slurm": (*_AGENT, "rdzv_conf", "machine_rank", "tee", "mpirun_hostfile"),
    "ray": (*_AGENT, "mpirun_hostfile"),
    "kubernetes": ("monitor_interval", "rdzv_id", "mpirun_hostfile"),
}


def unused_options(engine: str, settings: Settings) -> list[str]:
    """A line for the options that were set and that the engine does not use; empty where there is none."""
    found = [
        f"{name} ({settings.origin(name)})"
        for name in UNUSED[engine]
        if settings.chosen(name) and settings[name] not in (None, options()[name].default, 0)
    ]
    return [f"{', '.join(found)}: no effect with the engine {engine}"] if found else []


def choose(spec: LaunchSpec, settings: Settings, in_place: bool = False) -> Launcher:
    """The launcher that the settings select or imply, checked."""
    engine = settings["engine"]
    if engine == "auto":
        engine = implied(spec, settings)
    if engine == "local" and spec.num_machines > 1:
        raise ConfigurationError(f"{settings.shown('engine')} is one machine, {settings.shown('num_machines')} is not")
    if spec.nnodes != str(spec.num_machines) and engine != "elastic":
        raise ConfigurationError(f"{settings.shown('nnodes')} is a range of machines: only the elastic engine has it")
    launcher = ENGINES[engine](spec, settings, in_place)
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
        return "static" if settings["deepspeed_multinode_launcher"] == "standard" else "deepspeed"
    return "static"

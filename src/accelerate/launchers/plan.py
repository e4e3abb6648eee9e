# SPDX-License-Identifier: Apache-2.0
"""From the settings of a launch and what the machine has to a LaunchSpec; sensible values where none was given."""

from __future__ import annotations

from typing import Any

from ..config.launch_settings import Settings
from ..core import system
from ..core.errors import ConfigurationError
from .registry import launcher_class
from .spec import LaunchSpec, Program
from .variables import variables


def plan(settings: Settings, program: Program, in_place: bool = False) -> LaunchSpec:
    """The requested launch. ConfigurationError if this machine cannot run it."""
    present = system.accelerators()
    remote = settings["engine"] != "auto" and launcher_class(settings["engine"]).remote
    if remote:
        device, count = _device_elsewhere(settings)
    else:
        device, count = _device(settings, present)
    machines, nnodes = _machines(settings)
    processes = _processes(settings, count, machines)
    shared = variables(settings)
    if device != "cpu" and _gpu_ids(settings) and present.visible:
        shared[present.visible] = settings["gpu_ids"]
    spec = LaunchSpec(
        program=program,
        num_processes=processes,
        num_machines=machines,
        device=device,
        threads=_threads(settings, 1 if remote else processes // machines),
        cpu_affinity=settings["enable_cpu_affinity"],
        variables=shared,
        nnodes=nnodes,
        hostfile=settings["mpirun_hostfile"],
        main_process_ip_given=settings["main_process_ip"] is not None,
        requested_processes=_requested(settings),
        progress_requested=settings.chosen("progress_interval"),
        in_place=in_place,
        alone=processes == 1 and settings.origin("num_processes").startswith("flag"),
        **_same_fields(settings),
    )
    spec.check()
    if settings["engine"] != "kubernetes":
        # A container has its own file system.
        program.check()
    if not remote:
        _check_devices(settings, spec, count)
    return spec


def _same_fields(settings: Settings) -> dict[str, Any]:
    """The fields of a LaunchSpec that are options of the same name; an option that is not given leaves the default."""
    names = set(LaunchSpec._fields) & set(settings) - {"num_processes", "num_machines", "nnodes"}
    found = {name: settings[name] for name in names if settings[name] is not None}
    # These have a key in files and no option.
    kept = settings.file.data if settings.file else {}
    if kept.get("tpu_name"):
        found.setdefault("vm", [kept["tpu_name"]])
    return {**found, "tpu_zone": kept.get("tpu_zone")}


def _requested(settings: Settings) -> int | None:
    """The number of processes that was requested; None where it follows from the devices."""
    # Files of the API hold -1 for "not chosen".
    requested = settings["num_processes"]
    return None if requested in (None, "all", -1) else int(requested)


def _device_elsewhere(settings: Settings) -> tuple[str, int]:
    if _requested(settings) is None:
        raise ConfigurationError(
            f"engine={settings['engine']}: the processes run elsewhere, where this machine cannot count devices: give "
            "--num_processes"
        )
    if settings["cpu"]:
        return "cpu", 0
    # A Ray cluster reports its devices itself.
    kind = "auto" if settings["engine"] == "ray" and not settings["multi_gpu"] else "cuda"
    return kind, int(settings["num_processes"])


def _device(settings: Settings, present: system.Accelerators) -> tuple[str, int]:
    """The device type to run on, and how many of it may be used."""
    if settings["cpu"]:
        if (
            _gpu_ids(settings)
            and settings.origin("cpu") == "flag --cpu"
            and settings.origin("gpu_ids") == "flag --gpu_ids"
        ):
            raise ConfigurationError(
                "cpu (flag --cpu) and gpu_ids (flag --gpu_ids) contradict each other: give only one"
            )
        return "cpu", 0
    if settings["multi_gpu"] and not present.number:
        raise ConfigurationError(
            f"{settings.shown('multi_gpu')}: this machine has no accelerator that the installed torch "
            f"({system.torch_build().get('version', 'none')}) can use. Give --cpu to run on the CPU."
        )
    ids = _gpu_ids(settings)
    if ids and not present.number:
        raise ConfigurationError(
            f"{settings.shown('gpu_ids')}: this machine has no accelerator. Leave it out, or give --cpu."
        )
    if not ids:
        return present.kind, present.number
    absent = [item for item in ids if item.isdigit() and int(item) >= present.number]
    if absent:
        raise ConfigurationError(
            f"{settings.shown('gpu_ids')}: there is no device {', '.join(absent)}; this machine has {present.number} "
            f"({present.kind} 0 to {present.number - 1})"
        )
    return present.kind, len(ids)


def _machines(settings: Settings) -> tuple[int, str]:
    """The number of machines, the most of a range, and the range as torch's agent writes it."""
    text = settings["nnodes"]
    if text is None:
        machines = 1 if settings["num_machines"] is None else settings["num_machines"]
        return machines, str(machines)
    least, colon, most = text.partition(":")
    if not least.isdigit() or (colon and not most.isdigit()) or not 1 <= int(least) <= int(most or least):
        raise ConfigurationError(f"{settings.shown('nnodes')}: give a number of machines or a range as 1:4")
    if settings["num_machines"] is not None and settings["num_machines"] != int(most or least):
        raise ConfigurationError(
            f"{settings.shown('nnodes')} and {settings.shown('num_machines')} contradict each other: give only one"
        )
    return int(most or least), text if colon and least != most else least


def _gpu_ids(settings: Settings) -> list[str]:
    text = settings["gpu_ids"]
    if text is None or text.strip().lower() == "all":
        return []
    return [item.strip() for item in text.split(",") if item.strip()]


def _processes(settings: Settings, count: int, machines: int) -> int:
    requested = settings["num_processes"]
    if requested == "all":
        if not count:
            raise ConfigurationError(
                f"{settings.shown('num_processes')}: it means one process for each accelerator, and there is none "
                f"to use ({'--cpu is on' if settings['cpu'] else 'this machine has only its CPU'}). Give a number."
            )
        return count * machines
    # Files of the API hold -1 for "not chosen".
    if requested is None or (requested == -1 and not settings.origin("num_processes").startswith("flag")):
        return max(1, count) * machines
    return int(requested)


def _threads(settings: Settings, local_processes: int) -> int | None:
    """CPU threads of a process. A lone process keeps torch's own choice: all cores."""
    requested = settings["num_cpu_threads_per_process"]
    if requested is not None:
        if requested < 1:
            raise ConfigurationError(f"{settings.shown('num_cpu_threads_per_process')}: at least 1 thread is needed")
        return int(requested)
    if local_processes <= 1:
        return None
    return max(1, system.physical_cores() // local_processes)


def _check_devices(settings: Settings, spec: LaunchSpec, count: int) -> None:
    if spec.device == "cpu" or spec.local_processes <= max(count, 1):
        return
    raise ConfigurationError(
        f"{settings.shown('num_processes')} requests {spec.local_processes} processes on this machine, which has "
        f"{count} {spec.device} device{'s' if count != 1 else ''} to use: each process needs one. Request fewer, or "
        "give --cpu."
    )


def summary(settings: Settings, spec: LaunchSpec) -> str:
    """The launch in one line."""
    plural = "es" if spec.num_processes > 1 else ""
    engine = settings["engine"]
    where = "what the cluster has" if spec.device == "auto" else spec.device
    if spec.device not in ("cpu", "auto") and engine != "auto" and launcher_class(engine).remote:
        where = f"GPUs requested from {engine} (none with --cpu)"
    words = [f"{spec.num_processes} process{plural} on {where}"]
    if spec.num_machines > 1:
        words.append(f"machine {spec.machine_rank} of {spec.num_machines}")
    words.append(f"mixed precision {settings['mixed_precision'] or 'no'}")
    if spec.threads is not None and spec.num_processes > 1:
        words.append(f"{spec.threads} CPU thread{'s' if spec.threads > 1 else ''} each")
    source = str(settings.file.path) if settings.file else "no configuration file"
    return f"accelerate launch: {', '.join(words)} ({source}; `accelerate config show` shows each value's origin)"

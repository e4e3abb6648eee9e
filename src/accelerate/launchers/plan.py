# SPDX-License-Identifier: Apache-2.0
"""From the settings of a launch and what the machine has to a LaunchSpec with its variables, and to its launcher."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable

from ..config.launch_settings import Settings
from ..core import env, system
from ..core.errors import ConfigurationError
from ..core.objects import counted
from ..core.option import ALWAYS, SET, as_text, parse_bool
from ..core.options import LAUNCHERS, STRATEGY, TORCHRUN, options
from .base import Launcher
from .spec import FOREIGN, LaunchSpec, Program


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
    _check_sizes(settings, processes)
    # The fields that are options of the same name; an option that is not given leaves the default.
    names = set(LaunchSpec._fields) & set(settings) - {"num_processes", "num_machines", "nnodes"}
    fields = {name: settings[name] for name in names if settings[name] is not None}
    # These have a key in files and no option.
    in_file = settings.file.data if settings.file else {}
    if in_file.get("tpu_name"):
        fields.setdefault("vm", [in_file["tpu_name"]])
    fields["tpu_zone"] = in_file.get("tpu_zone")
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
        **fields,
    )
    spec.check()
    config = None
    if settings["use_deepspeed"] and not remote:
        config = settings["deepspeed_config_file"]
    # Base64 text of a configuration, which is allowed as well, has none of these characters.
    if config and any(mark in config for mark in "./\\") and not os.path.isfile(config):
        raise ConfigurationError(
            f"deepspeed_config_file={config!r} does not exist (current folder: {os.getcwd()})"
        )
    if settings["engine"] != "kubernetes":
        # A container has its own file system.
        program.check()
    if not remote and device != "cpu" and spec.local_processes > max(count, 1):
        raise ConfigurationError(
            f"{settings.shown('num_processes')} requests {spec.local_processes} processes on this "
            f"machine, which has {counted(count, f'{device} device')} available: each process "
            "needs one. Request fewer processes, or add --cpu."
        )
    return spec


def _requested(settings: Settings) -> int | None:
    """The number of processes that was requested; None where it follows from the devices."""
    requested = settings["num_processes"]
    if requested in (None, "all"):
        return None
    return int(requested)


def _device_elsewhere(settings: Settings) -> tuple[str, int]:
    if _requested(settings) is None:
        raise ConfigurationError(
            f"engine={settings['engine']}: the processes run elsewhere, where this machine cannot "
            "count the devices: add --num_processes"
        )
    if settings["cpu"]:
        return "cpu", 0
    # A Ray cluster reports its devices itself.
    kind = "cuda"
    if settings["engine"] == "ray" and not settings["multi_gpu"]:
        kind = "auto"
    return kind, int(settings["num_processes"])


def _device(settings: Settings, present: system.Accelerators) -> tuple[str, int]:
    """The device type to run on, and how many of it may be used."""
    if settings["cpu"]:
        return "cpu", 0
    ids = _gpu_ids(settings)
    if (settings["multi_gpu"] or ids) and not present.number:
        option = "multi_gpu" if settings["multi_gpu"] else "gpu_ids"
        raise ConfigurationError(
            f"{settings.shown(option)}: this machine does not have an accelerator that the "
            f"installed torch ({system.torch_build().get('version', 'none')}) can use. Add --cpu "
            "to run on the CPU."
        )
    absent = [item for item in ids if item.isdigit() and int(item) >= present.number]
    if absent:
        raise ConfigurationError(
            f"{settings.shown('gpu_ids')}: the device {', '.join(absent)} does not exist; this "
            f"machine has {present.number} ({present.kind} 0 to {present.number - 1})"
        )
    return present.kind, len(ids) if ids else present.number


def _machines(settings: Settings) -> tuple[int, str]:
    """The number of machines, the most of a range, and the range as torch's agent writes it."""
    text = settings["nnodes"]
    if text is None:
        machines = 1
        if settings["num_machines"] is not None:
            machines = settings["num_machines"]
        return machines, str(machines)
    least, colon, most = text.partition(":")
    if not colon:
        most = least
    if not least.isdigit() or not most.isdigit() or not 1 <= int(least) <= int(most):
        raise ConfigurationError(
            f"{settings.shown('nnodes')}: use a number of machines or a range such as 1:4"
        )
    if settings["num_machines"] not in (None, int(most)):
        raise ConfigurationError(
            f"{settings.shown('nnodes')} and {settings.shown('num_machines')} contradict each "
            "other: use only one"
        )
    if least == most:
        text = least
    return int(most), text


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
                f"{settings.shown('num_processes')}: it means one process for each accelerator, "
                "but none is available "
                f"({'--cpu is on' if settings['cpu'] else 'this machine has only its CPU'}). Use "
                "a number."
            )
        return count * machines
    if requested is None:
        return max(1, count) * machines
    return int(requested)


def _check_sizes(settings: Settings, processes: int) -> None:
    """ConfigurationError where the processes cannot be divided by the sizes of the layout."""
    if not settings["use_parallelism_config"]:
        return
    names = [
        name
        for name in settings
        if name.startswith("parallelism_config_") and name.endswith("_size")
    ]
    sizes = {name: settings[name] for name in names if settings[name] and settings[name] > 1}
    product = math.prod(sizes.values())
    if processes % product:
        factors = " x ".join(settings.shown(name) for name in sizes)
        raise ConfigurationError(
            f"{factors} = {product} processes, but {settings.shown('num_processes')} starts "
            f"{processes}: start a multiple of {product}, or change a size"
        )


def _threads(settings: Settings, local_processes: int) -> int | None:
    """CPU threads of a process. A lone process keeps torch's own choice: all cores."""
    requested = settings["num_cpu_threads_per_process"]
    if requested is not None:
        if requested < 1:
            raise ConfigurationError(
                f"{settings.shown('num_cpu_threads_per_process')}: use 1 or more"
            )
        return int(requested)
    if local_processes <= 1:
        return None
    return max(1, system.physical_cores() // local_processes)


# What the summary of a launch states, where it was set.
_SUMMARIZED = (
    "mixed_precision", "gradient_accumulation_steps", "dynamo_backend",
    "use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config",
)  # fmt: skip


def summary(settings: Settings, spec: LaunchSpec) -> str:
    """The launch in one line: where it runs, and what was set. What the script itself decides is not known here."""
    device = spec.device
    if device == "auto":
        device = "what the cluster has"
    words = [f"{counted(spec.num_processes, 'process')} on {device}"]
    if spec.num_machines > 1:
        words.append(f"machine {spec.machine_rank} of {spec.num_machines}")
    for name in _SUMMARIZED:
        value = settings[name]
        if settings.chosen(name) and value not in (False, "no"):
            text = name.removeprefix("use_").replace("_", " ")
            if value is not True:
                text += f" {value}"
            words.append(text)
    if spec.threads is not None and spec.num_processes > 1:
        words.append(f"{counted(spec.threads, 'CPU thread')} each")
    line = ", ".join(words)
    if settings.file:
        line += f" ({settings.file.path}; `accelerate config show` shows each origin)"
    return line


def shortage_of_cpus(processes: int, threads: int | None) -> str | None:
    """The warning where processes or their threads share processors; None where they do not."""
    cpus = system.usable_cpu_count()
    count = counted(processes, "process")
    shared = counted(cpus, "processor")
    if processes > cpus:
        return (
            f"{count} share {shared}, so all of them run slower. --num_processes {cpus} uses "
            "the processors fully"
        )
    if threads is not None and processes * threads > cpus:
        fitting = max(1, cpus // processes)
        return (
            f"{count} of {threads} threads share {shared} and slow each other down. "
            f"--num_cpu_threads_per_process {fitting} fits"
        )
    return None


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
            f"{settings.shown('engine')} means one machine, but {settings.shown('num_machines')} "
            "does not"
        )
    if spec.nnodes != str(spec.num_machines) and engine != "elastic":
        raise ConfigurationError(
            f"{settings.shown('nnodes')} is a range of machines, which only the elastic engine "
            "supports"
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


def leave_outer_run() -> None:
    """In a rank of another launch, remove the variables of its ranks and settings: this launch is another run."""
    if env.get("LOCAL_RANK") is not None:
        rows = [option for option in options().values() if option.is_published]
        names = [*FOREIGN, "ACCELERATE_STATUS_DIR", "ACCELERATE_LAUNCH_TIME"]
        env.publish(dict.fromkeys([*names, *(row.variable for row in (*rows, *TORCHRUN))]))


def variables(settings: Settings) -> dict[str, str | None]:
    """The variables that every process of a run gets, whatever starts it."""
    published: dict[str, str | None] = {}
    for option in options().values():
        if not option.is_published or not settings.applies(option):
            continue
        value = settings[option.name]
        if option.when == ALWAYS:
            is_needed = True
        elif option.when == SET:
            is_needed = settings.chosen(option.name)
        elif option.when:
            is_needed = value is not None
        else:
            is_needed = value is not None and value is not False
        if is_needed:
            published[option.variable] = option.to_variable(value)
    if settings["mixed_precision"] == "fp8":
        published.update(_fp8_overrides(settings))
    if settings["use_deepspeed"]:
        # The DeepSpeed options that a configuration file sets: next to a DeepSpeed JSON file they are a conflict.
        fields: Iterable[str] = ()
        if settings.file:
            fields = settings.file.data.get("deepspeed_config") or ()
        published["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields)
    return published


def without_effect(launcher: type[Launcher], settings: Settings) -> list[str]:
    """Lines for what was set and has no effect: the launcher does not use it, or a switch that it needs is off."""
    unused = [
        f"{name} ({settings.origin(name)})"
        for name in launcher.unused
        if settings.chosen(name) and settings[name] not in (None, options()[name].default, 0)
    ]
    lines = []
    if unused:
        lines.append(f"{', '.join(unused)}: no effect with the {launcher.name} engine")
    if settings["cpu"] and settings.origin("gpu_ids").startswith("flag "):
        lines.append(f"{settings.shown('gpu_ids')}: no effect with --cpu")
    flags = [row for row in options().values() if settings.origin(row.name).startswith("flag ")]
    for option in flags:
        if option.engine and launcher.name not in option.engine.split(" or "):
            lines.append(f"{option.flag}: no effect without --engine {option.engine}")
    off = {option.name: option.flag for option in STRATEGY.options if not settings[option.name]}
    if settings["mixed_precision"] != "fp8":
        off["fp8"] = "--mixed_precision fp8"
    for switch, wanted in off.items():
        if switch == f"use_{launcher.name}":
            continue
        without_switch = [option.flag for option in flags if switch in option.when]
        if without_switch:
            lines.append(f"{', '.join(without_switch)}: no effect without {wanted}")
    return lines


def _fp8_overrides(settings: Settings) -> dict[str, str]:
    text = str(settings["fp8_override_linear_precision"])
    words = [part for part in text.strip("()[] ").replace(" ", "").split(",") if part]
    where = settings.shown("fp8_override_linear_precision")
    if len(words) != 3:
        raise ConfigurationError(f"{where}: use three truth values, for fprop, dgrad and wgrad")
    names = ("FPROP", "DGRAD", "WGRAD")
    return {
        f"ACCELERATE_FP8_OVERRIDE_{name}": as_text(parse_bool(part, where))
        for name, part in zip(names, words, strict=True)
    }

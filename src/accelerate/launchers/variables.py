# SPDX-License-Identifier: Apache-2.0
"""From the settings of a launch to the environment variables of its processes."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.launch_settings import Settings
from ..core import env
from ..core.errors import ConfigurationError
from ..core.option import ALWAYS, SET, as_text, parse_bool
from ..core.options import STRATEGY, TORCHRUN, options
from .base import Launcher
from .spec import FOREIGN


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
        lines.append(f"{', '.join(unused)}: no effect with the engine {launcher.name}")
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
        raise ConfigurationError(f"{where}: give three truth values, for fprop, dgrad and wgrad")
    names = ("FPROP", "DGRAD", "WGRAD")
    return {
        f"ACCELERATE_FP8_OVERRIDE_{name}": as_text(parse_bool(part, where))
        for name, part in zip(names, words, strict=True)
    }

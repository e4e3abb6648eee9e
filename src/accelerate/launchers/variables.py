# SPDX-License-Identifier: Apache-2.0
"""From the settings of a launch to the environment variables of its processes."""

from __future__ import annotations

from ..config.launch_settings import Settings
from ..core.errors import ConfigurationError
from ..core.option import ALWAYS, NEVER, as_text, parse_bool
from ..core.options import STRATEGY, options


def variables(settings: Settings) -> dict[str, str | None]:
    """The variables that every process of a run gets, whatever starts it."""
    found: dict[str, str | None] = {}
    for option in options().values():
        if not option.variable or option.when == NEVER or not settings.applies(option):
            continue
        value = settings[option.name]
        is_off = value is None or (value is False and not option.when)
        if option.when == ALWAYS or not is_off:
            found[option.variable] = option.to_variable(value)
    if settings["mixed_precision"] == "fp8":
        found.update(_fp8_overrides(settings))
    if settings["use_deepspeed"]:
        found["ACCELERATE_CONFIG_DS_FIELDS"] = _deepspeed_fields(settings)
    return found


# What the engine `deepspeed` uses, also for a script that does not train with DeepSpeed.
STARTER_OPTIONS = (
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
)


def idle_flags(settings: Settings) -> list[str]:
    """A line for each switch that is off although flags were given that need it."""
    off = {option.name: option.flag for option in STRATEGY.options if not settings[option.name]}
    of_engine = STARTER_OPTIONS if settings["engine"] == "deepspeed" else ()
    if settings["mixed_precision"] != "fp8":
        off["fp8"] = "--mixed_precision fp8"
    found = []
    for switch, wanted in off.items():
        options_of_switch = [
            option for option in options().values() if switch in option.when and option.name not in of_engine
        ]
        given = [option.flag for option in options_of_switch if settings.origin(option.name).startswith("flag ")]
        if given:
            found.append(f"{', '.join(given)}: no effect without {wanted}")
    return found


def _fp8_overrides(settings: Settings) -> dict[str, str]:
    text = str(settings["fp8_override_linear_precision"])
    parts = [part for part in text.strip("()[] ").replace(" ", "").split(",") if part]
    where = settings.shown("fp8_override_linear_precision")
    if len(parts) != 3:
        raise ConfigurationError(f"{where}: give three truth values, for fprop, dgrad and wgrad")
    names = ("FPROP", "DGRAD", "WGRAD")
    return {
        f"ACCELERATE_FP8_OVERRIDE_{name}": as_text(parse_bool(part, where))
        for name, part in zip(names, parts, strict=True)
    }


def _deepspeed_fields(settings: Settings) -> str:
    """The DeepSpeed options that a configuration file sets: next to a DeepSpeed JSON file they are a conflict."""
    section = settings.file.data.get("deepspeed_config") if settings.file else None
    return ",".join(section or ())

# SPDX-License-Identifier: Apache-2.0
"""From the settings of a launch to the variables its processes read."""

from __future__ import annotations

from typing import Any

from ..config.launch import STRATEGY, published_when
from ..config.launch_settings import Settings
from ..core.env import as_text, parse_bool
from ..core.errors import ConfigurationError

DYNAMO = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
# Published only where the size they belong to is above 1.
CONDITIONAL = {
    "parallelism_config_cp_comm_strategy": "parallelism_config_cp_size",
    "parallelism_config_sp_seq_length": "parallelism_config_sp_size",
    "parallelism_config_sp_seq_length_is_variable": "parallelism_config_sp_size",
    "parallelism_config_sp_attn_implementation": "parallelism_config_sp_size",
    "parallelism_config_pp_schedule": "parallelism_config_pp_size",
    "parallelism_config_pp_num_microbatches": "parallelism_config_pp_size",
}


def variables(settings: Settings) -> dict[str, str | None]:
    """The variables that every process of a run gets, whatever starts it."""
    found: dict[str, Any] = {
        "ACCELERATE_MIXED_PRECISION": settings["mixed_precision"] or "no",
        "ACCELERATE_DYNAMO_BACKEND": (settings["dynamo_backend"] or "no").upper(),
        "ACCELERATE_DYNAMO_MODE": settings["dynamo_mode"],
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": settings["dynamo_use_fullgraph"],
        "ACCELERATE_DYNAMO_USE_DYNAMIC": settings["dynamo_use_dynamic"],
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": settings["dynamo_use_regional_compilation"],
    }
    if settings["cpu"]:
        found["ACCELERATE_USE_CPU"] = True
    if settings["debug"]:
        found["ACCELERATE_DEBUG_MODE"] = True
    if settings["enable_cpu_affinity"]:
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    if settings["gradient_accumulation_steps"] is not None:
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = settings["gradient_accumulation_steps"]
    for option in STRATEGY.options:
        if settings[option.name]:
            found.update(_of_switch(option.name, settings))
    if settings["mixed_precision"] == "fp8":
        found.update(_of_switch("fp8", settings))
        found.update(_fp8_overrides(settings))
    if settings["use_deepspeed"]:
        found["ACCELERATE_CONFIG_DS_FIELDS"] = _deepspeed_fields(settings)
    return {name: as_text(value) for name, value in found.items()}


def idle_flags(settings: Settings) -> list[str]:
    """A line for each switch that is off although flags were given that only count when it is on."""
    off = {option.name: f"--{option.name}" for option in STRATEGY.options if not settings[option.name]}
    if settings["mixed_precision"] != "fp8":
        off["fp8"] = "--mixed_precision fp8"
    found = []
    for switch, wanted in off.items():
        given = [option.name for option in published_when(switch) if settings.origin(option.name).startswith("flag ")]
        if given:
            found.append(f"{', '.join(f'--{name}' for name in given)}: no effect without {wanted}")
    return found


def _of_switch(switch: str, settings: Settings) -> dict[str, Any]:
    found = {}
    for option in published_when(switch):
        size = CONDITIONAL.get(option.name)
        if settings[option.name] is not None and (size is None or settings[size] > 1):
            found[str(option.variable)] = settings[option.name]
    return found


def _fp8_overrides(settings: Settings) -> dict[str, Any]:
    text = str(settings["fp8_override_linear_precision"])
    parts = [part for part in text.strip("()[] ").replace(" ", "").split(",") if part]
    where = settings.shown("fp8_override_linear_precision")
    if len(parts) != 3:
        raise ConfigurationError(f"{where}: give three truth values, for fprop, dgrad and wgrad")
    names = ("FPROP", "DGRAD", "WGRAD")
    return {
        f"ACCELERATE_FP8_OVERRIDE_{name}": parse_bool(part, where) for name, part in zip(names, parts, strict=True)
    }


def _deepspeed_fields(settings: Settings) -> str:
    """The DeepSpeed options that a configuration file sets: with a DeepSpeed JSON of its own they would contradict."""
    section = settings.file.data.get("deepspeed_config") if settings.file else None
    return ",".join(section or ())

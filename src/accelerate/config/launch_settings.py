# SPDX-License-Identifier: Apache-2.0
"""The values of a launch, each decided once: flag, then variable, then file, then default, with its origin kept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from ..core.option import ALWAYS, NEVER, SET, Option, brief
from ..core.options import options
from .launch_file import SWITCHES, LaunchFile, Setting

DEFAULT = "default"
# Where a parsed command line notes which options were given.
GIVEN = "given_options"


class Settings(Mapping[str, Any]):
    """Option name -> value; `settings.origin(name)` is where the value came from."""

    def __init__(self, values: Mapping[str, Setting], file: LaunchFile | None = None) -> None:
        self._values = dict(values)
        self.file = file

    def __getitem__(self, name: str) -> Any:
        return self._values[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def origin(self, name: str) -> str:
        """Return the origin of a value, for messages."""
        return self._values[name].origin

    def chosen(self, name: str) -> bool:
        """Whether the value was given: it is not the default."""
        return self._values[name].origin != DEFAULT

    def applies(self, option: Option) -> bool:
        """Whether the switches and sizes that the option belongs to are on."""
        return option.when in (ALWAYS, NEVER, SET) or all(map(self._is_on, option.when))

    def _is_on(self, name: str) -> bool:
        if name == "fp8":
            return bool(self["mixed_precision"] == "fp8")
        value = self[name]
        return value is True or (isinstance(value, int) and value > 1)

    def shown(self, name: str) -> str:
        """The value and its origin, for messages."""
        return f"{name}={brief(self[name])} ({self.origin(name)})"

    def located(self, message: str) -> str:
        """The message with the origin of each setting that it names, unless it has that already."""
        named = [name for name in re.findall(r"\w+", message) if name in self._values]
        origins = [
            f"{name} is from {self.origin(name)}"
            for name in dict.fromkeys(named)
            if self.chosen(name)
            and self.origin(name) not in message
            and not self.origin(name).startswith("flag")
        ]
        if origins:
            return f"{message} ({', '.join(origins)})"
        return message

    @contextlib.contextmanager
    def locating(self) -> Iterator[None]:
        """A block whose ConfigurationErrors name the origin of each setting in their messages."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(self.located(str(error))) from None


def resolve_settings(flags: Mapping[str, Any], file: LaunchFile | None = None) -> Settings:
    """Decide every option. `flags` holds only what was given on the command line.

    ConfigurationError where a variable or flag does not fit its type, or where two settings contradict each other.
    """
    env.check_run()
    values = {option.name: _decide(option, flags, file) for option in options().values()}
    _imply_layout(values)
    _imply_processes(values)
    _resolve_contradictions(values)
    return Settings(values, file)


def given(args: object) -> dict[str, Any]:
    """The options given on a parsed command line: by name, with their values.

    A namespace that no parser of ours made counts as given what differs from the defaults.
    """
    values = vars(args)
    noted = values.get(GIVEN)
    if noted is not None:
        return {name: values[name] for name in noted if name in options()}
    return {
        name: values[name]
        for name, option in options().items()
        if name in values and values[name] != option.default and values[name] is not None
    }


def _decide(option: Option, flags: Mapping[str, Any], file: LaunchFile | None) -> Setting:
    if option.name in flags:
        value = option.convert(flags[option.name], where=option.flag)
        if value is None and option.kind == "count":
            raise ConfigurationError(
                f"{option.flag}=-1 is out of range: use {option.accepted}, or all"
            )
        return Setting(value, f"flag {option.flag}")
    text = env.raw(option.variable) if option.variable else None
    if text:
        return Setting(option.read(text), f"variable {option.variable}")
    if file is not None and option.name in file.values:
        return file.values[option.name]
    default = option.convert(option.default, where=option.name)
    return Setting(default, DEFAULT)


def _imply_layout(values: dict[str, Setting]) -> None:
    """A size that is given by a flag switches the layout on."""
    if values["use_parallelism_config"].origin != DEFAULT:
        return
    for name, setting in values.items():
        is_size = name.startswith("parallelism_config_") and name.endswith("_size")
        if is_size and _directness(setting) == 2 and setting.value > 1:
            values["use_parallelism_config"] = Setting(True, setting.origin)
            return


def _imply_processes(values: dict[str, Setting]) -> None:
    """The number of processes from the number on each machine, a flag that has no key in files."""
    each = values["nproc_per_node"]
    total = values["num_processes"]
    if each.value is None:
        return
    if _directness(total) == 2:
        raise ConfigurationError(
            f"nproc_per_node ({each.origin}) and num_processes ({total.origin}) contradict each "
            "other: use only one"
        )
    most = str(values["nnodes"].value or "").rpartition(":")[2]
    if most.isdigit():
        machines = int(most)
    else:
        machines = values["num_machines"].value or 1
    values["num_processes"] = Setting(
        "all" if each.value == "all" else each.value * machines, each.origin
    )


# Two settings that cannot both be on.
CONTRADICTIONS = (
    ("module", "no_python"),
    ("cpu", "multi_gpu"),
    ("cpu", "tpu"),
    ("multi_gpu", "tpu"),
    ("use_fsdp", "use_deepspeed"),
    ("use_fsdp", "use_megatron_lm"),
    ("use_deepspeed", "use_megatron_lm"),
)


def _resolve_contradictions(values: dict[str, Setting]) -> None:
    """Of two settings that cannot both be on, the more direct one stays; equals are an error."""
    for first, second in CONTRADICTIONS:
        value = values[first]
        other = values[second]
        if not (value.value and other.value):
            continue
        if _directness(value) == _directness(other):
            raise ConfigurationError(
                f"{_named(first, value)} and {_named(second, other)} contradict each other: use "
                "only one of them"
            )
        if _directness(value) > _directness(other):
            loser = second
            winner = value
        else:
            loser = first
            winner = other
        values[loser] = Setting(False, f"switched off by {winner.origin}")


def _named(name: str, setting: Setting) -> str:
    """A switch by the name under which it was given, and where."""
    if _directness(setting) == 0:
        kinds = (f"distributed_type {kind}" for kind, switch in SWITCHES.items() if switch == name)
        name = options()[name].file_key or next(kinds, name)
    return f"{name} ({setting.origin})"


def _directness(setting: Setting) -> int:
    """2 for a flag, 1 for a variable, 0 for a file."""
    return {"flag": 2, "variable": 1}.get(setting.origin.partition(" ")[0], 0)

# SPDX-License-Identifier: Apache-2.0
"""The layouts of `accelerate certify`, as text such as fsdp:2xtp:2 and as the configuration of a launch."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigurationError

# Dimensions of a device mesh in their order, with their fields of `ParallelismConfig`.
FIELDS = {
    "pp": "pp", "ddp": "dp_replicate", "fsdp": "dp_shard", "cp": "cp", "sp": "sp", "tp": "tp",
}  # fmt: skip
# Keys of a configuration file for which a layout has values of its own.
_REPLACED = (
    "distributed_type", "num_processes", "num_machines", "machine_rank", "use_cpu", "fsdp_config",
    "parallelism_config",
)  # fmt: skip
_FORM = re.compile(r"[a-z]+:\d+(x[a-z]+:\d+)*")


@dataclass(frozen=True)
class Layout:
    """A layout of a run.

    Fields:
        text: as it was given.
        sizes: {dimension: number of ranks} of those above 1.
    """

    text: str
    sizes: dict[str, int]

    @property
    def processes(self) -> int:
        """The ranks of a run."""
        return math.prod(self.sizes.values())

    @property
    def ordered(self) -> str:
        """The text with the dimensions in the order of a mesh; empty for one process."""
        return text_of(self.sizes)

    @property
    def shards(self) -> int:
        """The shards of the data: ranks that read different samples."""
        return self.sizes.get("ddp", 1) * self.sizes.get("fsdp", 1)

    def configuration(
        self, cpu: bool, base: Mapping[str, Any] = types.MappingProxyType({})
    ) -> dict[str, Any]:
        """The settings of a configuration file that starts a run in this layout.

        Args:
            cpu: whether to run on the CPU.
            base: the settings of a configuration file, whose layout is replaced.
        """
        settings = {key: value for key, value in base.items() if key not in _REPLACED}
        settings["num_processes"] = self.processes
        settings["use_cpu"] = cpu
        names = set(self.sizes)
        kind = "NO"
        if names:
            kind = "MULTI_GPU"
        if names and cpu:
            kind = "MULTI_CPU"
        if names & {"fsdp", "cp", "sp"}:
            kind = "FSDP"
            defaults = {"fsdp_version": "2", "fsdp_cpu_ram_efficient_loading": False}
            settings["fsdp_config"] = {**defaults, **base.get("fsdp_config", {})}
        if len(names) > 1 or names - {"ddp", "fsdp"}:
            options = dict(base.get("parallelism_config", {}))
            for name, field in FIELDS.items():
                options[f"parallelism_config_{field}_size"] = self.sizes.get(name, 1)
            settings["parallelism_config"] = options
        settings["distributed_type"] = kind
        return settings


SINGLE = Layout("single", {})


def text_of(sizes: Mapping[str, int]) -> str:
    """The sizes of dimensions as text, in the order of a mesh; empty for one process."""
    return "x".join(f"{name}:{sizes[name]}" for name in FIELDS if sizes.get(name, 1) > 1)


def is_layout(word: str) -> bool:
    """Whether a word has the form of a layout."""
    return word == SINGLE.text or _FORM.fullmatch(word) is not None


def parse(text: str, option: str = "--layouts") -> Layout:
    """The layout that a text such as ddp:2 or fsdp:2xtp:2 names; `single` is one process.

    Raises:
        ConfigurationError: it names none.
    """
    if text == SINGLE.text:
        return SINGLE
    sizes: dict[str, int] = {}
    for part in text.split("x"):
        name, _, number = part.partition(":")
        is_size = re.fullmatch("[1-9][0-9]{0,5}", number) is not None
        if name not in FIELDS or not is_size or name in sizes:
            raise ConfigurationError(
                f"{option} {text}: write dimension:ranks, joined by x, as in ddp:2 or "
                f"fsdp:2xtp:2. The dimensions are {', '.join(FIELDS)}"
            )
        sizes[name] = int(number)
    return Layout(text, {name: size for name, size in sizes.items() if size > 1})


def of_launch(values: Mapping[str, Any], processes: int) -> Layout:
    """The layout that the settings of a launch select."""
    sizes = {}
    if values["use_parallelism_config"]:
        for name, field in FIELDS.items():
            size = values[f"parallelism_config_{field}_size"]
            if size and size > 1:
                sizes[name] = size
    remaining = processes // math.prod(sizes.values())
    if remaining > 1:
        name = "ddp"
        if values["use_fsdp"] and "fsdp" not in sizes:
            name = "fsdp"
        sizes[name] = remaining * sizes.get(name, 1)
    return Layout(text_of(sizes) or SINGLE.text, sizes)


def check_base(base: Mapping[str, Any], origin: str) -> None:
    """Refuse a configuration whose runs cannot be compared layout by layout.

    Raises:
        ConfigurationError: it names the field.
    """
    kind = base.get("distributed_type", "NO")
    if base.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigurationError(
            f"compute_environment: {base['compute_environment']} ({origin}): layouts can be "
            "certified only on this machine"
        )
    if kind not in ("NO", "FSDP") and not str(kind).startswith("MULTI_"):
        raise ConfigurationError(
            f"distributed_type: {kind} ({origin}) cannot be compared with one process: use FSDP or ddp"
        )

# SPDX-License-Identifier: Apache-2.0
"""The layouts of `accelerate certify`, as text such as fsdp:2xtp:2 and as the configuration of a launch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigurationError

# In the order of a device mesh.
DIMENSIONS = ("ddp", "fsdp", "tp", "cp", "sp", "pp")
# The field of `ParallelismConfig` with the size of a dimension.
_FIELDS = {"ddp": "dp_replicate", "fsdp": "dp_shard"}


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
    def shards(self) -> int:
        """The shards of the data: ranks that read different samples."""
        return self.sizes.get("ddp", 1) * self.sizes.get("fsdp", 1)

    def configuration(self, cpu: bool) -> dict[str, Any]:
        """The settings of a configuration file that differ from those of one process."""
        settings: dict[str, Any] = {
            "num_processes": self.processes,
            "distributed_type": "NO",
            "use_cpu": cpu,
        }
        if self.processes > 1 and cpu:
            settings["distributed_type"] = "MULTI_CPU"
        elif self.processes > 1:
            settings["distributed_type"] = "MULTI_GPU"
        if "fsdp" in self.sizes or {"cp", "sp"} & set(self.sizes):
            settings["distributed_type"] = "FSDP"
            settings["fsdp_config"] = {"fsdp_version": "2", "fsdp_cpu_ram_efficient_loading": False}
        if set(self.sizes) - {"ddp", "fsdp"} or len(self.sizes) > 1:
            settings["parallelism_config"] = {
                f"parallelism_config_{_FIELDS.get(name, name)}_size": size
                for name, size in self.sizes.items()
            }
        return settings


def parse(text: str) -> Layout:
    """The layout that a text such as ddp:2 or fsdp:2xtp:2 names.

    Raises:
        ConfigurationError: it names none.
    """
    sizes: dict[str, int] = {}
    for part in text.split("x"):
        match = re.fullmatch(r"([a-z]+):(\d+)", part)
        if match is None or match[1] not in DIMENSIONS or int(match[2]) < 1 or match[1] in sizes:
            raise ConfigurationError(
                f"--layouts {text}: write dimension:ranks, with x between two of them, as in ddp:2 or fsdp:2xtp:2. "
                f"The dimensions are {', '.join(DIMENSIONS)}"
            )
        sizes[match[1]] = int(match[2])
    return Layout(text, {name: size for name, size in sizes.items() if size > 1})

# SPDX-License-Identifier: Apache-2.0
"""`accelerate config default`: a configuration without questions, from what the machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...config import launch_file
from ...core import messages, system
from ...core.device_kinds import DEVICES
from ...core.enums import ComputeEnvironment, DistributedType
from ...core.errors import ConfigurationError
from ...core.files import check_writable
from ...core.options import PRECISIONS
from .config_args import ClusterConfig


def run_kind(device: str) -> str:
    """The `distributed_type` of a run over several devices of a type; NO for one that a machine has once."""
    kind = DEVICES.get(device)
    if kind is None or kind.type == "cpu":
        return "NO"
    return kind.distributed.value


def machine_defaults(mixed_precision: str = "no") -> dict[str, Any]:
    """The configuration that fits this machine: all its accelerators, or one process on its CPU."""
    present = system.accelerators()
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType(run_kind(present.kind) if present.number > 1 else "NO"),
        mixed_precision=mixed_precision,
        use_cpu=present.number == 0,
        debug=False,
        num_processes=max(1, present.number),
    ).to_dict()


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path | None = None
) -> Path | bool:
    """Write a configuration for this machine and return its path; return False if the file already exists.

    ConfigurationError for an unknown precision or a folder.
    """
    precision = str(mixed_precision).lower()
    if precision not in PRECISIONS:
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} is unknown: use one of {', '.join(PRECISIONS)}"
        )
    if save_location is not None:
        path = Path(save_location).expanduser()
    else:
        path = launch_file.default_file()
    if path.exists() and not path.is_dir():
        messages.show(
            f"{path} already exists and was not changed: remove it, or name another file with "
            "--config_file"
        )
        return False
    check_writable(path, "config_file")
    return launch_file.write(path, machine_defaults(precision))

# SPDX-License-Identifier: Apache-2.0
"""`accelerate env`: this installation and machine, to read or to paste into a report."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import platform
from shutil import which
from typing import Any

from ..config import launch_file
from ..core import imports, system
from ..core.errors import ConfigurationError
from ..core.objects import masked
from ..core.option import as_text
from ..core.version import __version__
from .parser import command_parser

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "deepspeed",
    "torchao",
    "peft",
    "bitsandbytes",
    "ray",
)


def gather(config_file: str | None = None) -> dict[str, Any]:
    """What is installed and present. Only the devices need an import of torch."""
    import psutil

    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    facts: dict[str, Any] = {
        "accelerate": __version__,
        "implementation": imports.IMPLEMENTATION,
        "folder": str(imports.FOLDER),
        "problems": imports.installation_problems(),
        "scanners": "CVE-2026-69112 (PYSEC-2026-3804) concerns Hugging Face's accelerate, not this package",
        "command": which("accelerate"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
        "cores": system.physical_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 2),
        "devices": _devices(),
    }
    path = launch_file.default_file() if config_file is None else config_file
    try:
        facts["config"] = masked(launch_file.read(path).data)
        facts["config_file"] = str(path)
    except ConfigurationError as error:
        is_absent = config_file is None and not launch_file.default_file().exists()
        facts["config"], facts["config_file"] = None, None if is_absent else str(error)
    return facts


def _devices() -> list[str]:
    """The accelerators as torch names them."""
    import torch

    from ..core import devices

    kind = devices.accelerator_type()
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    names = getattr(module, "get_device_name", lambda index: kind)
    return [f"{kind}:{index} {names(index)}" for index in range(torch.accelerator.device_count())]


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate env`, or add it to `subparsers`."""
    description = "Describe this installation and this machine, for bug reports."
    made = command_parser("env", description, env_command, subparsers)
    made.add_argument(
        "--config_file",
        default=None,
        help="Configuration file to show instead of the default file.",
    )
    made.add_argument("--json", action="store_true", help="Print JSON.")
    return made


# The name that every command has.
parser = env_command_parser


def main(argv: list[str] | None = None) -> None:
    """Run `accelerate env`."""
    env_command(env_command_parser().parse_args(argv))


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print the description with parsed arguments, and return it."""
    facts = gather(args.config_file)
    print(json.dumps(facts, indent=2) if args.json else listing(facts))
    return facts


def listing(data: dict[str, Any], indent: str = "  ") -> str:
    """Return a line for each value, those of an inner mapping indented, as a configuration file writes them."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", listing(value, f"{indent}  ")]
        elif value is None or value in ([], {}):
            lines.append(f"{indent}{key}: none")
        elif isinstance(value, list):
            lines.append(f"{indent}{key}: {', '.join(map(str, value))}")
        else:
            lines.append(f"{indent}{key}: {as_text(value)}")
    return "\n".join(lines)

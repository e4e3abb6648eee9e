# SPDX-License-Identifier: Apache-2.0
"""`accelerate env`: this installation and machine, to read or to paste into a report."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from typing import Any

from ..config import launch_file
from ..core import installation, system
from ..core.errors import ConfigurationError
from ..core.version import __version__
from .parser import Parser

PACKAGES = ("torch", "numpy", "safetensors", "transformers", "deepspeed", "torchao", "peft", "bitsandbytes", "ray")


def gather(config_file: str | None = None) -> dict[str, Any]:
    """What is installed and present. Only the devices need an import of torch."""
    found: dict[str, Any] = {
        "accelerate": __version__,
        "implementation": installation.IMPLEMENTATION,
        "folder": str(installation.FOLDER),
        "problems": installation.problems(),
        "command": shutil.which("accelerate"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: text for name in PACKAGES if (text := _version(name))},
        "cores": system.physical_cores(),
        "memory_gb": _memory_gb(),
        "devices": _devices(),
    }
    path = launch_file.default_file() if config_file is None else config_file
    try:
        found["config"] = launch_file.read(path).data
        found["config_file"] = str(path)
    except ConfigurationError as error:
        found["config"], found["config_file"] = None, str(error)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gb() -> float:
    import psutil

    return round(psutil.virtual_memory().total / 2**30, 2)


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


def as_text(found: dict[str, Any]) -> str:
    """Format the result of `gather` for a report."""
    lines = [
        f"- `Accelerate` version: {found['accelerate']}",
        f"- Implementation: {found['implementation']}, {found['folder']}",
        *(f"- Problem: {problem}" for problem in found["problems"]),
        f"- Platform: {found['platform']}",
        f"- `accelerate` command: {found['command'] or 'not on the PATH'}",
        f"- Python version: {found['python']}",
        *(f"- {name} version: {text}" for name, text in found["packages"].items()),
        f"- Accelerators: {', '.join(found['devices']) or 'none (CPU)'}",
        f"- CPU cores: {found['cores']}, system RAM: {found['memory_gb']} GB",
    ]
    if found["config"] is None:
        return "\n".join([*lines, f"- Configuration: {found['config_file']}"])
    lines.append(f"- Configuration ({found['config_file']}):")
    return "\n".join([*lines, *(f"\t- {key}: {value}" for key, value in found["config"].items())])


def parser() -> Parser:
    """Return the parser of `accelerate env`."""
    made = Parser(prog="accelerate env", description="Describe this installation and this machine, for bug reports.")
    made.add_argument("--config_file", default=None, help="Configuration file to show instead of the default one.")
    made.add_argument("--json", action="store_true", help="Print JSON.")
    return made


def main(argv: list[str] | None = None) -> None:
    """Run `accelerate env`."""
    args = parser().parse_args(argv)
    found = gather(args.config_file)
    print(json.dumps(found, indent=2) if args.json else as_text(found))

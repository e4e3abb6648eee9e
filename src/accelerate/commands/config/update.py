# SPDX-License-Identifier: Apache-2.0
"""`accelerate config update`: write an older configuration file again with the present keys."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...config import launch_file
from ...core import messages
from .config_args import load_config_from_file


def update_command_parser(parser: Any, parents: Any = ()) -> argparse.ArgumentParser:
    """Add the parser of the command to `parser`, which has sub-commands."""
    made: argparse.ArgumentParser = parser.add_parser("update", parents=parents)
    made.add_argument(
        "--config_file", default=None, help="File to update instead of the default file."
    )
    made.set_defaults(func=update_config_command)
    return made


def update_config(args: argparse.Namespace) -> Path:
    """Write a file again; print what each older spelling has become. Returns the path."""
    file = launch_file.read(args.config_file or launch_file.default_file())
    for note in file.notes:
        print(note)
    current = load_config_from_file(file.path).to_dict()
    # Numbers that the file left to the machine stay left to it.
    if "num_processes" not in file.data and current.get("num_processes") == -1:
        del current["num_processes"]
    return launch_file.write(file.path, current)


def update_config_command(args: argparse.Namespace) -> None:
    """Run the command with parsed arguments."""
    messages.show(f"updated {update_config(args)}")

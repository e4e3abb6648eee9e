# SPDX-License-Identifier: Apache-2.0
"""`accelerate test`: launch the self-check of this installation with the configuration in effect."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from ..config.launch_settings import given
from ..core.option import Group
from ..core.options import options
from . import launch
from .parser import add_options, command_parser

SCRIPT = "accelerate.test_utils.scripts.self_check"
# The options of a launch that are worth giving here.
TAKEN = (
    "config_file", "cpu", "num_processes", "mixed_precision", "gpu_ids", "quiet", "num_machines", "machine_rank",
    "main_process_ip", "main_process_port", "engine", "slurm_options",
)  # fmt: skip


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate test`, or add it to `subparsers`."""
    description = (
        "Start processes with the current configuration, and check data sharding, collectives, "
        "gradient accumulation, precision and checkpoints. Prints each check with its result. On "
        "several machines, set TMPDIR to a folder that they all share, where a checkpoint is "
        "saved."
    )
    made = command_parser("test", description, test_command, subparsers)
    add_options(
        made,
        [
            Group(
                "launch",
                "Options of `accelerate launch`.",
                tuple(options()[name] for name in TAKEN),
            )
        ],
    )
    return made


# The name that every command has.
parser = test_command_parser


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command."""
    test_command(test_command_parser().parse_args(argv))


def test_command(args: argparse.Namespace) -> None:
    """Run the self-check with parsed arguments; its exit code is ours."""
    spec = importlib.util.find_spec(SCRIPT)
    assert spec is not None and spec.origin is not None
    words: list[str] = []
    for name, value in given(args).items():
        words += [options()[name].flag] + ([] if value is True else [str(value)])
    launch.main([*words, spec.origin])

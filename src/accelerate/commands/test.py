# SPDX-License-Identifier: Apache-2.0
"""`accelerate test`: launch the self-check of this installation with the configuration in effect."""

from __future__ import annotations

import importlib.util

from ..config.launch_settings import given
from ..core.errors import LaunchError
from ..core.option import Group
from ..core.options import options
from . import launch
from .parser import Parser, add_options

SCRIPT = "accelerate.test_utils.scripts.self_check"
# The options of a launch that are worth giving here.
TAKEN = ("config_file", "cpu", "num_processes", "mixed_precision", "gpu_ids", "quiet")


def parser() -> Parser:
    """Return the parser of `accelerate test`."""
    made = Parser(
        prog="accelerate test",
        description="Start processes with the present configuration, and check data sharding, collectives, gradient "
        "accumulation, precision and checkpoints. Prints each check with its result.",
    )
    add_options(made, [Group("launch", "Options of `accelerate launch`.", tuple(options()[name] for name in TAKEN))])
    return made


def main(argv: list[str] | None = None) -> None:
    """Run the self-check; its exit code is ours."""
    args = parser().parse_args(argv)
    words: list[str] = []
    for name, value in given(args).items():
        words += [options()[name].flag] + ([] if value is True else [str(value)])
    launch.main([*words, _script()], command="accelerate test")


def _script() -> str:
    spec = importlib.util.find_spec(SCRIPT)
    if spec is None or spec.origin is None:
        raise LaunchError(f"the self-check {SCRIPT} is missing from this installation: reinstall accelerate")
    return spec.origin

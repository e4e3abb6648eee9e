# SPDX-License-Identifier: Apache-2.0
"""`accelerate test`: launch the self-check of this installation with the configuration in effect."""

from __future__ import annotations

import importlib.util
import sys

from ..config.launch import options
from ..core.errors import LaunchError
from . import launch
from .parser import Parser

SCRIPT = "accelerate.test_utils.scripts.self_check"
# The options of a launch that are worth giving here.
TAKEN = ("config_file", "cpu", "num_processes", "mixed_precision", "gpu_ids", "quiet")


def main(argv: list[str] | None = None) -> None:
    """Run the self-check; its exit code is ours."""
    parser = Parser(
        prog="accelerate test",
        description="Prove on this machine, with the configuration in effect, that processes start and cooperate: "
        "data sharding, collectives, gradient accumulation, precision, checkpoints. Prints a table.",
    )
    for name in TAKEN:
        option = options()[name]
        if option.kind == "switch":
            parser.add_argument(*option.spellings, dest=name, action="store_true", help=option.help)
        else:
            parser.add_argument(*option.spellings, dest=name, default=None, help=option.help)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    given: list[str] = []
    for name in TAKEN:
        value = getattr(args, name)
        if value:
            given += [options()[name].spellings[0]] + ([] if value is True else [str(value)])
    launch.main([*given, _script()])


def _script() -> str:
    spec = importlib.util.find_spec(SCRIPT)
    if spec is None or spec.origin is None:
        raise LaunchError(f"the self-check {SCRIPT} is missing from this installation: reinstall accelerate")
    return spec.origin

# SPDX-License-Identifier: Apache-2.0
"""`accelerate certify SCRIPT`: whether a script trains the same model in a layout as on one process."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ..core import messages
from ..core.errors import ConfigurationError
from .parser import Parser, exit_on

EQUAL, DIFFERENT, FAILED, NOT_COMPARABLE = range(4)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate certify`."""
    made = Parser(
        prog="accelerate certify",
        description="Run a script for a few optimizer steps on one process and in each layout, and compare what it "
        "trains.",
    )
    made.add_argument(
        "--layouts",
        "--layout",
        nargs="+",
        required=True,
        metavar="LAYOUT",
        help="Layouts, such as ddp:2 or fsdp:2xtp:2.",
    )
    made.add_argument(
        "--steps", type=int, default=4, metavar="N", help="Optimizer steps to compare."
    )
    made.add_argument(
        "--dtype", help="Type of the model's tensors, such as float64. Default: its own."
    )
    made.add_argument("--folder", help="Folder of the records. Default: a temporary one.")
    made.add_argument("--cpu", action="store_true", help="Run on the CPU.")
    made.add_argument("script", help="The script.")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="Its arguments.")
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command."""
    args = parser().parse_args(argv)
    with exit_on(ConfigurationError):
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    from ..certify import layouts, runs
    from ..certify.certificate import Certificate
    from ..certify.settings import Settings

    chosen = [layouts.parse(text) for text in args.layouts]
    folder = Path(args.folder or tempfile.mkdtemp(prefix="certify-"))
    script = runs.Script(
        [args.script, *args.arguments], {}, Settings("", args.steps, dtype=args.dtype), args.cpu
    )
    certificate = Certificate(script.command, args.steps, args.dtype)
    reference = runs.Reference(script, folder)
    for layout in chosen:
        row = certificate.add(
            layout.text, reference, script.record(layout, folder / layout.text.replace(":", ""))
        )
        messages.show(row.text())
    return certificate.code()

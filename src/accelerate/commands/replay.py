# SPDX-License-Identifier: Apache-2.0
"""`accelerate replay RUN --step N`: make steps of a recorded run again, from the nearest checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import messages
from ..core.errors import ConfigurationError
from ..core.files import check_writable, user_path
from .parser import Parser, exit_on

if TYPE_CHECKING:
    from ..ledger.replay import Replay


def parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate replay`."""
    made = Parser(
        prog="accelerate replay",
        description="Load the nearest checkpoint before a step of a recorded run, run the script "
        "up to that step, and compare the steps with the recording. Exits with 0 if "
        "they are equal, and with 1 if not.",
    )
    made.add_argument("run", metavar="RUN", help="Folder of a recorded run.")
    made.add_argument("--step", type=int, metavar="N", help="Optimizer step to replay.")
    made.add_argument(
        "--single",
        action="store_true",
        help="Replay on a single process that reads the batches of all ranks, and compare within "
        "the tolerance of `accelerate certify`.",
    )
    made.add_argument(
        "--break",
        dest="debugs",
        action="store_true",
        help="Open the debugger on rank 0 before the step.",
    )
    made.add_argument(
        "--dump",
        metavar="FOLDER",
        help="Write the batches, gradients and gradient norms of the step.",
    )
    made.add_argument(
        "--find",
        choices=("nan", "spike"),
        help="Find the first step whose loss or gradient norm is not finite or far above the "
        "previous ones, and the module where it begins.",
    )
    made.add_argument(
        "--from_start", action="store_true", help="Start from the beginning, without a checkpoint."
    )
    made.add_argument(
        "--anyway",
        action="store_true",
        help="Replay even if the script or the torch version has changed.",
    )
    return made


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2 if the step cannot be replayed."""
    made = parser()
    args = made.parse_args(arguments)
    if (args.step is None) == (args.find is None):
        made.error("pass either --step or --find")
    if args.single and (args.debugs or args.dump or args.find):
        made.error("--single cannot be used with --break, --dump or --find")
    with exit_on(ConfigurationError):
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    from ..launchers.plan import leave_outer_run
    from ..ledger import replay, rows

    leave_outer_run()
    dump = None
    if args.dump is not None:
        check_writable(args.dump, "--dump", folder=True)
        dump = os.path.abspath(args.dump)
    ledger = rows.read(user_path(args.run, "RUN").absolute())
    step = args.step
    if args.find:
        step = replay.find(ledger, args.find)
    task = replay.Replay(ledger, step, args.from_start, args.anyway, args.single)
    where = "the beginning"
    if task.checkpoint is not None:
        where = str(task.checkpoint)
    messages.show(f"replaying steps {task.first_step} to {step} from {where}")
    with tempfile.TemporaryDirectory(prefix="replay-") as text:
        folder = Path(text, "records")
        if args.single:
            lines, compared = task.compare_single(folder)
        else:
            task.run(folder, debugs=args.debugs, dump=dump, find=args.find)
            lines, compared = task.differences(folder)
        if args.find:
            _print_origin(task, folder)
    if dump is not None:
        messages.show(f"wrote {dump}")
    print(f"step {step} read: {'; '.join(task.ranges_of(step)) or 'no prepared loader'}")
    for line in lines:
        print(line)
    print(f"{'different' if lines else 'equal'}: {compared}")
    return int(bool(lines))


def _print_origin(task: Replay, folder: Path) -> None:
    for note in task.notes(folder)[:1]:
        step = int(note["order"][0])
        name = f"{note['kind']} {note['name']}".strip()
        if "factor" in note:
            text = f"the {name} grows most, {note['factor']:.3g} times"
        else:
            text = f"the {name} is the first that is not finite"
        if note.get("rows"):
            text += f", rows {', '.join(map(str, note['rows'][:20]))} of its batch"
        print(f"step {step}, rank {note['rank']}: {text}")
        if step != task.step:
            print(f"step {step} read: {'; '.join(task.ranges_of(step))}")

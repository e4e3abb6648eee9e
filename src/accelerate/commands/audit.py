# SPDX-License-Identifier: Apache-2.0
"""`accelerate audit RUN`: whether a recorded run has trained each sample of each epoch once."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from ..core.files import user_path
from .parser import Parser, exit_on, table

if TYPE_CHECKING:
    from ..ledger.audit import Audit, Epoch

# Findings of one epoch that are printed.
_MOST = 10


def parser() -> Parser:
    """Return the parser of `accelerate audit`."""
    made = Parser(
        prog="accelerate audit",
        description="Check that a recorded run trained each sample of each epoch exactly once, "
        "across restarts and different numbers of ranks, and report the exceptions "
        "with their reasons. Exits with 0 if it did, and with 1 if not.",
    )
    made.add_argument("run", metavar="RUN", help="Folder of a recorded run.")
    made.add_argument(
        "--allow",
        nargs="+",
        default=[],
        metavar="REASON",
        help="Intended reasons, such as drop_last and even_batches. They do not change the exit "
        "code.",
    )
    made.add_argument("--json", action="store_true", help="Print JSON instead.")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2 if the run has no ledger that can be read."""
    options = parser().parse_args(arguments)
    with exit_on(ConfigurationError):
        from ..ledger import audit, rows

        unknown = sorted(set(options.allow) - set(audit.REASONS))
        if unknown:
            raise ConfigurationError(
                f"--allow {' '.join(unknown)}: the known reasons are {', '.join(audit.REASONS)}"
            )
        result = audit.audit(rows.read(user_path(options.run, "RUN")))
    is_right = result.is_right(tuple(options.allow))
    if options.json:
        print(json.dumps({**dataclasses.asdict(result), "right": is_right}))
    else:
        print(_text(result, is_right))
    sys.exit(0 if is_right else 1)


def _text(result: Audit, is_right: bool) -> str:
    from ..ledger.audit import REASONS

    lines = [f"{result.steps} steps; starts of the run: {result.attempts}"]
    for first, last in result.redone:
        lines.append(f"steps {first}-{last} were repeated after an earlier checkpoint was loaded")
    for first, last in result.missing:
        lines.append(f"steps {first}-{last} are not recorded")
    headers = ["loader", "epoch", "steps", "ranks", "positions", "trained", "samples", "findings"]
    lines += ["", table([_cells(epoch) for epoch in result.epochs], headers), ""]
    for epoch in result.epochs:
        name = f"loader {epoch.loader}, epoch {epoch.epoch}"
        for finding in epoch.findings[:_MOST]:
            count = finding.last - finding.first + 1
            line = f"{name}: {count} ({finding.first}-{finding.last}) {REASONS[finding.reason]}"
            if finding.step is not None:
                line += f", step {finding.step}"
            lines.append(f"{line} [{finding.reason}]")
        if len(epoch.findings) > _MOST:
            lines.append(f"{name}: and {len(epoch.findings) - _MOST} more; --json shows all")
        if epoch.is_open:
            lines.append(f"{name}: the run ended during this epoch")
    if is_right:
        lines.append("correct: each position of each complete epoch was trained once")
    elif result.epochs:
        lines.append("not right")
    else:
        lines.append("unknown: no step read a prepared loader")
    return "\n".join(lines)


def _cells(epoch: Epoch) -> list[str]:
    numbers = (epoch.total, epoch.trained, epoch.samples, len(epoch.findings))
    cells = [str(epoch.loader), str(epoch.epoch), f"{epoch.steps[0]}-{epoch.steps[1]}"]
    cells.append(", ".join(map(str, epoch.ranks)))
    for number in numbers:
        if number is None or number != number:
            cells.append("?")
        else:
            cells.append(str(int(number)))
    return cells

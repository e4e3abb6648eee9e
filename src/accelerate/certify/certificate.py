# SPDX-License-Identifier: Apache-2.0
"""The verdict on each layout, as lines and as a YAML file."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.version import __version__
from .causes import causes
from .comparison import FACTOR, Comparison, Difference, Step, norm, read_steps
from .runs import Recorded, Reference

# Verdicts, and the exit code of each.
CODES = {"equal": 0, "different": 1, "could not run": 2, "not comparable": 3}
# What a difference means for the step, by the kind of its tensor.
DIRECTIONS = {
    "batch": "data",
    "output": "forward",
    "loss": "forward",
    "gradient": "backward",
    "options": "optimizer",
    "parameter": "optimizer",
    "buffer": "buffer",
    "state": "optimizer",
}
# Lines of the log of a run that has failed.
_LINES = 30


@dataclass
class Row:
    """The verdict on one layout.

    Fields:
        layout: its text.
        verdict: one of `CODES`.
        compared: {kind: number of tensors}.
        difference: the first one. rank: with which it was seen, where replicas differ.
        causes: the likely ones, or why there is no verdict.
    """

    layout: str
    verdict: str
    compared: dict[str, int] = field(default_factory=dict)
    difference: Difference | None = None
    rank: int | None = None
    causes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Lines for the terminal."""
        lines = [f"{self.layout}: {self.verdict}"]
        if self.verdict == "equal":
            counts = ", ".join(f"{count} of {kind}" for kind, count in self.compared.items())
            lines[0] += f" ({counts})"
        first = self.difference
        if first is not None:
            size = first.reason or (
                f"differs by {first.error:.3g} (tolerance {first.tolerance:.3g}, norm {first.size:.3g})"
            )
            lines.append(
                f"  step {first.step}, {DIRECTIONS[first.kind]}: {first.kind} {first.name} {size}"
            )
        if self.rank is not None:
            lines.append(f"  rank {self.rank} has other values than rank 0")
        lines += [f"  {cause}" for cause in self.causes]
        return "\n".join(lines)

    def entry(self) -> dict[str, Any]:
        """Plain data."""
        entry: dict[str, Any] = {
            "layout": self.layout,
            "verdict": self.verdict,
            "compared": self.compared,
        }
        if self.difference is not None:
            entry["difference"] = {
                **self.difference.__dict__,
                "direction": DIRECTIONS[self.difference.kind],
            }
        if self.causes:
            entry["causes"] = self.causes
        return entry


@dataclass
class Certificate:
    """What was compared and with which result.

    Args:
        command: the script and its arguments.
        steps: optimizer steps.
        dtype: of the model; None for its own.
    """

    command: Sequence[str]
    steps: int
    dtype: str | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, layout: str, reference: Reference, run: Recorded) -> Row:
        """Compare a run of a layout with those of the reference."""
        row = self._row(layout, reference, run)
        self.rows.append(row)
        return row

    def _row(self, layout: str, reference: Reference, run: Recorded) -> Row:
        info = run.info
        if info is None:
            return _failed(layout, run)
        plain, moved = reference.runs(info["shards"])
        for other in (plain, moved):
            if other.info is None:
                return _failed(f"{layout}: the reference on one process", other)
        expected, perturbed = read_steps(plain.folder), read_steps(moved.folder)
        unseeded = _unseeded(expected, perturbed)
        if unseeded:
            return Row(layout, "could not run", causes=[unseeded])
        comparison = Comparison(expected, read_steps(run.folder), perturbed)
        replicas = info.get("replicas")
        if not comparison.differences:
            if replicas is None:
                return Row(layout, "equal", comparison.compared)
            first = Difference(
                replicas["step"],
                "parameter",
                replicas["name"],
                reason="is not the same on each rank",
            )
            return Row(layout, "different", comparison.compared, first, replicas["rank"])
        first = comparison.differences[0]
        draws = plain.info["draws"] if plain.info else []
        if draws and first.kind == "output":
            reason = (
                f"{', '.join(draws[:5])} draws random numbers, which differ between ranks by design"
            )
            return Row(layout, "not comparable", comparison.compared, first, causes=[reason])
        likely = causes(comparison, info)
        rank = None if replicas is None else replicas["rank"]
        return Row(layout, "different", comparison.compared, first, rank, likely)

    def code(self) -> int:
        """The exit code: 1 if a layout differs, else 2 if one could not run, else 3 if one cannot be compared."""
        verdicts = {row.verdict for row in self.rows}
        for verdict in ("different", "could not run", "not comparable"):
            if verdict in verdicts:
                return CODES[verdict]
        return 0

    def as_data(self) -> dict[str, Any]:
        """What the file has."""
        return {
            "command": list(self.command),
            "script_sha256": hashlib.sha256(Path(self.command[0]).read_bytes()).hexdigest(),
            "versions": {
                "accelerate": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "steps": self.steps,
            "dtype": self.dtype or "own",
            "tolerance": f"{FACTOR:g} times the effect of parameters moved by one unit in the last place",
            "layouts": [row.entry() for row in self.rows],
        }


def _unseeded(expected: list[Step], perturbed: list[Step]) -> str:
    """Why two runs of the script on one process are not the same one; an empty text if they are."""
    first, second = expected[0], perturbed[0]
    if not any(name.startswith("batch/") for name in first):
        return "the script reads no prepared loader before its first step: give its DataLoader to accelerator.prepare"
    for name, tensor in first.items():
        kind, _, plain = name.partition("/")
        other = second.get(name)
        if other is None or other.shape != tensor.shape:
            return (
                f"two runs on one process have another {kind} {plain}: set a seed before the model and the data are "
                "made"
            )
        if kind == "batch" and not torch.equal(tensor, other):
            return "two runs on one process read other samples: set a seed (accelerate.utils.set_seed) before the loop"
        if kind == "output" and norm(tensor, other) > 1e-2 * norm(tensor):
            return "two runs on one process begin with other parameters: set a seed before the model is made"
    return ""


def _failed(layout: str, run: Recorded) -> Row:
    if run.code == 0:
        reason = f"the script ended before its optimizer had made the steps to compare ({run.log}): give --steps fewer"
        return Row(layout, "could not run", causes=[reason])
    lines = run.log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.strip()]
    return Row(
        layout, "could not run", causes=[f"the run ended with code {run.code}:", *errors[-_LINES:]]
    )

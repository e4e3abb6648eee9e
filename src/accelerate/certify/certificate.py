# SPDX-License-Identifier: Apache-2.0
"""Certifies layouts of a script: the verdict on each, as lines of text and as the rows of a YAML file."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from ..core import system
from ..core.errors import ConfigurationError
from ..core.files import atomic_write, read_regular
from ..core.objects import counted
from ..core.version import __version__
from ..launchers.spec import Program
from .causes import causes
from .comparison import (
    DIFFERENT,
    EQUAL,
    EQUAL_PERTURBED,
    FACTOR,
    FAILED,
    NOT_COMPARABLE,
    SHARP,
    Comparison,
    Difference,
    Item,
    Step,
    norm,
    read_steps,
)
from .layouts import SINGLE, Layout, check_base, parse
from .runs import Installation, Recorded, Reference, Script, installation
from .settings import Settings

# The exit code of each verdict, the worst one first.
CODES = {DIFFERENT: 1, FAILED: 2, NOT_COMPARABLE: 3, EQUAL_PERTURBED: 0, EQUAL: 0}
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
# The value of `against` that compares two runs of the same layout.
ITSELF = "itself"
# Bytes of a certificate.
_SIZE = 16 << 20


@dataclass
class Row:
    """The verdict on one layout.

    Fields:
        layout: its text.
        verdict: one of `CODES`.
        items: {kind: the comparison of its tensors}.
        difference: the first one.
        where: the rank and the dimensions of the mesh along which replicas differ.
        notes: the likely causes, or why there is no verdict.
    """

    layout: str
    verdict: str
    items: dict[str, Item] = field(default_factory=dict)
    difference: Difference | None = None
    where: str = ""
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Lines for the terminal."""
        lines = [f"{self.layout}: {self.verdict}"]
        worst = max(self.items.items(), key=lambda pair: pair[1].ratio, default=None)
        if CODES[self.verdict] == 0 and worst is not None:
            kind, item = worst
            tensors = sum(each.tensors for each in self.items.values())
            lines[0] += f", {tensors} tensors"
            if item.ratio:
                lines[0] += (
                    f" (the largest error is {item.ratio:.2g} of its tolerance: {kind} {item.name}, step {item.step})"
                )
        for kind, item in self.items.items():
            if self.difference is not None:
                break
            if item.vague:
                name, spread = max(item.vague.items(), key=lambda pair: pair[1])
                lines.append(
                    f"  {kind}: {counted(len(item.vague), 'tensor')} not comparable, such as {name}, which rounding "
                    f"changes by {spread:.2g} of its norm"
                )
            elif item.spread > SHARP:
                lines.append(
                    f"  {kind}: rounding changes {item.moved} by {item.spread:.2g} of its norm"
                )
        first = self.difference
        if first is not None:
            size = first.reason or (
                f"differs by {first.error:.3g} (tolerance {first.tolerance:.3g}, norm {first.size:.3g})"
            )
            lines.append(
                f"  step {first.step}, {DIRECTIONS[first.kind]}: {first.kind} {first.name} {size}"
            )
        if self.where:
            lines.append(f"  {self.where}")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = {"layout": self.layout, "verdict": self.verdict}
        if self.items:
            data["items"] = [
                {"kind": kind, "verdict": item.verdict, **_plain(asdict(item))}
                for kind, item in self.items.items()
            ]
        first = self.difference
        if first is not None:
            data["difference"] = _plain(asdict(first))
            data["difference"]["direction"] = DIRECTIONS[first.kind]
            data["difference"]["module"] = first.module
        if self.where:
            data["where"] = self.where
        if self.notes:
            data["notes"] = self.notes
        return data


@dataclass
class Certificate:
    """What is compared, and the verdicts.

    Args:
        script: what is certified, with the options of its records.
        layouts: to compare.
        reference: the layout to compare with.
        against: compare each layout with the same one instead: `ITSELF`, bit by bit, or in another installation.
    """

    script: Script
    layouts: Sequence[Layout]
    reference: Layout = SINGLE
    against: str | None = None
    rows: list[Row] = field(default_factory=list)

    def run(self, folder: Path, report: Callable[[Row], None]) -> None:
        """Run the script in each layout and compare.

        Args:
            folder: for the records.
            report: gets each row as soon as it is known.

        Raises:
            ConfigurationError: something that was given cannot be used.
        """
        self._check()
        reference = Reference(self.script, folder, self.reference)
        other = None
        if self.against not in (None, ITSELF):
            other = installation(str(self.against), folder)
        for number, layout in enumerate(self.layouts):
            place = folder / f"{number}-{layout.text.replace(':', '')}"
            run = self.script.record(layout, place)
            if self.against is None:
                row = self.compare(layout, run, reference)
            else:
                row = self._row_against(layout, run, place, other)
            self.rows.append(row)
            report(row)

    def _check(self) -> None:
        self.script.program.check()
        check_base(self.script.base, "the configuration file")
        if self.script.settings.steps < 1:
            raise ConfigurationError(f"--steps {self.script.settings.steps}: give 1 or more")
        dtype = self.script.settings.dtype
        if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigurationError(f"--dtype {dtype} is no dtype of torch, such as float64")
        devices = system.accelerators().number
        for layout in [*self.layouts, self.reference]:
            if not self.script.cpu and layout.processes > devices:
                raise ConfigurationError(
                    f"--layouts {layout.text} needs {layout.processes} devices, and this machine has {devices}: give "
                    "--cpu"
                )

    def compare(self, layout: Layout, run: Recorded, reference: Reference) -> Row:
        """The verdict on a recorded run of a layout."""
        steps = self.script.settings.steps
        info = run.info
        if info is None:
            return Row(layout.text, FAILED, notes=[run.reason(steps)])
        if info["processes"] != layout.processes or info["shards"] != layout.shards:
            return Row(
                layout.text,
                FAILED,
                notes=[
                    f"the script itself chooses {info['layout']} with {info['shards']} data shards: its "
                    "parallelism_config, or a plugin, excludes this layout"
                ],
            )
        plain, moved = reference.runs(info["shards"])
        for other in (plain, moved):
            if other.info is None:
                text = f"{self.reference.text} (the reference): {other.reason(steps)}"
                return Row(layout.text, FAILED, notes=[text])
        expected, perturbed = read_steps(plain.folder), read_steps(moved.folder)
        unseeded = _unseeded(expected, perturbed)
        if unseeded:
            return Row(layout.text, FAILED, notes=[unseeded])
        comparison = Comparison(expected, read_steps(run.folder), perturbed)
        uneven = info.get("uneven")
        if comparison.differences and uneven and uneven["step"] <= comparison.differences[0].step:
            text = f"the loop depends on the rank: step {uneven['step']} has {uneven['batches']} batches on its ranks"
            return Row(layout.text, FAILED, notes=[text])
        draws = (plain.info or {}).get("draws", [])
        return self._verdict(layout, comparison, info, draws)

    def _row_against(
        self, layout: Layout, run: Recorded, place: Path, other: Installation | None
    ) -> Row:
        """Compare a run with one in the same layout, of this or of another installation."""
        steps = self.script.settings.steps
        runs = [run]
        if other is None:
            runs.append(self.script.record(layout, place / "again"))
        else:
            runs.append(self.script.record(layout, place / "other", other))
            runs.append(self.script.record(layout, place / "perturbed", perturb=True))
        for recorded in runs:
            if recorded.info is None:
                return Row(layout.text, FAILED, notes=[recorded.reason(steps)])
        first, second, *perturbed = [read_steps(recorded.folder) for recorded in runs]
        if not perturbed:
            comparison = Comparison(first, second)
        else:
            comparison = Comparison(second, first, perturbed[0])
        row = self._verdict(layout, comparison, {}, [])
        if row.verdict == DIFFERENT and other is None:
            row.notes = [
                "two equal runs are not equal: a seed that is not set, a race, memory that is read before it is "
                "written, or the hardware"
            ]
        elif row.verdict == DIFFERENT:
            row.notes = [f"the same layout trains another model in {self.against}"]
        return row

    def _verdict(
        self, layout: Layout, comparison: Comparison, info: dict[str, Any], draws: list[str]
    ) -> Row:
        row = Row(layout.text, EQUAL, comparison.items)
        replicas = info.get("replicas")
        if replicas is not None:
            row.where = "rank {rank} has other values of {kind} {name} than rank 0 (along {dimension})".format(
                **replicas
            )
            comparison.add(
                Difference(
                    replicas["step"],
                    replicas["kind"],
                    replicas["name"],
                    reason="is not the same on each rank",
                )
            )
        if comparison.differences:
            first = row.difference = comparison.differences[0]
            row.verdict = DIFFERENT
            uncertain = _uncertain(first, comparison.reference[first.step - 1], draws)
            if uncertain:
                row.verdict = NOT_COMPARABLE
                row.notes = [uncertain]
            elif info:
                row.notes = causes(comparison, info)
        else:
            row.verdict = _worst([item.verdict for item in comparison.items.values()])
        return row

    @property
    def verdict(self) -> str:
        """The worst of all rows."""
        return _worst([row.verdict for row in self.rows])

    @property
    def code(self) -> int:
        """The exit code of the command."""
        return CODES[self.verdict]

    def as_data(self) -> dict[str, Any]:
        """What the file has."""
        settings = self.script.settings
        return {
            "command": self.script.program.words,
            "kind": self.script.program.kind,
            "script_sha256": self.script.digest(),
            "versions": {
                "accelerate": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "configuration": self.script.base,
            "cpu": self.script.cpu,
            "steps": settings.steps,
            "dtype": settings.dtype or "own",
            "dropout": settings.dropout,
            "reference": self.reference.text,
            "against": self.against,
            "tolerance": f"{FACTOR:g} times the effect of parameters moved by one unit in the last place",
            "verdict": self.verdict,
            "layouts": [{**row.as_data(), "mesh": parse(row.layout).sizes} for row in self.rows],
        }

    def write(self, path: Path) -> None:
        """Write the file."""
        with atomic_write(path, "w") as file:
            yaml.safe_dump(self.as_data(), file, sort_keys=False, allow_unicode=True)


def read(path: Path) -> tuple[Certificate, dict[str, str]]:
    """A certificate that can be run again, and the verdict on each layout.

    Raises:
        ConfigurationError: the file is no certificate, or the script has been changed.
    """
    try:
        data = yaml.safe_load(read_regular(path, _SIZE))
        name, *words = data["command"]
        dtype = data["dtype"]
        if dtype == "own":
            dtype = None
        settings = Settings("", data["steps"], dropout=data["dropout"], dtype=dtype)
        script = Script(
            Program(name, tuple(words), data["kind"]), data["configuration"], settings, data["cpu"]
        )
        verdicts = {row["layout"]: row["verdict"] for row in data["layouts"]}
        certificate = Certificate(
            script,
            [parse(text) for text in verdicts],
            parse(data["reference"]),
            data["against"],
        )
        expected = data["script_sha256"]
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"--check {path}: it cannot be read: {reason}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"--check {path}: it is no certificate: {error!r}") from None
    script.program.check()
    if script.digest() != expected:
        raise ConfigurationError(
            f"--check {path}: script_sha256 is not that of {name}, which has been changed"
        )
    return certificate, verdicts


def _worst(verdicts: list[str]) -> str:
    return min(verdicts, key=list(CODES).index, default=EQUAL)


def _uncertain(first: Difference, expected: Step, draws: list[str]) -> str:
    """Why the first difference is no fault; an empty text if it may be one."""
    if first.step != 1 or first.kind not in ("output", "loss", "gradient"):
        return ""
    module = first.name.partition(" (call ")[0]
    if f"buffer/{module}.running_mean" in expected and first.kind == "output":
        return (
            f"{module} normalizes over the samples of one rank: convert it with "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or evaluate it"
        )
    if draws:
        return f"{', '.join(draws[:5])} draws random numbers, which differ between ranks by design"
    return ""


def _unseeded(expected: Sequence[Step], perturbed: Sequence[Step]) -> str:
    """Why two runs of the reference are not the same one; an empty text if they are."""
    first, second = expected[0], perturbed[0]
    if not any(name.startswith("batch/") for name in first):
        return "the script reads no prepared loader before its first step: give its DataLoader to accelerator.prepare"
    for name, tensor in first.items():
        kind, _, plain = name.partition("/")
        other = second.get(name)
        if other is None or other.shape != tensor.shape:
            return (
                f"two runs of the reference have another {kind} {plain}: set a seed before the model and the data are "
                "made"
            )
        if kind == "batch" and not torch.equal(tensor, other):
            return "two runs of the reference read other samples: set a seed (set_seed) before the loop"
        if kind == "output" and norm(tensor, other) > 0.5 * norm(tensor) > 0:
            return "two runs of the reference begin with other parameters: set a seed before the model is made"
    return ""


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values for YAML and JSON, which has no infinity."""
    plain = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = _plain(value)
        if isinstance(value, float):
            value = float(f"{value:.4g}")
            if not math.isfinite(value):
                value = str(value)
        plain[name] = value
    return plain

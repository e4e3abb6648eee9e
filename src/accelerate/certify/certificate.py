# SPDX-License-Identifier: Apache-2.0
"""Certifies layouts of a script: the verdict on each, as lines of text and as the rows of a YAML file."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
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
from .runs import Installation, NoVerdict, Recorded, Reference, Script, installation
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
        notes: the likely causes, or why there is no verdict.
    """

    layout: str
    verdict: str
    items: dict[str, Item] = field(default_factory=dict)
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Lines for the terminal."""
        lines = [self._headline()]
        first = self.difference
        if first is None:
            for kind, item in self.items.items():
                lines += _rounding(kind, item)
        else:
            size = first.reason or (
                f"differs by {first.error:.3g} (tolerance {first.tolerance:.3g}, norm {first.size:.3g})"
            )
            direction = DIRECTIONS[first.kind]
            lines.append(f"step {first.step}, {direction}: {first.kind} {first.name} {size}")
        return "\n  ".join([*lines, *self.notes])

    def _headline(self) -> str:
        line = f"{self.layout}: {self.verdict}"
        if CODES[self.verdict] or not self.items:
            return line
        tensors = sum(item.tensors for item in self.items.values())
        kind, item = max(self.items.items(), key=lambda pair: pair[1].ratio)
        line += f", {tensors} tensors"
        if item.ratio:
            line += f" (the largest error is {item.ratio:.2g} of its tolerance: {kind} {item.name}, step {item.step})"
        return line

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        data = _plain(asdict(self))
        items = []
        for kind, item in self.items.items():
            items.append({"kind": kind, "verdict": item.verdict, **data["items"][kind]})
        data["items"] = items
        first = self.difference
        if first is not None:
            data["difference"]["direction"] = DIRECTIONS[first.kind]
            data["difference"]["module"] = first.module
        return {name: value for name, value in data.items() if value}


def _rounding(kind: str, item: Item) -> list[str]:
    """What the perturbation shows of the tensors of a kind, in a line; none where it hardly moves them."""
    if item.vague:
        name, spread = max(item.vague.items(), key=lambda pair: pair[1])
        return [
            f"{kind}: {counted(len(item.vague), 'tensor')} not comparable, such as {name}, which rounding changes by "
            f"{spread:.2g} of its norm"
        ]
    if item.spread > SHARP:
        return [f"{kind}: rounding changes {item.moved} by {item.spread:.2g} of its norm"]
    return []


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
            try:
                if self.against is None:
                    row = self.compare(layout, run, reference)
                else:
                    row = self._row_against(layout, run, place, other)
            except NoVerdict as reason:
                row = Row(layout.text, FAILED, notes=[str(reason)])
            self.rows.append(row)
            report(row)

    def _check(self) -> None:
        self.script.program.check()
        check_base(self.script.base, "the configuration file")
        if self.script.settings.steps < 1:
            raise ConfigurationError(f"--steps {self.script.settings.steps}: use 1 or more")
        dtype = self.script.settings.dtype
        if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigurationError(f"--dtype {dtype} is not a torch dtype, such as float64")
        devices = system.accelerators().number
        for layout in [*self.layouts, self.reference]:
            if not self.script.cpu and layout.processes > devices:
                raise ConfigurationError(
                    f"--layouts {layout.text} needs {layout.processes} devices, but this machine "
                    f"has {devices}: add --cpu"
                )

    def compare(self, layout: Layout, run: Recorded, reference: Reference) -> Row:
        """The verdict on a recorded run of a layout.

        Raises:
            NoVerdict: a run has failed, or cannot be compared.
        """
        steps = self.script.settings.steps
        info = run.info(steps)
        if info["processes"] != layout.processes or info["shards"] != layout.shards:
            raise NoVerdict(
                f"the script itself chooses {info['layout']} with {info['shards']} data shards: its "
                "parallelism_config, or a plugin, excludes this layout"
            )
        plain, moved = reference.runs(info["shards"])
        try:
            draws = plain.info(steps)["draws"]
            moved.info(steps)
        except NoVerdict as reason:
            raise NoVerdict(f"{self.reference.text} (the reference): {reason}") from None
        expected, perturbed = read_steps(plain.folder), read_steps(moved.folder)
        _check_seeds(expected[0], perturbed[0])
        comparison = Comparison(expected, read_steps(run.folder), perturbed)
        uneven = info.get("uneven")
        if comparison.differences and uneven and uneven["step"] <= comparison.differences[0].step:
            raise NoVerdict(
                f"the loop depends on the rank: in step {uneven['step']} the ranks have "
                f"{uneven['batches']} batches"
            )
        row = Row(layout.text, EQUAL)
        replicas = info.get("replicas")
        if replicas is not None:
            place = replicas["step"], replicas["kind"], replicas["name"]
            comparison.add(Difference(*place, reason="is not the same on each rank"))
        self._judge(row, comparison)
        if row.difference is not None:
            uncertain = _uncertain(row.difference, expected[row.difference.step - 1], draws)
            if uncertain:
                row.verdict = NOT_COMPARABLE
                row.notes = [uncertain]
            else:
                row.notes = causes(comparison, info)
        return row

    def _row_against(
        self, layout: Layout, run: Recorded, place: Path, other: Installation | None
    ) -> Row:
        """Compare a run with one in the same layout, of this or of another installation."""
        row = Row(layout.text, EQUAL)
        if other is None:
            again = self.script.record(layout, place / "again")
            expected_steps, actual_steps = self._steps_of(run, again)
            self._judge(row, Comparison(expected_steps, actual_steps))
            note = (
                "two identical runs differ: a seed is not set, there is a race, memory is read "
                "before it is written, or the hardware is at fault"
            )
        else:
            expected = self.script.record(layout, place / "other", other)
            moved = self.script.record(layout, place / "perturbed", perturb=True)
            actual_steps, expected_steps, moved_steps = self._steps_of(run, expected, moved)
            # The perturbed run is one of this installation.
            self._judge(row, Comparison(expected_steps, actual_steps, moved_steps))
            note = f"the same layout trains a different model in {self.against}"
        if row.difference is not None:
            row.notes = [note]
        return row

    def _steps_of(self, *runs: Recorded) -> list[list[Step]]:
        for run in runs:
            run.info(self.script.settings.steps)
        return [read_steps(run.folder) for run in runs]

    def _judge(self, row: Row, comparison: Comparison) -> None:
        row.items = comparison.items
        row.verdict = _worst([item.verdict for item in comparison.items.values()])
        if comparison.differences:
            row.difference = comparison.differences[0]
            row.verdict = DIFFERENT

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

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Certificate:
        """The certificate that is made of such data, before it has any verdict."""
        name, *words = data["command"]
        dtype = data["dtype"]
        if dtype == "own":
            dtype = None
        settings = Settings("", data["steps"], dropout=data["dropout"], dtype=dtype)
        program = Program(name, tuple(words), data["kind"])
        script = Script(program, data["configuration"], settings, data["cpu"])
        layouts = [parse(row["layout"]) for row in data["layouts"]]
        return cls(script, layouts, parse(data["reference"], "--reference"), data["against"])

    def write(self, path: Path) -> None:
        """Write the file."""
        with atomic_write(path, "w") as file:
            yaml.safe_dump(self.as_data(), file, sort_keys=False, allow_unicode=True)


def read(path: Path) -> tuple[Certificate, dict[str, str]]:
    """A certificate that can be run again, and the verdict on each layout.

    Raises:
        ConfigurationError: the file is not a certificate, or the script has been changed.
    """
    try:
        data = yaml.safe_load(read_regular(path, _SIZE))
        certificate = Certificate.of(data)
        verdicts = {row["layout"]: row["verdict"] for row in data["layouts"]}
        expected = data["script_sha256"]
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"--check {path} cannot be read: {reason}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"--check {path} is not a certificate: {error!r}") from None
    script = certificate.script
    script.program.check()
    if script.digest() != expected:
        raise ConfigurationError(
            f"--check {path}: {script.program.name} has changed since (script_sha256 differs)"
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


def _check_seeds(first: Step, second: Step) -> None:
    """Raise NoVerdict where the first steps of two runs of the reference show that they are not the same run."""
    if not any(name.startswith("batch/") for name in first):
        raise NoVerdict(
            "the script does not read a prepared loader before its first step: pass its "
            "DataLoader to accelerator.prepare"
        )
    for name, tensor in first.items():
        kind, _, plain = name.partition("/")
        other = second.get(name)
        if other is None or other.shape != tensor.shape:
            raise NoVerdict(
                f"two runs of the reference differ in {kind} {plain}: set a seed before creating "
                "the model and the data"
            )
        if kind == "batch" and not torch.equal(tensor, other):
            raise NoVerdict(
                "two runs of the reference read different samples: set a seed (set_seed) before "
                "the loop"
            )
        if kind == "output" and norm(tensor, other) > 0.5 * norm(tensor) > 0:
            raise NoVerdict(
                "two runs of the reference begin with different parameters: set a seed before "
                "creating the model"
            )


def _plain(value: Any) -> Any:
    """A value for YAML and JSON, which has no infinity."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, float):
        value = float(f"{value:.4g}")
        if not math.isfinite(value):
            return str(value)
    return value

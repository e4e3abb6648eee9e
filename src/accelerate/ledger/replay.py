# SPDX-License-Identifier: Apache-2.0
"""Starts the script of a recorded run again from a checkpoint, and compares its steps with the recorded ones."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..certify import settings as recorded
from ..certify.comparison import Comparison, read_steps
from ..checkpointing.layout import read_manifest, unfit
from ..core import devices, env
from ..core.errors import ConfigurationError
from ..monitor.lines import Tail
from ..telemetry.records import events_file
from . import rows
from .recorder import ENVIRONMENT
from .replayed import VARIABLE, ReplaySettings
from .rows import Array, Ledger

# Variables of the recorded run that are not those of its replay.
_OF_THE_RUN = (
    "ACCELERATE_STATUS_DIR",
    "ACCELERATE_LAUNCH_TIME",
    "ACCELERATE_PROFILE",
    "ACCELERATE_RESUME",
    "ACCELERATE_PLAN_FILE",
    recorded.VARIABLE,
    VARIABLE,
)
# The beginnings of variables that choose a layout.
_LAYOUT = ("ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")
# Lines of the log of a replay that has failed.
_LINES = 20
# Steps before a spike, and by how many of their deviations it is above their median.
_BEFORE = 50
_DEVIATIONS = 10.0


@dataclass
class Replay:
    """The replay of a step of a recorded run.

    Args:
        ledger: of the run.
        step: the last one that is made again.
        from_start: begin without a checkpoint.
        anyway: run another script or version of torch than the recorded ones.
        is_single: on one process.

    Raises:
        ConfigurationError: the step cannot be replayed here.
    """

    ledger: Ledger
    step: int
    from_start: bool = False
    anyway: bool = False
    is_single: bool = False

    def __post_init__(self) -> None:
        self.attempt: dict[str, Any] = self.ledger.attempt_of(self.step)
        self.first_step: int = 1
        self.checkpoint: Path | None = None
        if not self.from_start:
            self.checkpoint, before = self._nearest_checkpoint()
            self.first_step = before + 1
        if not self.anyway:
            self._check_program()
        kind, processes = self.attempt["device"], self.attempt["world_size"]
        if kind != "cpu" and not self.is_single:
            present = getattr(devices.module_of(torch.device(kind)), "device_count", lambda: 0)()
            if present < processes:
                raise ConfigurationError(
                    f"step {self.step} ran on {processes} {kind} devices, and there are {present} here: replay it on "
                    "one process with --single"
                )

    def _nearest_checkpoint(self) -> tuple[Path, int]:
        """The newest checkpoint before the step that is still there, and its step."""
        folder = self.ledger.folder
        saved: dict[str, int] = {}
        tail = Tail(events_file(folder, 0))
        # Each call reads a part of a long file.
        for event in itertools.chain.from_iterable(iter(lambda: tail.read()[0], [])):
            if event["event"] == "save":
                saved[event["path"]] = event["step"]
            elif event["event"] == "resume":
                saved = {path: step for path, step in saved.items() if step <= event["step"]}
                saved[event["path"]] = event["step"]
        for text, step in sorted(saved.items(), key=lambda item: -item[1]):
            path = Path(self.attempt["folder"], text)
            if step >= self.step or unfit(path) is not None:
                continue
            # Another save may have replaced it.
            if read_manifest(path).progress.get("step") == step:
                return path, step
        steps = ", ".join(map(str, sorted(saved.values()))) or "none"
        raise ConfigurationError(
            f"{folder} has no checkpoint before step {self.step} (saved steps: {steps}; those that are gone or "
            "damaged do not count): choose a later step, or run from the beginning with --from_start"
        )

    def _check_program(self) -> None:
        script = Path(self.attempt["command"][0])
        if not script.is_file():
            raise ConfigurationError(f"{script}, the script of the run, is gone: put it back")
        if hashlib.sha256(script.read_bytes()).hexdigest() != self.attempt["script_sha256"]:
            raise ConfigurationError(
                f"{script} is not the script of the run, whose sha256 is {self.attempt['script_sha256']}: put that "
                "one back, or replay with this one by --anyway"
            )
        version = self.attempt["versions"]["torch"]
        if version != torch.__version__:
            raise ConfigurationError(
                f"the run used torch {version}, and this is {torch.__version__}: install that one, or replay with "
                "this one by --anyway"
            )

    def run(self, folder: Path, certify: recorded.Settings | None = None, **options: Any) -> None:
        """Run the script until the step. Its records are written to a folder.

        Args:
            folder: it is made.
            certify: what is recorded of each step, and how the loaders read.
            options: fields of `ReplaySettings`.

        Raises:
            ConfigurationError: it has not reached the step.
        """
        folder.mkdir(parents=True)
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        settings = ReplaySettings(str(folder), self.step, checkpoint, **options)
        settings.write(folder / "replay.json")
        variables: dict[str, str | None] = {}
        for prefix in ENVIRONMENT:
            variables.update(dict.fromkeys(env.all_with_prefix(prefix)))
        variables.update(self.attempt["environment"])
        variables.update(dict.fromkeys(_OF_THE_RUN))
        variables[VARIABLE] = str(folder / "replay.json")
        variables["ACCELERATE_DIGEST_STEPS"] = "1"
        variables["OMP_NUM_THREADS"] = str(self.attempt["threads"])
        processes = self.attempt["world_size"]
        if certify is not None:
            certify.write(folder / "certify.json")
            variables[recorded.VARIABLE] = str(folder / "certify.json")
            if certify.shards:
                processes = 1
                for name in variables:
                    if name.startswith(_LAYOUT) and name != "ACCELERATE_USE_CPU":
                        variables[name] = None
        command = [sys.executable]
        if processes > 1:
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={processes}",
            ]
        program, *arguments = self.attempt["command"]
        if self.attempt["module"]:
            command += ["-m", self.attempt["module"], *arguments]
        else:
            command += [program, *arguments]
        log = folder / "log.txt"
        with log.open("w") as output:
            shown = None if settings.debugs else output
            code = subprocess.run(
                command,
                cwd=self.attempt["folder"],
                env=env.child_environment(variables),
                stdout=shown,
                stderr=shown,
            ).returncode
        if not (folder / "note_0.json").exists():
            lines = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
            raise ConfigurationError(
                f"the replay ended with code {code} before step {self.step}:\n{lines}"
            )

    def differences(self, folder: Path) -> tuple[list[str], str]:
        """Compare the records of a replay with those of the run, bit by bit.

        Returns:
            What differs first, a line each; and what was compared.
        """
        steps = rows.read(folder).steps
        recorded_steps = self.ledger.steps
        steps = steps[np.isin(steps["step"], recorded_steps["step"])]
        recorded_steps = recorded_steps[np.isin(recorded_steps["step"], steps["step"])]
        lines = []
        for name in ("loss", "gradient_norm"):
            differ = recorded_steps[name].view("u8") != steps[name].view("u8")
            differ &= ~(np.isnan(recorded_steps[name]) & np.isnan(steps[name]))
            for i in np.flatnonzero(differ)[:1]:
                lines.append(
                    f"step {steps['step'][i]}: {name} {steps[name][i]!r}, recorded {recorded_steps[name][i]!r}"
                )
        compared = 0
        for rank in range(self.attempt["world_size"]):
            expected = rows.digests(self.ledger.folder, rank)
            for key, digest in sorted(rows.digests(folder, rank).items()):
                compared += key in expected
                if expected.get(key, digest) != digest:
                    lines.append(
                        f"step {key[1]}: the parameters of model {key[2]} on rank {rank} differ"
                    )
                    break
        return (
            lines,
            f"losses and gradient norms of {len(steps)} steps, {compared} digests of parameters",
        )

    def compare_single(self, folder: Path) -> tuple[list[str], str]:
        """Replay the step in the layout and on one process, and compare what each step computes.

        Returns:
            As `differences`.
        """
        count = self.step - self.first_step + 1
        shards = self.attempt["shards"]
        steps = []
        for name, joined, perturb in (
            ("layout", 0, False),
            ("single", shards, False),
            ("moved", shards, True),
        ):
            path = folder / name
            certify = recorded.Settings(str(path), count, shards=joined, exits=False)
            self.run(path, certify, perturb=perturb)
            steps.append(read_steps(path))
        layout, single, moved = steps
        comparison = Comparison(single, layout, moved)
        lines = []
        for first in comparison.differences[:1]:
            lines.append(
                f"step {self.first_step + first.step - 1}: {first.kind} {first.name} differs by {first.error:.3g} "
                f"(tolerance {first.tolerance:.3g}) {first.reason}"
            )
        compared = ", ".join(f"{item.tensors} of {kind}" for kind, item in comparison.items.items())
        return lines, f"{count} steps on one process ({compared})"

    def notes(self, folder: Path) -> list[dict[str, Any]]:
        """What the ranks have found, each with its `rank`, the first in the order of the steps first."""
        notes = []
        for path in folder.glob("note_*.json"):
            note = json.loads(path.read_text())
            if note:
                note["rank"] = int(path.stem.removeprefix("note_"))
                notes.append(note)
        notes.sort(key=lambda note: [*note["order"], note["rank"]])
        return notes

    def ranges_of(self, step: int) -> list[str]:
        """What the step has read."""
        read = self.ledger.ranges[self.ledger.ranges["step"] == step]
        return [
            f"loader {row['index']}, epoch {row['epoch']}, positions {row['first']}-{row['last'] - 1}"
            for row in read
        ]


def find(ledger: Ledger, what: str) -> int:
    """The first step whose loss or gradient norm is not finite ("nan"), or far above those before it ("spike").

    Raises:
        ConfigurationError: there is none.
    """
    for name in ("loss", "gradient_norm"):
        values = ledger.steps[name]
        known = ~np.isnan(values)
        if not known.any():
            continue
        if what == "nan":
            found = np.flatnonzero(~np.isfinite(values))
        else:
            found = _spikes(values)
        if len(found):
            return int(ledger.steps["step"][found[0]])
    raise ConfigurationError(
        f"{ledger.folder} has no {what} in the losses and gradient norms of its steps"
    )


def _spikes(values: Array) -> Array:
    found = []
    for i in range(10, len(values)):
        before = values[max(0, i - _BEFORE) : i]
        median = np.median(before)
        deviation = np.median(np.abs(before - median))
        if values[i] - median > _DEVIATIONS * max(deviation, math.ulp(abs(median))):
            found.append(i)
            break
    return np.asarray(found, int)

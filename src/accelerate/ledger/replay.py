# SPDX-License-Identifier: Apache-2.0
"""Starts the script of a recorded run again from a checkpoint, and compares its steps with the recorded ones."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from ..certify import settings as recorded
from ..certify.comparison import Comparison, read_steps
from ..checkpointing.layout import read_manifest, unfit
from ..core import devices, env
from ..core.buckets import is_bucket
from ..core.errors import ConfigurationError
from ..core.files import location
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
        anyway: run another script or torch version than the recorded ones.
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
        kind = self.attempt["device"]
        if kind != "cpu" and not self.is_single:
            module = devices.module_of(torch.device(kind))
            present = getattr(module, "device_count", lambda: 0)()
            processes = self.attempt["world_size"]
            if present < processes:
                raise ConfigurationError(
                    f"step {self.step} ran on {processes} {kind} devices, but there are {present} "
                    "here: replay it on one process with --single"
                )

    def _nearest_checkpoint(self) -> tuple[Path, int]:
        """The newest checkpoint before the step that is still there, and its step."""
        folder = self.ledger.folder
        saved: dict[str, int] = {}
        for event in rows.read_objects(events_file(folder, 0)):
            if event["event"] == "resume":
                # Those after it are of steps that were done again.
                saved = {path: step for path, step in saved.items() if step <= event["step"]}
            if event["event"] in ("save", "resume"):
                saved[event["path"]] = event["step"]
        steps = sorted(saved.values())
        for text in sorted(saved, key=lambda path: -saved[path]):
            step = saved[text]
            path = Path(self.attempt["folder"], text)
            if is_bucket(text):
                path = location(text, "checkpoint")
            if step >= self.step or unfit(path) is not None:
                continue
            # Another save may have replaced it.
            if read_manifest(path).progress.get("step") == step:
                return path, step
        raise ConfigurationError(
            f"{folder} does not have a checkpoint before step {self.step} (saved steps: {steps}; "
            "missing and damaged ones do not count): choose a later step, or run from the "
            "beginning with --from_start"
        )

    def _check_program(self) -> None:
        script = Path(self.attempt["command"][0])
        if not script.is_file():
            raise ConfigurationError(
                f"{script}, the script of the run, no longer exists: restore it"
            )
        if hashlib.sha256(script.read_bytes()).hexdigest() != self.attempt["script_sha256"]:
            raise ConfigurationError(
                f"{script} is not the script of the run, whose sha256 is "
                f"{self.attempt['script_sha256']}: restore that script, or replay with this one "
                "with --anyway"
            )
        version = self.attempt["versions"]["torch"]
        if version != torch.__version__:
            raise ConfigurationError(
                f"the run used torch {version}, but this is {torch.__version__}: install that "
                "version, or replay with this one with --anyway"
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
        checkpoint = None
        if self.checkpoint is not None:
            checkpoint = str(self.checkpoint)
        settings = ReplaySettings(str(folder), self.step, checkpoint, **options)
        variables = self._environment()
        variables[VARIABLE] = settings.write(folder / "replay.json")
        processes = self.attempt["world_size"]
        if certify is not None:
            variables[recorded.VARIABLE] = certify.write(folder / "certify.json")
            if certify.shards:
                processes = 1
                for name in variables:
                    if name.startswith(_LAYOUT) and name != "ACCELERATE_USE_CPU":
                        variables[name] = None
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={processes}"]
        if self.attempt["module"]:
            command += ["-m", self.attempt["module"]]
        else:
            command += self.attempt["command"][:1]
        command += self.attempt["command"][1:]
        log = folder / "log.txt"
        with log.open("w") as file:
            output: TextIO | None = file
            if settings.debugs:
                output = None
            done = subprocess.run(
                command,
                cwd=self.attempt["folder"],
                env=env.child_environment(variables),
                stdout=output,
                stderr=output,
            )
        if not (folder / "note_0.json").exists():
            lines = log.read_text(errors="replace").splitlines()
            shown = "\n".join(lines[-_LINES:])
            raise ConfigurationError(
                f"the replay ended with code {done.returncode} before step {self.step}:\n{shown}"
            )

    def _environment(self) -> dict[str, str | None]:
        """The variables of the recorded run; None removes one of this process."""
        variables: dict[str, str | None] = {}
        for prefix in ENVIRONMENT:
            variables.update(dict.fromkeys(env.all_with_prefix(prefix)))
        variables.update(self.attempt["environment"])
        variables.update(dict.fromkeys(_OF_THE_RUN))
        variables["ACCELERATE_DIGEST_STEPS"] = "1"
        variables["OMP_NUM_THREADS"] = str(self.attempt["threads"])
        return variables

    def differences(self, folder: Path) -> tuple[list[str], str]:
        """Compare the records of a replay with those of the run, bit by bit.

        Returns:
            What differs first, a line each; and what was compared.
        """
        steps = rows.read(folder).steps
        expected = self.ledger.steps
        steps = steps[np.isin(steps["step"], expected["step"])]
        expected = expected[np.isin(expected["step"], steps["step"])]
        lines = []
        for name in ("loss", "gradient_norm"):
            values, recorded_values = steps[name], expected[name]
            differ = values.view("u8") != recorded_values.view("u8")
            differ &= ~(np.isnan(values) & np.isnan(recorded_values))
            for i in np.flatnonzero(differ)[:1]:
                lines.append(
                    f"step {steps['step'][i]}: {name} {values[i]!r}, recorded {recorded_values[i]!r}"
                )
        compared = 0
        for rank in range(self.attempt["world_size"]):
            digests = rows.digests(folder, rank)
            recorded_digests = rows.digests(self.ledger.folder, rank)
            common = sorted(digests.keys() & recorded_digests.keys())
            compared += len(common)
            different = [key for key in common if digests[key] != recorded_digests[key]]
            for _, step, index in different[:1]:
                lines.append(f"step {step}: the parameters of model {index} on rank {rank} differ")
        what = f"losses and gradient norms of {len(steps)} steps, {compared} digests of parameters"
        return lines, what

    def compare_single(self, folder: Path) -> tuple[list[str], str]:
        """Replay the step in the layout and on one process, and compare what each step computes.

        Returns:
            As `differences`.
        """
        count = self.step - self.first_step + 1
        shards = self.attempt["shards"]
        runs = {"layout": (0, False), "single": (shards, False), "moved": (shards, True)}
        steps = []
        for name, (joined, perturb) in runs.items():
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
        if np.isnan(values).all():
            # Not recorded.
            continue
        positions = _spikes(values)
        if what == "nan":
            positions = np.flatnonzero(~np.isfinite(values)).tolist()
        if positions:
            return int(ledger.steps["step"][positions[0]])
    raise ConfigurationError(
        f"{ledger.folder} does not have a {what} in the losses and gradient norms of its steps"
    )


def _spikes(values: Array) -> list[int]:
    """Where values are far above those before them."""
    positions = []
    for i in range(10, len(values)):
        before = values[max(0, i - _BEFORE) : i]
        median = np.median(before)
        deviation = np.median(np.abs(before - median))
        smallest = math.ulp(abs(median))
        if values[i] - median > _DEVIATIONS * max(deviation, smallest):
            positions.append(i)
    return positions

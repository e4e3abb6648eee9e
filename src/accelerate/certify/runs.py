# SPDX-License-Identifier: Apache-2.0
"""Starts the runs of a script that are recorded: the reference, the same one perturbed, and each layout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..core import env
from .layouts import Layout
from .settings import VARIABLE, Settings


@dataclass(frozen=True)
class Recorded:
    """A run that has ended.

    Fields:
        folder: of its record.
        code: with which it has ended.
        log: the file with what it has printed.
    """

    folder: Path
    code: int
    log: Path

    @property
    def info(self) -> dict[str, Any] | None:
        """What the run has noted at its last step; None if it has ended before."""
        path = self.folder / "run.json"
        if not path.exists():
            return None
        info: dict[str, Any] = json.loads(path.read_text())
        return info


@dataclass(frozen=True)
class Script:
    """What is certified.

    Fields:
        command: the script and its arguments.
        base: the settings of its configuration file.
        settings: options of the record, whose folder is replaced.
        cpu: run on the CPU.
    """

    command: Sequence[str]
    base: dict[str, Any]
    settings: Settings
    cpu: bool = False

    def record(self, layout: Layout, folder: Path, **changes: Any) -> Recorded:
        """Run the script in a layout and record it in a folder."""
        folder.mkdir(parents=True)
        values = {**self.settings.__dict__, **changes, "folder": str(folder)}
        settings_file = folder / "settings.json"
        Settings(**values).write(settings_file)
        configuration = {**self.base, **layout.configuration(self.cpu)}
        config_file = folder / "config.yaml"
        config_file.write_text(yaml.safe_dump(configuration))
        log = folder / "log.txt"
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(config_file),
        ]
        with log.open("w") as output:
            code = subprocess.run(
                [*command, *self.command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env.child_environment({VARIABLE: settings_file}),
            ).returncode
        return Recorded(folder, code, log)


@dataclass
class Reference:
    """The runs of a script on one process: as it is, and from parameters that are moved.

    Args:
        script: the script.
        folder: in which they are recorded.
    """

    script: Script
    folder: Path
    _pairs: dict[int, tuple[Recorded, Recorded]] = field(default_factory=dict)

    def runs(self, shards: int) -> tuple[Recorded, Recorded]:
        """The runs on the samples that so many data shards read together."""
        if shards not in self._pairs:
            single = Layout("single", {})
            plain = self.script.record(single, self.folder / f"reference-{shards}", shards=shards)
            moved = self.script.record(
                single, self.folder / f"perturbed-{shards}", shards=shards, perturb=True
            )
            self._pairs[shards] = plain, moved
        return self._pairs[shards]

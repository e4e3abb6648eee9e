# SPDX-License-Identifier: Apache-2.0
"""Starts the runs of a script that are recorded: the reference, the same one perturbed, and each layout."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..core import env
from ..core.errors import ConfigurationError
from ..core.options import options
from ..launchers.spec import Program
from .layouts import SINGLE, Layout
from .settings import VARIABLE, Settings

# Options that belong to the layout of a run, or only watch it: variables of the environment do not change them.
_OF_LAYOUT = re.compile(
    r"use_\w+|cpu|num_processes|num_machines|machine_rank|parallelism_config_\w+_size|plan_file|telemetry|profile"
)
# Seconds that a rank of a recorded run waits for another one, if the environment does not say it.
_TIMEOUT = 300


def is_of_layout(option: str) -> bool:
    """Whether a run that is recorded has a value of its own of an option of the launch."""
    return _OF_LAYOUT.fullmatch(option) is not None


class NoVerdict(Exception):
    """Why a layout cannot be compared."""


@dataclass(frozen=True)
class Recorded:
    """A run that has ended.

    Fields:
        folder: of its record, with the file of what it has printed.
        code: with which it has ended.
    """

    folder: Path
    code: int

    def info(self, steps: int) -> dict[str, Any]:
        """What the run has noted at its last step.

        Raises:
            NoVerdict: it has ended before.
        """
        path = self.folder / "run.json"
        if not path.exists():
            raise NoVerdict(self.reason(steps))
        info: dict[str, Any] = json.loads(path.read_text())
        return info

    @property
    def log(self) -> Path:
        """The file with what it has printed."""
        return self.folder / "log.txt"

    def reason(self, steps: int) -> str:
        """Why the run has not made its steps."""
        failure = self.folder / "error.json"
        if failure.exists():
            error = json.loads(failure.read_text())
            return f"rank {error['rank']} failed: {error['cause']} ({self.log})"
        made = len(list(self.folder.glob("step_*.pt")))
        if self.code == 0 and made:
            return f"the script ended after {made} of {steps} optimizer steps: use --steps {made}"
        if self.code == 0:
            return f"the script ended before any prepared optimizer took a step ({self.log})"
        last = self.log.read_text(errors="replace").rstrip().rpartition("\n")[2]
        return f"the run ended with code {self.code}: {last} ({self.log})"


@dataclass(frozen=True)
class Installation:
    """The Python that runs a script, and what its environment has in addition."""

    python: str = sys.executable
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Script:
    """What is certified.

    Fields:
        program: the script and its arguments.
        base: the settings of its configuration file.
        settings: options of the record, whose folder is replaced.
        cpu: run on the CPU.
    """

    program: Program
    base: dict[str, Any]
    settings: Settings
    cpu: bool = False

    def record(
        self,
        layout: Layout,
        folder: Path,
        installation: Installation | None = None,
        **changes: Any,
    ) -> Recorded:
        """Run the script in a layout and record it in a folder. The children end with this process's exceptions."""
        used = installation or Installation()
        folder.mkdir(parents=True)
        changes.setdefault("layout", layout.ordered)
        settings = dataclasses.replace(self.settings, folder=str(folder), **changes)
        variables: dict[str, Any] = {}
        for option in options().values():
            if option.variable and is_of_layout(option.name):
                variables[option.variable] = None
        variables.update(used.variables)
        variables[VARIABLE] = settings.write(folder / "settings.json")
        # A rank that leaves the loop of the others ends the run in minutes.
        waits = env.get("ACCELERATE_COLLECTIVE_TIMEOUT") or _TIMEOUT
        variables["ACCELERATE_COLLECTIVE_TIMEOUT"] = waits

        config_file = folder / "config.yaml"
        config_file.write_text(yaml.safe_dump(layout.configuration(self.cpu, self.base)))
        command = [used.python, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(config_file), "--error_file", str(folder / "error.json")]
        command += {"script": [], "module": ["-m"], "program": ["--no_python"]}[self.program.kind]
        command += self.program.words
        recorded = Recorded(folder, 0)
        with recorded.log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env.child_environment(variables),
                # Ctrl-C comes to this process alone, which then stops the launcher of the ranks.
                start_new_session=True,
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        return dataclasses.replace(recorded, code=code)

    def digest(self) -> str:
        """The checksum of the script's file; empty for a program, and for a module that is not found."""
        program = self.program
        files = [Path(program.name), Path(program.name, "__main__.py")]
        if program.kind == "program":
            return ""
        if program.kind == "module":
            relative = program.name.replace(".", "/")
            files = []
            for folder in ("", *sys.path):
                files += [Path(folder, f"{relative}.py"), Path(folder, relative, "__main__.py")]
        for file in files:
            if file.is_file():
                return hashlib.sha256(file.read_bytes()).hexdigest()
        return ""


@dataclass
class Reference:
    """The runs that a layout is compared with: one as it is, and one from parameters that are moved.

    Args:
        script: the script.
        folder: in which they are recorded.
        layout: of the runs.
    """

    script: Script
    folder: Path
    layout: Layout = SINGLE
    _pairs: dict[int, tuple[Recorded, Recorded]] = field(default_factory=dict)

    def runs(self, shards: int) -> tuple[Recorded, Recorded]:
        """The runs on the samples that so many data shards read together.

        Raises:
            ConfigurationError: the reference has another number of data shards.
        """
        if self.layout.shards not in (1, shards):
            raise ConfigurationError(
                f"--reference {self.layout.text} has {self.layout.shards} data shards, and the "
                f"layout has {shards}: use a reference with 1, such as tp:2, or with the same "
                "number"
            )
        if shards not in self._pairs:
            folder = self.folder / f"reference-{shards}"
            plain = self.script.record(self.layout, folder, shards=shards)
            folder = self.folder / f"perturbed-{shards}"
            moved = self.script.record(self.layout, folder, shards=shards, perturb=True)
            self._pairs[shards] = plain, moved
        return self._pairs[shards]


def installation(text: str, folder: Path) -> Installation:
    """Another installation of torch or of this package.

    Args:
        text: a folder with an environment of Python, or a revision of the git repository of this package.
        folder: where the files of a revision are put.

    Raises:
        ConfigurationError: it is neither.
    """
    for name in ("bin/python", "Scripts/python.exe"):
        python = Path(text) / name
        if python.exists():
            return Installation(str(python.absolute()))
    source = Path(__file__).parents[2]
    archive = subprocess.run(
        ["git", "-C", str(source), "archive", text, "accelerate"], capture_output=True
    )
    if archive.returncode:
        error = archive.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigurationError(
            f"--against {text}is neither a folder with bin/python nor a revision of {source} "
            f"({error[-1]})"
        )
    package = folder / "revision"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(package, filter="data")
    return Installation(variables={"PYTHONPATH": str(package)})

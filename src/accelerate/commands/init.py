# SPDX-License-Identifier: Apache-2.0
"""`accelerate init [FOLDER]`: write a small complete project for a task."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from ..config import launch_file
from ..core import imports, messages
from ..core.errors import ConfigurationError
from ..core.files import check_writable, user_path
from ..core.version import __version__
from .parser import Parser, exit_on


class Task(NamedTuple):
    """A kind of project.

    Fields:
        title: one sentence, without its period.
        packages: what the script needs besides this package.
    """

    title: str
    packages: tuple[str, ...] = ()


TASKS = {
    "loop": Task("Train a model with a plain PyTorch loop"),
    "causal-lm": Task("Train a causal language model with transformers", ("transformers>=5",)),
    "lora": Task(
        "Train LoRA adapters of a language model with peft", ("transformers>=5", "peft>=0.21")
    ),
    "diffusion": Task("Train a diffusion model with diffusers", ("diffusers>=0.38",)),
}
CONFIG = "accelerate.yaml"
TEMPLATES = Path(__file__).with_name("templates")


def parser() -> Parser:
    """Return the parser of `accelerate init`."""
    made = Parser(
        prog="accelerate init",
        description="Write a small project that trains on any number of processes: a script, a "
        "launch configuration, a test, a Slurm batch job, pyproject.toml and a "
        "README. Existing files are not overwritten.",
    )
    made.add_argument(
        "folder", nargs="?", default=".", help="Folder of the project. Default: the current folder."
    )
    made.add_argument(
        "--task",
        choices=list(TASKS),
        help="What the project does. "
        + " ".join(f"{name}: {task.title}." for name, task in TASKS.items())
        + " Without this option, the command asks for the task, and then for the configuration "
        "as `accelerate config` does.",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2 if a file of the project exists already."""
    args = parser().parse_args(argv)
    with exit_on(ConfigurationError):
        folder = user_path(args.folder, "folder")
        check_writable(folder, "folder", folder=True)
        _check_absent(folder)
        task, configuration = _answers(args.task)
        files = project(task, folder.resolve().name)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    launch_file.write(folder / CONFIG, configuration)
    messages.show(f"wrote {', '.join([*files, CONFIG])} in {folder}")
    if folder != Path("."):
        print(f"cd {shlex.quote(str(folder))}")
    print(f'pip install -e ".[test]"\naccelerate launch --config_file {CONFIG} train.py')


def project(task: str, name: str) -> dict[str, str]:
    """Return the files of a project by name.

    Args:
        task: one of `TASKS`.
        name: of the project.
    """
    paths = [*(TEMPLATES / "common").iterdir(), *(TEMPLATES / task).iterdir()]
    requirements = [_requirement(), *TASKS[task].packages]
    texts = {
        "PROJECT": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project",
        "TITLE": TASKS[task].title,
        "REQUIREMENTS": '", "'.join(requirements),
    }
    files = {}
    for path in filter(Path.is_file, paths):
        text = path.read_text(encoding="utf-8")
        for marker, value in texts.items():
            text = text.replace(marker, value)
        files[path.name] = text
    return dict(sorted(files.items()))


def _check_absent(folder: Path) -> None:
    """Raise ConfigurationError if the folder has a file of a project."""
    names = [*project("loop", ""), CONFIG]
    present = [name for name in names if (folder / name).exists()]
    if present:
        raise ConfigurationError(
            f"{folder} already has {', '.join(present)}, which would be overwritten: use another "
            "folder"
        )


def _answers(task: str | None) -> tuple[str, dict[str, Any]]:
    """The task, and the configuration of launches. Both are asked for unless the task is given."""
    from .config import questions
    from .config.default import machine_defaults

    if task is not None:
        return task, machine_defaults()
    choices = tuple((name, each.title) for name, each in TASKS.items())
    first = questions.Question("_task", "What will the project do?", "loop", choices)
    answers = questions.answered("Write the project?", (first, *questions.QUESTIONS), Path(CONFIG))
    return answers["_task"], questions.to_file(answers)


def _requirement() -> str:
    """This package as pip finds it again: by the folder or the revision that it was installed from."""
    checkout = imports.FOLDER.parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"accelerate @ {checkout.as_uri()}"
    text = importlib.metadata.distribution("accelerate").read_text("direct_url.json")
    if text is None:
        return f"accelerate=={__version__}"
    origin = json.loads(text)
    if "vcs_info" in origin:
        revision = origin["vcs_info"]
        return f"accelerate @ {revision['vcs']}+{origin['url']}@{revision['commit_id']}"
    return f"accelerate @ {origin['url']}"

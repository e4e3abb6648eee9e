# SPDX-License-Identifier: Apache-2.0
"""Write the pages of the reference that follow from the registries and docstrings of the package.

python tools/reference.py            # write docs/reference/*.md
python tools/reference.py --check    # fail where a page differs from what would be written
python tools/reference.py --api      # write docs/reference/api/*.md, which only the site contains
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
from accelerate.core import options
from accelerate.core.device_kinds import DEVICES
from accelerate.core.option import ALWAYS, NEVER, Option, as_text
from accelerate.core.pipeline_schedules import PIPELINE_SCHEDULES

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by tools/reference.py. Change the registry that it reads, then run the script. -->\n"

# Names of `accelerate.utils` by subject: the modules that define them.
SUBJECTS = {
    "Communication": (
        "collectives.tensors",
        "collectives.objects",
        "collectives.padding",
        "collectives.verify",
        "state",
    ),
    "Nested data": ("core.trees",),
    "Random numbers": ("collectives.rng",),
    "Memory and batch size": ("collectives.batch_size", "core.memory"),
    "Configuration objects": ("config", "parallelism_config"),
    "Enumerations": ("core.enums",),
    "Precision and quantization": ("precision", "placement.quantize"),
    "Large models": ("big_modeling", "placement"),
    "Models and compilation": ("core.modules", "parallel.unwrap", "parallel.compile"),
    "Saving": ("checkpointing",),
    "FSDP": ("parallel.fsdp",),
    "DeepSpeed and Megatron-LM": ("config.deepspeed_file", "parallel.deepspeed", "parallel.placeholders"),
    "Launching": ("launchers", "commands"),
    "Environment variables and processors": ("core.env", "runtime.hardware"),
    "Installed packages and devices": ("core.availability", "core.imports"),
    "Errors": ("core.errors",),
    "Other names": ("core.objects", "telemetry.progress"),
    "Constants": ("core.constants",),
}
# Modules whose public names have a page.
MODULES = {
    "tracking": "Trackers",
    "logging": "Logging",
    "state": "State of a process",
    "data_loader": "Data loaders",
    "optimizer": "Optimizers",
    "scheduler": "Schedulers",
    "hooks": "Hooks of modules",
    "inference": "Inference",
    "checkpointing": "Checkpoints",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def code(text: object) -> str:
    """Text as code; nothing for empty text."""
    return f"`{text}`" if text not in (None, "") else ""


def _default(row: Option) -> str:
    return "" if row.default is False else code(as_text(row.default) if row.default is not None else None)


def _flags_as_code(text: str) -> str:
    """The text of a help message; its flags are code, if they are not part of code already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])(--\w+(=\w+)?)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)


def _meaning(row: Option) -> str:
    help = _flags_as_code(row.help)
    if not row.choices or len(row.choices) > 24:
        return help
    return f"{help} One of {', '.join(map(code, row.choices))}.".strip()


def _published(row: Option) -> str:
    if not row.variable:
        return ""
    if row.when == NEVER:
        return "the launcher reads it"
    return "always" if row.when == ALWAYS else "with " + " or ".join(f"`--{name}`" for name in row.when or (row.name,))


# -- pages that are files of the repository


def launch_options() -> str:
    """Every option of `accelerate launch`."""
    text = [
        "# Launch options\n",
        "`accelerate launch` takes each option as a flag. The configuration file holds it under the key, and the "
        "environment holds it in the variable. A flag takes precedence over the variable, and the variable over the "
        "file. [Launching](../launch.md) explains their use.\n",
        "Underscores in a flag can be written as hyphens: `--num_processes` is `--num-processes`. A dash in place of "
        "the key means that a file cannot hold the option.\n",
    ]
    for group in options.GROUPS:
        text.append(f"## {group.title[0].upper() + group.title[1:]}\n\n{_flags_as_code(group.help)}\n")
        rows = [
            (
                "<br>".join(code(flag) for flag in row.spellings if "-" not in flag.lstrip("-")),
                "<br>".join(filter(None, (code(row.file_key) or "—", code(row.variable)))),
                f"{_meaning(row)} Default: {_default(row)}." if _default(row) else _meaning(row),
            )
            for row in group.options
        ]
        text.append(table(("flag", "key and variable", "meaning"), rows))
    return "\n".join(text)


def environment() -> str:
    """Every environment variable that the package reads."""
    own = {row.variable: row for row in options.options().values() if row.variable}
    text = [
        "# Environment variables\n",
        "The package reads these variables and no others. A value that a variable cannot hold raises "
        "`ConfigurationError`. A variable whose name begins with `ACCELERATE_` and is not listed here causes a "
        "warning.\n",
        "## Variables of launch options\n",
        "`accelerate launch` sets them for the processes that it starts. Without the launcher you can set them "
        "yourself.\n",
        table(
            ("variable", "option", "set for the processes", "meaning"),
            [(code(name), code(own[name].flag), _published(own[name]), _meaning(own[name])) for name in sorted(own)],
        ),
        "## Further variables of this package\n",
        table(
            ("variable", "type", "meaning"),
            [(code(row.variable), row.kind, _meaning(row)) for row in options.VARIABLES],
        ),
        "## Variables of torch's launcher\n",
        "A process finds its rank, and how to reach the others, in them.\n",
        table(("variable", "type"), [(code(row.variable), row.kind) for row in options.TORCHRUN]),
        "## Variables of other programs\n",
        "They belong to schedulers, devices, trackers and the system.\n",
        ", ".join(code(row.variable) for row in options.FOREIGN) + "\n",
    ]
    return "\n".join(text)


def trackers() -> str:
    """The trackers that `log_with` accepts."""
    from accelerate.core.enums import LoggerType
    from accelerate.tracking.registry import LOGGER_TYPE_TO_CLASS

    rows = []
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        packages = LoggerType(name).packages if name in LoggerType else ()
        rows.append(
            (
                code(f'log_with="{name}"'),
                code(kind.__name__),
                " or ".join(map(code, packages)) or "none",
                "yes" if kind.requires_logging_directory else "no",
                (inspect.getdoc(kind) or "").splitlines()[0],
            )
        )
    return "\n".join(
        [
            "# Trackers\n",
            'A tracker whose package is not installed is left out with a warning. `log_with="all"` stands for every '
            "installed service that needs no argument beyond those given. [Tracking](../tracking.md) explains "
            "their use.\n",
            table(("argument", "class", "package", "needs `project_dir`", "description"), rows),
        ]
    )


def pipeline_schedules() -> str:
    """The schedules of pipeline parallelism."""
    rows = [
        (
            code(name),
            code(row.implementation.partition(":")[2]) if row.implementation else "of this package",
            str(row.stages_per_rank or "any; 2 by default"),
            "V" if row.v_shaped else "in turns",
            "yes" if row.splits_backward else "no",
            row.minimum_torch,
        )
        for name, row in PIPELINE_SCHEDULES.items()
    ]
    header = ("name", "class of torch", "stages on each rank", "order of ranks", "splits the backward", "torch")
    return "\n".join(
        [
            "# Pipeline schedules\n",
            "`PipelineParallelConfig(schedule=...)` and `--parallelism_config_pp_schedule` take these names. A "
            "schedule that splits the backward computes the gradients of inputs and of weights separately. The last "
            "column is the oldest version of torch whose class computes correct gradients. "
            "[Layouts](../parallelism.md) explains their use.\n",
            table(header, rows),
        ]
    )


def devices() -> str:
    """The kinds of devices."""
    rows = [
        (
            code(row.type),
            code(row.backend),
            code(f"DistributedType.{row.distributed.name}"),
            ", ".join(code(name) for name in (row.visible, *row.vendor_visible) if name),
            code(row.extension) or "torch",
            code(row.ray),
            code(row.kubernetes),
        )
        for row in DEVICES.values()
    ]
    header = ("device", "backend", "run on several", "visible devices", "package", "Ray", "Kubernetes")
    return "\n".join(
        [
            "# Devices\n",
            "A run takes the machine's accelerator, or its CPU if it has none. `Accelerator(cpu=True)` and `--cpu` "
            "choose the CPU. The column *package* names what brings the device to torch. The last two columns name "
            "the resource that is requested there.\n",
            table(header, rows),
        ]
    )


PAGES = {
    "launch_options.md": launch_options,
    "environment.md": environment,
    "trackers.md": trackers,
    "pipeline_schedules.md": pipeline_schedules,
    "devices.md": devices,
}


# -- pages of the site only


def _directive(path: str, value: Any) -> str:
    if not inspect.isclass(value):
        return f"```{{eval-rst}}\n.. autofunction:: {path}\n```\n"
    lines = [f".. autoclass:: {path}", "   :members:"]
    if not issubclass(value, BaseException):
        lines.append("   :inherited-members: str, dict, tuple, Module, Dataset, DataLoader")
    return "\n".join(["```{eval-rst}", *lines, "```", ""])


def _page(title: str, intro: str, module: str, names: Iterable[str], seen: set[int]) -> str:
    """A page with the documentation of names that a module exports. A name documented before is mentioned only."""
    home = importlib.import_module(module)
    text = [f"# {title}\n", intro]
    again, constants = [], []
    for name in sorted(set(names), key=lambda name: (name[0].islower(), name)):
        value = getattr(home, name)
        if inspect.ismodule(value):
            continue
        if not callable(value):
            constants.append((code(name), code(_short(value))))
        elif id(value) in seen:
            again.append(name)
        else:
            seen.add(id(value))
            text.append(_directive(f"{module}.{name}", value))
    if constants:
        text.append(table(("name", "value"), constants))
    if again:
        text.append("Also here, and documented above: " + ", ".join(map(code, again)) + ".\n")
    return "\n".join(text)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def subject_of(home: str) -> str:
    """The subject of the names that a module defines."""
    fitting = [
        (len(prefix), subject)
        for subject, prefixes in SUBJECTS.items()
        for prefix in prefixes
        if home == prefix or home.startswith(prefix + ".")
    ]
    if not fitting:
        raise LookupError(f"accelerate.utils exports names of {home}: add it to SUBJECTS of tools/reference.py")
    return max(fitting)[1]


def api_pages() -> Iterator[tuple[str, str]]:
    """The names and texts of the pages of the API."""
    seen: set[int] = set()
    top = set(accelerate.__all__) - set(accelerate.SUBMODULES) - {"__version__", "Accelerator"}
    yield "accelerator.md", _page("Accelerator", "", "accelerate", ["Accelerator"], seen)
    yield "accelerate.md", _page("The package accelerate", "`from accelerate import ...`\n", "accelerate", top, seen)
    for name, title in MODULES.items():
        module = f"accelerate.{name}"
        home = importlib.import_module(module)
        names = getattr(home, "__all__", None) or [
            key
            for key, value in vars(home).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == module
        ]
        yield f"{name}.md", _page(title, f"`from {module} import ...`\n", module, names, seen)
    utils = importlib.import_module("accelerate.utils")
    names_by_subject: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for home_name, exported in utils.EXPORTS.items():
        names_by_subject[subject_of(home_name)] += exported
    contents = []
    for subject, exported in names_by_subject.items():
        name = "utils_" + subject.lower().replace(" ", "_").replace("-", "_")
        contents.append(name)
        yield f"{name}.md", _page(subject, "`from accelerate.utils import ...`\n", "accelerate.utils", exported, seen)
    yield "utils.md", "# accelerate.utils\n\n" + _toctree(contents)
    yield "index.md", "# Python API\n\n" + _toctree(["accelerator", "accelerate", *MODULES, "utils"])


def _toctree(pages: Iterable[str]) -> str:
    return "\n".join(["```{toctree}", ":maxdepth: 2", "", *pages, "```", ""])


def main(arguments: list[str]) -> int:
    """Write or check the pages; the exit code."""
    if "--api" in arguments:
        folder = FOLDER / "api"
        folder.mkdir(exist_ok=True)
        for name, text in api_pages():
            # Sphinx reads again what is newer than its output.
            if not (folder / name).exists() or (folder / name).read_text() != text:
                (folder / name).write_text(text)
        return 0
    differ = []
    for name, write in PAGES.items():
        path, text = FOLDER / name, NOTE + write()
        if path.exists() and path.read_text() == text:
            continue
        if "--check" in arguments:
            differ.append(str(path))
        else:
            path.write_text(text)
    if differ:
        print("run `python tools/reference.py`: these pages do not match their registries:", *differ, sep="\n  ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

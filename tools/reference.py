# SPDX-License-Identifier: Apache-2.0
"""Write the pages of the reference that follow from the registries and docstrings of the package.

python tools/reference.py            # write docs/reference/*.md
python tools/reference.py --check    # fail where a page differs from what would be written
python tools/reference.py --api      # write docs/reference/api/*.md too, which only the site contains
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
from accelerate import torch_internals
from accelerate.core import options
from accelerate.core.device_kinds import DEVICES
from accelerate.core.enums import PIPELINE_SCHEDULES
from accelerate.core.option import ALWAYS, NEVER, SET, Option, as_text

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
    "Packed sequences": ("data_loader",),
    "Random numbers": ("collectives.rng",),
    "Memory and batch size": ("collectives.batch_size", "core.devices"),
    "Configuration objects": ("config", "parallelism_config"),
    "Enumerations": ("core.enums",),
    "Precision and quantization": ("precision", "placement.quantize"),
    "Large models": ("big_modeling", "placement"),
    "Models and compilation": (
        "core.modules",
        "parallel.unwrap",
        "parallel.compile",
        "parallel.matrices",
        "torch_internals.compiled",
    ),
    "Saving": ("checkpointing",),
    "FSDP": ("parallel.fsdp",),
    "DeepSpeed and Megatron-LM": (
        "config.deepspeed",
        "parallel.deepspeed",
        "parallel.placeholders",
    ),
    "Launching": ("launchers", "commands"),
    "Environment variables and processors": ("core.env", "runtime.hardware"),
    "Installed packages and devices": ("core.availability", "core.imports"),
    "Errors": ("core.errors",),
    "Other names": ("core.objects", "telemetry.display"),
    "Constants": ("core.constants",),
}
# Members of `Accelerator` by task. Those that are in no row are listed at the end.
TASKS = {
    "Prepare": (
        "prepare prepare_model prepare_optimizer prepare_scheduler prepare_data_loader skip_first_batches "
        "track_average unwrap_model prepared_model free_memory clear verify_device_map"
    ),
    "Train": (
        "accumulate backward clip_grad_norm_ clip_grad_value_ unscale_gradients autocast no_sync "
        "trigger_sync_in_backward join_uneven_inputs maybe_context_parallel deepspeed_ulysses_dl_adapter "
        "lomo_backward sync_gradients optimizer_step_was_skipped gradient_accumulation_steps"
    ),
    "Gather and reduce": (
        "gather gather_for_metrics reduce pad_across_processes split_between_processes set_trigger check_trigger"
    ),
    "Save and resume": (
        "save_state load_state resume resumed request_stop register_for_checkpointing save_model save get_state_dict "
        "register_save_state_pre_hook register_load_state_pre_hook save_iteration project_dir logging_dir "
        "project_configuration"
    ),
    "Run code on one process": (
        "print wait_for_everyone main_process_first local_main_process_first on_main_process on_local_main_process "
        "on_last_process on_process on_local_process is_main_process is_local_main_process is_last_process"
    ),
    "Log and profile": (
        "init_trackers log get_tracker trackers log_with record_work profile explain end_training"
    ),
    "State of the run": (
        "device process_index local_process_index num_processes distributed_type mixed_precision parallelism_config "
        "torch_device_mesh data_parallel_rank data_parallel_shard_rank tensor_parallel_rank pipeline_parallel_rank "
        "context_parallel_rank"
    ),
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
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )


def code(text: object) -> str:
    """Text as code; nothing for empty text."""
    return f"`{text}`" if text not in (None, "") else ""


def _default(row: Option) -> str:
    return (
        ""
        if row.default is False
        else code(as_text(row.default) if row.default is not None else None)
    )


def _flags_as_code(text: str) -> str:
    """The text of a help message; its flags are code, if they are not part of code already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])(--\w+(=\w+)?)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)


def _meaning(row: Option) -> str:
    help = _flags_as_code(row.help)
    if not row.choices or len(row.choices) > 24 or all(choice in help for choice in row.choices):
        return help
    return f"{help} One of {', '.join(map(code, row.choices))}.".strip()


def _published(row: Option) -> str:
    if not row.variable:
        return ""
    if row.when == NEVER:
        return "no, the launcher reads it"
    if row.when == ALWAYS:
        return "always"
    if row.when in (SET, ()):
        return "if it is set"
    return "with " + " or ".join(f"`--{name}`" for name in row.when)


# -- pages that are files of the repository


# The kinds of values in the tables of variables.
TYPES = {"text": "string", "truth": "boolean"}


def launch_options() -> str:
    """Every option of `accelerate launch`."""
    text = [
        "# Launch options\n",
        "Give each option of `accelerate launch` as a flag, under its key in the [configuration "
        "file](../launch.md#configuration), or in its environment variable. A flag wins over the variable, and the "
        "variable over the file.\n",
        "`--num-processes` is the same as `--num_processes`. An option with a dash in place of the key cannot be in a "
        "file.\n",
    ]
    for group in options.GROUPS:
        text.append(
            f"## {group.title[0].upper() + group.title[1:]}\n\n{_flags_as_code(group.help)}\n"
        )
        rows = [
            (
                "<br>".join(code(flag) for flag in row.spellings if "-" not in flag.lstrip("-")),
                "<br>".join(filter(None, (code(row.file_key), code(row.variable)))),
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
        "These are all environment variables that the package reads. Booleans are y, yes, t, true, on, 1 and n, no, "
        "f, false, off, 0, in any case. A value of another type raises `ConfigurationError`. A variable that "
        "begins with `ACCELERATE_` and is not on this page causes a warning.\n",
        "## Variables of launch options\n",
        "`accelerate launch` passes its options to the processes in these variables. If another program starts the "
        "processes (`torchrun` or `srun`, for example), set the variables yourself. An argument in the script takes "
        "precedence. [Launch options](launch_options.md) explains the options.\n",
        table(
            ("variable", "option", "passed to the processes"),
            [(code(name), code(own[name].flag), _published(own[name])) for name in sorted(own)],
        ),
        "## Further variables of this package\n",
        table(
            ("variable", "type", "meaning"),
            [
                (code(row.variable), TYPES.get(row.kind, row.kind), _meaning(row))
                for row in options.VARIABLES
            ],
        ),
        "## Variables of torch's launcher\n",
        "`torchrun` and `accelerate launch` set them. They tell a process its rank, the number of processes, and the "
        "address of rank 0.\n",
        table(
            ("variable", "type"),
            [(code(row.variable), TYPES.get(row.kind, row.kind)) for row in options.TORCHRUN],
        ),
        "## Variables of other programs\n",
        "Schedulers, MPI, drivers of devices, trackers and the system define them. The package reads them where it "
        "works with these programs.\n",
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
            "[Tracking](../tracking.md) explains their use. A tracker whose package is not installed is left out with "
            'a warning. `log_with="all"` stands for every installed service that needs no further argument.\n',
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
    header = (
        "name",
        "torch class",
        "stages on each rank",
        "order of ranks",
        "splits the backward",
        "torch",
    )
    return "\n".join(
        [
            "# Pipeline schedules\n",
            "`PipelineParallelConfig(schedule=...)` and `--parallelism_config_pp_schedule` take these names. A "
            "schedule that splits the backward computes the gradients of inputs and of weights separately. The last "
            "column is the oldest torch version whose class computes correct gradients. "
            "[Pipeline parallelism](../layouts/pipeline.md) explains their use.\n",
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
    header = (
        "device",
        "backend",
        "run on several",
        "visible devices",
        "package",
        "Ray",
        "Kubernetes",
    )
    return "\n".join(
        [
            "# Devices\n",
            "A run takes the machine's accelerator, or its CPU if it has none or if `Accelerator(cpu=True)` or "
            "`--cpu` is given. The package adds the device to torch. The last two columns are the names of the "
            "resource in Ray and Kubernetes.\n",
            table(header, rows),
        ]
    )


def internals() -> str:
    """What lies below public APIs."""
    rows = [
        (code(row.name), row.what, row.versions, row.upstream, row.needed_by, row.without)
        for row in torch_internals.rows().values()
    ]
    header = ("row", "what is read or changed", "versions", "upstream", "needed by", "without it")
    return "\n".join(
        [
            "# Torch internals\n",
            "The package uses the public API of torch and other libraries, except for what this table lists. "
            "`ACCELERATE_TORCH_INTERNALS_OFF=name,name` turns rows off; each row has a test that then fails. The "
            "code is in `src/accelerate/torch_internals/`.\n",
            table(header, rows),
        ]
    )


PAGES = {
    "torch_internals.md": internals,
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


def _classes_first(name: str) -> tuple[bool, str]:
    return name[0].islower(), name


def _sentence(value: object) -> str:
    """The first sentence of a docstring, as the text of a table's cell."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)]\.) (?=[A-Z`])", paragraph)[0]


def _summary(path: str, values: dict[str, Any]) -> str:
    """A table of the members of `path`: each with a link and a sentence."""
    rows = [
        (f"{{py:obj}}`{name} <{path}.{name}>`", _sentence(value)) for name, value in values.items()
    ]
    return table(("name", "description"), rows)


def _links(path: str, names: Iterable[str]) -> str:
    """Links to the functions and classes below `path`, in a line."""
    return ", ".join(
        f"{{py:obj}}`{name} <{path}.{name}>`" for name in sorted(names, key=_classes_first)
    )


def _members(kind: type) -> dict[str, Any]:
    """The public methods and properties of a class and of its bases."""
    members = {
        name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()
    }
    documented = {
        name
        for name, value in members.items()
        if inspect.getdoc(value) not in (None, inspect.getdoc(type(value)))
    }
    return {name: members[name] for name in documented if not name.startswith("_")}


class Pages:
    """The pages of the API, and for each the links to the names that it documents."""

    def __init__(self) -> None:
        self.documented: set[int] = set()
        self.links: dict[str, str] = {}

    def page(
        self, file: str, title: str, intro: str, module: str, names: Iterable[str]
    ) -> tuple[str, str]:
        """A page that documents names of a module. Those that an earlier page documents are listed at its end."""
        home = importlib.import_module(module)
        objects = {
            name: getattr(home, name)
            for name in sorted(set(names), key=lambda name: (name[0].islower(), name))
        }
        objects = {name: value for name, value in objects.items() if not inspect.ismodule(value)}
        constants = {name: value for name, value in objects.items() if not callable(value)}
        new = {}
        for name, value in objects.items():
            if name not in constants and id(value) not in self.documented:
                self.documented.add(id(value))
                new[name] = value
        text = [
            f"# {title}\n",
            intro,
            *(_directive(f"{module}.{name}", value) for name, value in new.items()),
        ]
        if constants:
            text.append(
                table(
                    ("name", "value"),
                    ((code(name), code(_short(value))) for name, value in constants.items()),
                )
            )
        elsewhere = sorted(objects.keys() - new.keys() - constants.keys())
        if elsewhere:
            text.append(f"Documented on another page: {', '.join(map(code, elsewhere))}.\n")
        self.links[file] = _links(module, new) or ", ".join(map(code, elsewhere))
        return f"{file}.md", "\n".join(text)

    def contents(self, files: dict[str, str]) -> str:
        """The table of contents of pages with these titles: the names on each, whose sentences are there."""
        text = [
            f"## [{title}]({file}.md)\n\n{self.links.get(file, '')}\n"
            for file, title in files.items()
        ]
        return "\n".join([*text, "```{toctree}", ":hidden:", "", *files, "```", ""])


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
        raise LookupError(
            f"accelerate.utils exports names of {home}: add it to SUBJECTS of tools/reference.py"
        )
    return max(fitting)[1]


def accelerator_sections() -> dict[str, dict[str, Any]]:
    """The members of `Accelerator` by task, and the others."""
    others = _members(accelerate.Accelerator)
    sections = {}
    for task, names in TASKS.items():
        sections[task] = {name: others.pop(name) for name in names.split()}
    return {**sections, "Other members": dict(sorted(others.items()))}


def accelerator_page(pages: Pages) -> tuple[str, str]:
    """The constructor of `Accelerator`, then its members by task."""
    path = "accelerate.Accelerator"
    pages.documented.add(id(accelerate.Accelerator))
    pages.links["accelerator"] = _links("accelerate", ["Accelerator"])
    text = [
        "# Accelerator\n",
        "The object that a script creates first, and whose methods it calls in the training loop "
        "([quickstart](../../quickstart.md)).\n",
        f"```{{eval-rst}}\n.. autoclass:: {path}\n```\n",
    ]
    for task, members in accelerator_sections().items():
        text += [f"## {task}\n", _summary(path, members), "```{eval-rst}"]
        for name, value in members.items():
            kind = "automethod" if callable(value) or isinstance(value, staticmethod) else None
            text.append(f".. {kind or 'autoattribute'}:: {path}.{name}\n")
        text.append("```\n")
    return "accelerator.md", "\n".join(text)


def api_pages() -> Iterator[tuple[str, str]]:
    """The names and texts of the pages of the API."""
    pages = Pages()
    yield accelerator_page(pages)
    top = set(accelerate.__all__) - set(accelerate.SUBMODULES) - {"__version__", "Accelerator"}
    yield pages.page(
        "accelerate", "The package accelerate", "`from accelerate import ...`\n", "accelerate", top
    )
    for name, title in MODULES.items():
        module = f"accelerate.{name}"
        home = importlib.import_module(module)
        names = getattr(home, "__all__", None) or [
            key
            for key, value in vars(home).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == module
        ]
        yield pages.page(name, title, f"`from {module} import ...`\n", module, names)
    utils = importlib.import_module("accelerate.utils")
    names_by_subject: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for home_name, exported in utils.EXPORTS.items():
        names_by_subject[subject_of(home_name)] += exported
    subjects = {}
    for subject, exported in names_by_subject.items():
        file = "utils_" + subject.lower().replace(" ", "_").replace("-", "_")
        subjects[file] = subject
        yield pages.page(
            file, subject, "`from accelerate.utils import ...`\n", "accelerate.utils", exported
        )
    yield "utils.md", "# accelerate.utils\n\n" + pages.contents(subjects)
    files = {
        "accelerator": "Accelerator",
        "accelerate": "The package accelerate",
        **MODULES,
        "utils": "accelerate.utils",
    }
    yield "index.md", "# Python API\n\n" + pages.contents(files)


def main(arguments: list[str]) -> int:
    """Write or check the pages; the exit code."""
    if "--api" in arguments:
        folder = FOLDER / "api"
        folder.mkdir(exist_ok=True)
        for name, text in api_pages():
            # Sphinx reads again what is newer than its output.
            if not (folder / name).exists() or (folder / name).read_text() != text:
                (folder / name).write_text(text)
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
        print(
            "run `python tools/reference.py`: these pages do not match their registries:",
            *differ,
            sep="\n  ",
        )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

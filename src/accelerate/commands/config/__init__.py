# SPDX-License-Identifier: Apache-2.0
"""`accelerate config`: questions, a default without questions, an update of older files, an explanation of values."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...config import launch_file
from ...config.launch_settings import Settings
from ...core import messages
from ...core.errors import ConfigurationError, suggestion
from ...core.files import check_writable
from ...core.objects import masked
from ...core.option import as_text
from ...core.options import PRECISIONS, options
from ...launchers.plan import plan
from ...launchers.spec import Program
from ..parser import Parser, print_error, table
from . import config_args, questions
from .config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from .default import write_basic_config
from .update import update_config_command

__all__ = [
    "ClusterConfig",
    "SageMakerConfig",
    "default_config_file",
    "load_config_from_file",
    "write_basic_config",
]

# The switch of a layout, and the words of `show` for it.
_LAYOUTS = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DeepSpeed",
    "use_megatron_lm": "Megatron-LM",
    "use_parallelism_config": "the sizes of parallelism_config",
}
ACTIONS = ("default", "update", "show", "explain")
HELP = """usage: accelerate config [--config_file FILE]
           answer questions and write a configuration
       accelerate config default [--config_file FILE] [--mixed_precision no|fp16|bf16|fp8]
           write one for this machine, without questions
       accelerate config update [--config_file FILE]
           rewrite an older file with the current keys
       accelerate config show [NAME ...] [--all] [--json] [launch options]
           show where and in which layout a launch runs, and the value and origin of each option
           that is set: a flag, a variable, a line of the file or the default.
           NAME: show only these options. --all: show all options. --json: print JSON.
           `explain` is another name of `show`

The default file is default_config.yaml in $HF_HOME/accelerate,
or $XDG_CACHE_HOME/huggingface/accelerate, or ~/.cache/huggingface/accelerate."""


def __getattr__(name: str) -> Any:
    if name == "default_config_file":
        return config_args.default_config_file
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: list[str] | None = None) -> None:
    """Run the command. Exit code 2 for what cannot be."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and not arguments[0].startswith("-"):
        action = arguments.pop(0)
    else:
        action = "questions"
    if "-h" in arguments or "--help" in arguments:
        print(HELP)
        return
    try:
        _run(action, arguments)
    except ConfigurationError as error:
        print_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        messages.show("interrupted; nothing was written")
        sys.exit(130)


def parser(action: str | None = None) -> Parser:
    """Return the parser of an action of `accelerate config`; without one, the parser of all, for completion.

    `show` takes the options of a launch instead.
    """
    made = Parser(prog=f"accelerate config {action}".removesuffix(" questions"), add_help=False)
    if action is None:
        made.add_argument("action", nargs="?", choices=ACTIONS)
    made.add_argument("--config_file", default=None)
    if action in (None, "default"):
        made.add_argument("--mixed_precision", default="no", choices=PRECISIONS)
    return made


def _run(action: str, arguments: list[str]) -> None:
    if action in ("show", "explain"):
        _explain(arguments)
        return
    if action not in (*ACTIONS, "questions"):
        meant = suggestion(action, ACTIONS)
        raise ConfigurationError(
            f"unknown action {action!r}{meant}: use one of {', '.join(ACTIONS)}, or none to "
            "answer questions"
        )
    args = parser(action).parse_args(arguments)
    if action == "default":
        path = write_basic_config(args.mixed_precision, args.config_file)
        if path:
            messages.show(f"wrote {path}")
    elif action == "update":
        update_config_command(args)
    else:
        if args.config_file:
            path = Path(args.config_file).expanduser()
        else:
            path = launch_file.default_file()
        check_writable(path, "config_file")
        path = questions.run(path)
        messages.show(f"wrote {path}")


class Row(NamedTuple):
    """An option, or an effect of several, as `show` shows it."""

    name: str
    value: Any
    origin: str


def explain(settings: Settings, everything: bool = False, names: Sequence[str] = ()) -> list[Row]:
    """Value and origin of options. Without `everything` they are what a launch does, and what was set.

    Args:
        settings: of a launch.
        everything: show all options.
        names: show these options only, including unset ones.
    """
    rows = [] if everything or names else _effects(settings)
    described = {*_LAYOUTS, *(row.name for row in rows)}
    for option in [options()[name] for name in names] or options().values():
        is_set = settings.chosen(option.name) and option.name not in described
        if everything or names or is_set:
            value = masked({option.name: settings[option.name]})[option.name]
            rows.append(Row(option.name, value, settings.origin(option.name)))
    return rows


def _effects(settings: Settings) -> list[Row]:
    """What a launch with these settings does."""
    spec = plan(settings, Program(__file__))  # the script does not matter

    def origin(*names: str) -> str:
        return next((settings.origin(name) for name in names if settings.chosen(name)), "default")

    layout = " and ".join(text for name, text in _LAYOUTS.items() if settings[name])
    if not layout and spec.num_processes > 1:
        layout = "DistributedDataParallel"
    elif not layout:
        layout = "one process, or what the script requests"
    precision = settings["mixed_precision"] or "no, or what the script requests"
    device = origin("cpu", "multi_gpu", "gpu_ids", "tpu", "engine")
    return [
        Row("device", spec.device, device),
        Row("num_processes", spec.num_processes, origin("num_processes")),
        Row("num_machines", spec.num_machines, origin("num_machines", "nnodes")),
        Row("mixed_precision", precision, origin("mixed_precision")),
        Row("layout", layout, origin(*_LAYOUTS)),
    ]


def _explain(arguments: list[str]) -> None:
    from ..launch import launch_command_parser, settings_of

    flags = [item for item in arguments if item not in ("--all", "--json")]
    words = []
    while flags and not flags[0].startswith("-"):
        words.append(flags.pop(0))
    args = launch_command_parser().parse_args([*flags, "script.py"])
    words += [args.training_script, *args.training_script_args][:-1]  # names after the flags
    names = [_option_name(word) for word in words]
    settings = settings_of(args)
    rows = explain(settings, "--all" in arguments, names)
    file = None
    if settings.file is not None:
        file = str(settings.file.path)
    if "--json" in arguments:
        print(json.dumps({"file": file, "options": [row._asdict() for row in rows]}, indent=1))
        return
    print(table([(row.name, _shown(row.value), row.origin) for row in rows]))
    print(f"\nfile: {file or 'none'}; --all shows all options")


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return as_text(value)


def _option_name(word: str) -> str:
    """The name of an option that is given as its name, key in a file, flag or variable."""
    flag = f"--{word.lstrip('-')}"
    for option in options().values():
        if word in (option.name, option.file_key, option.variable) or flag in option.spellings:
            return option.name
    raise ConfigurationError(
        f"unknown option {word!r}{suggestion(word.lstrip('-').replace('-', '_'), options())}. "
        "Option names come before flags; `accelerate config show --all` lists them"
    )

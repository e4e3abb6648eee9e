# SPDX-License-Identifier: Apache-2.0
"""The help of `accelerate launch`: the usual options, a topic, one option, or everything."""

from __future__ import annotations

import argparse
import textwrap

from ..core.errors import ConfigurationError, suggestion
from ..core.option import Group, Option
from ..core.options import GROUPS
from .parser import Parser, add_options, help_width

EXAMPLES = (
    (
        "on all accelerators of this machine, or on its CPU; the script has --epochs",
        "train.py --epochs 3",
    ),
    ("on four processes, in bfloat16", "--num_processes 4 --mixed_precision bf16 train.py"),
    ("with the model sharded over all processes", "--use_fsdp --fsdp_version 2 train.py"),
    ("with each weight matrix split over two processes", "--parallelism_config_tp_size 2 train.py"),
    (
        "on two machines; run it on the other one with --machine_rank 1",
        "--num_machines 2 --machine_rank 0 \\\n      --main_process_ip 10.0.0.1 train.py",
    ),
    ("as a Slurm batch job", "--engine slurm --num_processes 8 train.py"),
    (
        "show the commands and variables of the processes without starting them",
        "--dry_run train.py",
    ),
)


def text(parser: argparse.ArgumentParser, topic: str | None) -> str:
    """The help of a topic, of one option, of everything ("all"), or without a topic of the usual options.

    Raises:
        ConfigurationError: for an unknown topic.
    """
    if topic is None:
        return _usual(parser)
    if topic == "all":
        return f"{parser.format_help()}\n{_examples()}"
    word = topic.lower().lstrip("-").replace("-", "_")
    for group in GROUPS:
        if word == name_of(group).replace("-", "_"):
            return _options([group])
    flag = f"--{word}"
    for group in GROUPS:
        rows = tuple(option for option in group.options if flag in option.spellings)
        if rows:
            return _options([Group(f"a part of {name_of(group)}", "", rows)])
    names = [name_of(group) for group in GROUPS]
    flags: list[str] = []
    for group in GROUPS:
        for option in group.options:
            flags += [flag.lstrip("-") for flag in option.spellings]
    meant = suggestion(word, names) or suggestion(word, flags)
    if not meant:
        # A word of a long name, such as `mixed` of mixed_precision.
        first_with: dict[str, str] = {}
        for flag in flags:
            for part in flag.split("_"):
                first_with.setdefault(part, flag)
        part = suggestion(word, first_with, "{}")
        if part:
            meant = f" (did you mean {first_with[part]}?)"
    raise ConfigurationError(
        f"no topic or option {topic!r}{meant}; the topics are {', '.join(names)}, all"
    )


def name_of(group: Group) -> str:
    """The word by which the help of a topic is requested."""
    return group.title.lower()


def _usual(parser: argparse.ArgumentParser) -> str:
    rows: list[Option] = []
    for group in GROUPS:
        rows += [option for option in group.options if option.name in group.usual]
    column = max(len(name_of(group)) for group in GROUPS)
    indent = " " * (column + 4)
    topics = [
        textwrap.fill(
            group.help,
            help_width(),
            initial_indent=f"  {name_of(group):<{column}}  ",
            subsequent_indent=indent,
        )
        for group in GROUPS
    ]
    return "\n".join(
        [
            f"usage: {parser.usage}\n",
            textwrap.fill(parser.description or "", help_width()),
            "",
            _options([Group("common options", "", tuple(rows))]),
            _examples(),
            "topics (-h TOPIC shows its options, -h OPTION explains one, -h all shows all):",
            *topics,
            "",
        ]
    )


def _options(groups: list[Group]) -> str:
    """The part of a help message that lists options."""
    shown = Parser(add_help=False, usage=argparse.SUPPRESS)
    add_options(shown, groups)
    return shown.format_help().lstrip("\n")


def _examples() -> str:
    lines = [f"  # {what}\n  accelerate launch {line}" for what, line in EXAMPLES]
    return "\n".join(["examples:", *lines, ""])

# SPDX-License-Identifier: Apache-2.0
"""`accelerate completion SHELL`: print the completion script of a shell, which shtab writes from our parsers."""

from __future__ import annotations

import argparse
import importlib
import sys

from ..core.imports import is_available
from ..core.options import options
from .main import COMMANDS
from .parser import Parser, print_error

SHELLS = {
    "bash": "accelerate completion bash > ~/.local/share/bash-completion/completions/accelerate",
    "zsh": "accelerate completion zsh > ${fpath[1]}/_accelerate",
    "fish": "accelerate completion fish > ~/.config/fish/completions/accelerate.fish",
}


def command_line() -> argparse.ArgumentParser:
    """One parser with all commands and their options."""
    combined = argparse.ArgumentParser(prog="accelerate", add_help=False)
    combined.add_argument("-h", "--help", action="store_true", help="list the commands")
    combined.add_argument("-v", "--version", action="store_true", help="show the version")
    commands = combined.add_subparsers()
    for name, (module, what) in COMMANDS.items():
        inner = commands.add_parser(name, help=what, add_help=False)
        _take(inner, importlib.import_module(f".{module}", __package__).parser())
    return combined


def _take(inner: argparse.ArgumentParser, parser: argparse.ArgumentParser) -> None:
    """Give a sub-parser the arguments of a parser. Words after a positional argument complete as files."""
    import shtab

    for action in parser._actions:
        if (not action.option_strings and not action.choices) or _is_path(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        row = options().get(action.dest)
        if row is not None and row.choices and action.nargs is None:
            action.choices = list(row.choices)
        if action.nargs != argparse.REMAINDER:
            inner._add_action(action)


def _is_path(action: argparse.Action) -> bool:
    return action.dest.endswith(("_file", "_dir", "_path", "hostfile"))


def parser() -> Parser:
    """Return the parser of `accelerate completion`."""
    made = Parser(
        prog="accelerate completion",
        description="Print the completion script of a shell. "
        + " ".join(f"{name}: `{line}`." for name, line in SHELLS.items()),
    )
    made.add_argument("shell", choices=list(SHELLS))
    return made


def main(argv: list[str] | None = None) -> None:
    """Run `accelerate completion`. Exits with 1 without shtab."""
    shell = parser().parse_args(argv).shell
    if not is_available("shtab"):
        print_error("accelerate completion", "it needs shtab, which is not installed: pip install shtab")
        sys.exit(1)
    import shtab

    print(shtab.complete(command_line(), shell))

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
    """One parser with all commands and their options. Words after a positional argument complete as files."""
    import shtab

    combined = argparse.ArgumentParser(prog="accelerate", add_help=False)
    combined.add_argument("-h", "--help", action="store_true", help="list the commands")
    combined.add_argument("-v", "--version", action="store_true", help="show the version")
    commands = combined.add_subparsers()
    for name, (module, what) in COMMANDS.items():
        parser = importlib.import_module(f".{module}", __package__).parser()
        for action in parser.actions:
            is_path = action.dest.endswith(("_file", "_dir", "_path", "hostfile"))
            if is_path or not (action.option_strings or action.choices):
                action.complete = shtab.FILE
            row = options().get(action.dest)
            if row is not None and row.choices and action.nargs is None:
                action.choices = list(row.choices)
        commands.add_parser(name, help=what, parents=[parser], add_help=False)
    return combined


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
        print_error("it needs shtab, which is not installed: pip install shtab")
        sys.exit(1)
    import shtab

    print(shtab.complete(command_line(), shell))

# SPDX-License-Identifier: Apache-2.0
"""Prompts of a terminal: a list to choose from by number, a line of text."""

from __future__ import annotations

import select
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ...core.errors import ConfigurationError

BACK = object()


def choose(title: str, options: Sequence[tuple[Any, str]], default: Any, help: str = "") -> Any:
    """The value of the option chosen, or BACK. `options` are values with their words; `?` shows `help`."""
    values = [value for value, _ in options]
    print(title)
    for number, (_, text) in enumerate(options):
        print(f"  {number}: {text}")

    def check(text: str) -> int:
        if not text.isdigit() or int(text) >= len(options):
            raise ValueError(
                f"give a number from 0 to {len(options) - 1}, ? for help, or < to go back"
            )
        return int(text)

    number = line("number", values.index(default) if default in values else 0, check, help)
    if number is BACK:
        return BACK
    return values[number]


def line(title: str, default: Any, check: Callable[[str], Any], help: str = "") -> Any:
    """The value that `check` makes of a typed line, repeated until it accepts one; or BACK. Empty is the default.

    `<` and `back` go back, and `?` shows `help`.
    """
    shown = f" [{default}]" if default not in (None, "") else ""
    while True:
        try:
            print(f"{title}{shown}: ", end="", flush=True)
            # `input` waits on when a Ctrl-C comes between its look at signals and its read of a terminal.
            while sys.stdin.isatty() and not select.select([sys.stdin], [], [], 0.25)[0]:
                pass
            text = input().strip()
        except EOFError:
            if sys.stdin.isatty():  # Ctrl-D, the same wish as Ctrl-C
                raise KeyboardInterrupt from None
            raise ConfigurationError(
                "the input ended before all questions were answered; `accelerate config default` has none"
            ) from None
        if text in ("<", "back"):
            return BACK
        if text == "?":
            keys = "Enter takes the default, < or back returns to the question before, Ctrl-C ends without writing."
            print(textwrap.indent(textwrap.fill(f"{help} {keys}".strip(), 90), "  "))
            continue
        if not text:
            return default
        try:
            return check(text)
        except (ConfigurationError, ValueError) as error:
            print(f"  {error}")

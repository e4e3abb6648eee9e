# SPDX-License-Identifier: Apache-2.0
"""Prompts of a terminal: a list to choose from with the arrow keys, or by number without them; a line of text."""

from __future__ import annotations

import os
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ...core.errors import ConfigurationError

BACK = object()
_KEYS = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[D": "back", b"\x1bOD": "back"}


def choose(title: str, options: Sequence[tuple[Any, str]], default: Any, help: str = "") -> Any:
    """The value of the option chosen, or BACK. `options` are values with their words; `?` shows `help`."""
    values = [value for value, _ in options]
    start = values.index(default) if default in values else 0
    if _has_keys():
        picked = _with_keys(title, [words for _, words in options], start, help)
    else:
        picked = _by_number(title, [words for _, words in options], start, help)
    return BACK if picked is None else values[picked]


def line(title: str, default: Any, check: Callable[[str], Any], help: str = "") -> Any:
    """The value that `check` makes of a typed line, repeated until it accepts one; or BACK. Empty is the default.

    `<` and `back` go back, and `?` shows `help`.
    """
    while True:
        shown = f" [{default}]" if default not in (None, "") else ""
        text = _input(f"{title}{shown}: ").strip()
        if text in ("<", "back"):
            return BACK
        if text == "?":
            print(_help_lines(help))
            continue
        if not text:
            return default
        try:
            return check(text)
        except (ConfigurationError, ValueError) as error:
            print(f"  {error}")


def _input(prompt: str) -> str:
    print(prompt, end="", flush=True)
    terminal = sys.stdin.isatty()
    try:
        if terminal and os.name == "posix":
            _wait_for_input()
        return input()
    except EOFError:
        if terminal:
            # Ctrl-D, the same wish as Ctrl-C.
            raise KeyboardInterrupt from None
        raise ConfigurationError(
            "the input ended before all questions were answered; `accelerate config default` has none"
        ) from None


def _wait_for_input() -> None:
    """Wait until the terminal has input. Ctrl-C raises KeyboardInterrupt, also just before the wait begins.

    A blocking read does not see a signal that arrives after the interpreter's last check for signals: it would go on
    until the next key. Here each signal writes into a pipe, which ends the wait.
    """
    woken, alarm = os.pipe()
    os.set_blocking(alarm, False)
    former = signal.set_wakeup_fd(alarm)
    try:
        # A handler that does not raise leaves its bytes in the pipe.
        while sys.stdin not in select.select([sys.stdin, woken], [], [])[0]:
            os.read(woken, 64)
    finally:
        signal.set_wakeup_fd(former)
        os.close(woken)
        os.close(alarm)


def _has_keys() -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.name != "posix":
        return False
    from ...core import env

    return env.get("TERM", "dumb") != "dumb"


def _help_lines(help: str) -> str:
    keys = "Enter takes the default, < or back returns to the question before, Ctrl-C ends without writing."
    return textwrap.indent("\n".join(textwrap.wrap(f"{help} {keys}".strip(), 90)), "  ")


def _by_number(title: str, words: Sequence[str], start: int, help: str) -> int | None:
    print(title)
    for number, text in enumerate(words):
        print(f"  {number}: {text}")

    def check(text: str) -> int:
        if not text.isdigit() or int(text) >= len(words):
            raise ValueError(f"give a number from 0 to {len(words) - 1}, ? for help, or < to go back")
        return int(text)

    picked = line("number", start, check, help)
    return None if picked is BACK else int(picked)


def _with_keys(title: str, words: Sequence[str], start: int, help: str) -> int | None:
    """Arrow keys move, Enter or a digit chooses, the left arrow goes back, `?` shows the help."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    print(f"{title}  (arrow keys, Enter; left arrow: back; ?: help)")
    current = start
    _draw(words, current)
    try:
        tty.setcbreak(descriptor)
        while True:
            _wait_for_input()
            key = os.read(descriptor, 8)
            if key in (b"", b"\x03", b"\x04"):
                # The terminal is gone, or Ctrl-D: the same wish as Ctrl-C.
                raise KeyboardInterrupt
            action = _KEYS.get(key)
            if action == "back" or key == b"<":
                return None
            if key in (b"\n", b"\r"):
                return current
            if key.isdigit() and int(key) < len(words):
                current = int(key)
            elif action in ("up", "down") or key in (b"k", b"j"):
                current = (current + (-1 if action == "up" or key == b"k" else 1)) % len(words)
            if key == b"?":
                print(_help_lines(help))
            else:
                sys.stdout.write(f"\x1b[{len(words)}A")
            _draw(words, current)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _draw(words: Sequence[str], current: int) -> None:
    for number, text in enumerate(words):
        sys.stdout.write(f"\x1b[2K{'> ' if number == current else '  '}{text}\n")
    sys.stdout.flush()

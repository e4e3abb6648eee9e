# SPDX-License-Identifier: Apache-2.0
"""Argument parsers of the commands: built from option tables, readable help, the nearest flag for an unknown one."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from ..config.launch_settings import GIVEN
from ..core import messages
from ..core.errors import ConfigurationError, suggestion
from ..core.option import Group, Option, as_text


def help_width() -> int:
    """Columns of a help message. Longer lines are hard to read on a wide terminal."""
    return min(shutil.get_terminal_size().columns - 2, 98)


class Formatter(argparse.HelpFormatter):
    """One spelling of each flag, its value's name short, defaults shown where there is one worth it."""

    def __init__(self, prog: str, width: int | None = None) -> None:
        super().__init__(
            prog,
            max_help_position=30,
            width=width or help_width(),
        )

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _value_of(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [
            name
            for name in action.option_strings
            if "-" not in name[2:] or "_" not in "".join(action.option_strings)
        ]
        value = str(action.metavar or _value_of(action))
        if action.choices is not None:
            value = _listed([str(choice) for choice in action.choices])
        if action.nargs is None and action.const is not None:
            return f"{', '.join(names)}[={value}]"
        values = {None: f" {value}", 0: "", "?": f" [{value}]"}.get(action.nargs, f" {value} ...")
        return ", ".join(names) + values


def _listed(choices: Sequence[str]) -> str:
    """The choices as an option's value, if that is short."""
    text = "{" + ",".join(choices) + "}"
    if len(text) <= 24:
        return text
    return "NAME"


def has_colour(stream: TextIO) -> bool:
    """Whether to color what a stream shows: on a terminal, unless NO_COLOR is set; FORCE_COLOR colors files too."""
    from ..core import env

    if env.get("NO_COLOR"):
        return False
    return bool(env.get("FORCE_COLOR")) or (stream.isatty() and env.get("TERM", "dumb") != "dumb")


def coloured_help(text: str) -> str:
    """The text of a help message with bold headings and colored flags."""
    text = re.sub(r"(?m)^(\S[^\n]*:)$", "\x1b[1m\\1\x1b[0m", text)
    text = re.sub(r"\Ausage:", "\x1b[1musage:\x1b[0m", text)
    return re.sub(r"(?m)^  ((?:--?[\w-]+)(?:, --?[\w-]+)*)", "  \x1b[36m\\1\x1b[0m", text)


def print_error(message: object) -> None:
    """Print an error on stderr. For an OSError of a file this is its name and the reason."""
    if isinstance(message, OSError) and message.filename is not None:
        message = f"{message.filename} cannot be read or written: {message.strerror}"
    if has_colour(sys.stderr):
        error = "\x1b[31merror:\x1b[0m"
    else:
        error = "error:"
    messages.show(f"{error} {message}")


@contextlib.contextmanager
def exit_on(*errors: type[Exception], code: int = 2) -> Iterator[None]:
    """Print an error of these kinds that the block raises, and exit."""
    try:
        yield
    except errors as error:
        print_error(error)
        sys.exit(code)


class Parser(argparse.ArgumentParser):
    """argparse's parser with our help and errors: what is wrong, the nearest flag, exit code 2.

    `foreign` has options of another program, without their dashes and with underscores, and what replaces each here.
    """

    def __init__(
        self, *args: Any, foreign: Mapping[str, str] = types.MappingProxyType({}), **kwargs: Any
    ) -> None:
        self.foreign = foreign
        kwargs.setdefault("formatter_class", Formatter)
        # A script's own arguments come after it; argparse would hold them against our flags' abbreviations.
        kwargs.setdefault("allow_abbrev", False)
        self.actions: list[argparse.Action] = []
        self.flags: dict[str, argparse.Action] = {}
        self._words: Sequence[str] = ()
        super().__init__(*args, **kwargs)
        self.color = False  # argparse of Python 3.14 has its own colours

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument, as argparse does, and keep it by its flags. A flag may be written with hyphens too."""
        hyphened = [
            flag.replace("_", "-") for flag in args if flag.startswith("--") and "_" in flag
        ]
        action = super().add_argument(*args, *hyphened, **kwargs)
        self.record(action)
        return action

    def record(self, action: argparse.Action) -> None:
        """Take note of an argument that was added to a group of this parser."""
        self.actions.append(action)
        self.flags.update(dict.fromkeys(action.option_strings, action))

    def print_help(self, file: Any = None) -> None:
        """Print the help, with colors on a terminal."""
        text = self.format_help()
        file = sys.stdout if file is None else file
        file.write(coloured_help(text) if has_colour(file) else text)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. For an unknown one, the error suggests the nearest option."""
        self._words = sys.argv[1:] if args is None else list(args)
        parsed, extra = self.parse_known_args(self._with_bare_values(), namespace)
        if extra:
            self.error(self._unknown(extra[0]))
        return parsed

    def _with_bare_values(self) -> list[str]:
        """The words; before the first positional one, `--flag` of an option with a bare value is `--flag=VALUE`.

        So is an option whose value begins with a hyphen and is no option of this parser, which argparse would refuse.
        """
        words: list[str] = []
        remaining = iter(self._words)
        for word in remaining:
            action = self.flags.get(word)
            if action is not None and action.nargs is None and action.const is not None:
                word = f"{word}={action.const}"
            words.append(word)
            if action is not None and action.nargs is None and action.const is None:
                value = next(remaining, None)
                if (
                    value is not None
                    and value.startswith("-")
                    and value.split("=")[0] not in self.flags
                ):
                    words[-1] = f"{word}={value}"
                elif value is not None:
                    words.append(value)
            elif not word.startswith("-"):
                break
        return [*words, *remaining]

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        flag = word.split("=", 1)[0]
        instead = self.foreign.get(flag.lstrip("-").replace("-", "_"))
        if instead:
            return f"unknown option {flag}: {instead}"
        hint = suggestion(flag, self.flags) or f"; see {self.prog} -h"
        if any(action.nargs == argparse.REMAINDER for action in self.actions):
            hint += "; the script's own options follow its name"
        return f"unknown option {flag}{hint}"

    def error(self, message: str) -> NoReturn:
        """Print a message and exit with code 2."""
        # argparse lists all spellings of an option; the first is enough. Our own texts about its value name it.
        message = re.sub(r"^argument (.+?)(/--[\w-]+)*: (value(?==| must be ))?", _subject, message)
        message = re.sub(r"(--[\w-]+)(/--[\w-]+)+", r"\1", message)
        if message.startswith("the following arguments are required"):
            # A mistyped option is the cause, if its value or what follows was to be the argument.
            options = (word for word in self._words if word.startswith("--") and word != "--")
            unknown = next(
                (word for word in options if word.split("=", 1)[0] not in self.flags), None
            )
            if unknown is None:
                message = f"{message}; see {self.prog} -h"
            else:
                message = self._unknown(unknown)
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            message += suggestion(choice[1], re.findall(r"[\w.-]+", choice[2]))
        if message.endswith("expected one argument"):
            message += "; write a value that begins with a hyphen as --option=VALUE"
        print_error(message)
        raise SystemExit(2)


def command_parser(
    name: str,
    description: str,
    run: Callable[[argparse.Namespace], object],
    subparsers: Any = None,
    foreign: Mapping[str, str] = types.MappingProxyType({}),
    **more: Any,
) -> argparse.ArgumentParser:
    """The parser of `accelerate name`; as a sub-command, whose `func` is `run`, where `subparsers` is given."""
    if subparsers is None:
        return Parser(prog=f"accelerate {name}", description=description, foreign=foreign, **more)
    made: argparse.ArgumentParser = subparsers.add_parser(
        name, description=description, allow_abbrev=False, formatter_class=Formatter, **more
    )
    made.set_defaults(func=run)
    return made


def _subject(found: re.Match[str]) -> str:
    if found[3]:
        return found[1]
    return f"{found[1]}: "


class Store(argparse.Action):
    """Stores a value and notes that it was given, which distinguishes it from a default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value of an option in the namespace."""
        if self.nargs == 0:
            values = self.const
        elif self.metavar == "ITEM":
            values = [*(getattr(namespace, self.dest) or []), values]
        setattr(namespace, self.dest, values)
        setattr(namespace, GIVEN, getattr(namespace, GIVEN, frozenset()) | {self.dest})


def add_options(parser: argparse.ArgumentParser, groups: Sequence[Group]) -> None:
    """Add the flags of option tables, group by group."""
    for group in groups:
        section = parser.add_argument_group(group.title, group.help)
        for option in group.options:
            values: dict[str, Any] = {"nargs": 0, "const": True}
            if option.kind != "switch":
                values = {
                    "type": _reader(option),
                    "metavar": _metavar(option),
                    "const": option.bare or None,
                }
            action = section.add_argument(
                *option.spellings,
                dest=option.name,
                action=Store,
                default=option.default,
                help=_help(option),
                **values,
            )
            if isinstance(parser, Parser):
                parser.record(action)


def _path(name: str) -> str:
    """What help shows for an option whose name says that it takes a file or folder; empty for others."""
    if name.endswith(("_file", "hostfile")):
        return "FILE"
    if name.endswith(("folder", "_dir", "nvme_path")):
        return "FOLDER"
    return ""


def _value_of(action: argparse.Action) -> str:
    if action.type in (int, float):
        return "N"
    return _path(action.dest) or "VALUE"


def _metavar(option: Option) -> str:
    if option.choices:
        return _listed(option.choices)
    kinds = {"int": "N", "count": "N", "float": "X", "truth": "{true,false}", "list": "ITEM"}
    return kinds.get(option.kind) or _path(option.name) or "TEXT"


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if _metavar(option) == "NAME" and not all(choice in option.help for choice in option.choices):
        text += f" One of {', '.join(option.choices)}."
    if option.default is None or option.default is False or option.default == "":
        return text
    return f"{text} Default: {as_text(option.default)}."


def _reader(option: Option) -> Callable[[str], Any]:
    """Turns a flag's text into the option's type, with its own words where it does not fit."""

    def read(text: str) -> Any:
        if option.kind == "list":
            return text
        try:
            value = option.convert(text, where="value")
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        # The API's parser hands truth values on as words.
        if option.kind == "truth":
            if value:
                return "true"
            return "false"
        return value

    return read


def table(rows: Sequence[Sequence[str]], headers: Sequence[str] = ()) -> str:
    """Rows of text in aligned columns. With headers the first column is at the left and the others are figures."""
    lines = [headers, *rows] if headers else [*rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if headers:
        lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if headers and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

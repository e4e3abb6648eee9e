# SPDX-License-Identifier: Apache-2.0
"""`accelerate report RUN -o report.html`: a recorded run in one file, with a summary in words."""

from __future__ import annotations

from pathlib import Path

from ..core import messages
from ..core.errors import ConfigurationError
from ..core.files import atomic_write, check_writable
from ..core.objects import size_of
from .parser import Parser, exit_on

FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}


def parser() -> Parser:
    """Return the parser of `accelerate report`."""
    made = Parser(
        prog="accelerate report",
        description="Summarize a recorded run in one file: where the time went, which ranks were "
        "slow, and what to try. An HTML report is the page of `accelerate monitor` "
        "with its data embedded.",
    )
    made.add_argument("run", metavar="RUN", help="Folder of a run.")
    made.add_argument(
        "-o", "--output", metavar="FILE", help="File to write. Default: print the report."
    )
    made.add_argument(
        "--format",
        choices=("html", "md", "json"),
        help="Format of the report. Default: from the extension of FILE, or md.",
    )
    made.add_argument(
        "--json", action="store_const", dest="format", const="json", help="Same as --format json."
    )
    return made


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 1 if the run cannot be read or the file not be written."""
    options = parser().parse_args(arguments)
    suffix = Path(options.output or "").suffix.lower()
    kind = options.format or FORMATS.get(suffix, "md" if options.output is None else None)
    with exit_on(ConfigurationError):
        if options.output is not None:
            check_writable(options.output, "--output")
        if kind is None:
            raise ConfigurationError(
                f"--output={options.output!r}: unknown format. End the name in .html, .md or "
                ".json, or add --format"
            )
    with exit_on(ConfigurationError, OSError, code=1):
        from ..monitor import report
        from ..monitor.run import open_runs

        (run,) = open_runs([options.run])
        run.read_all()
        if run.is_empty:
            raise ConfigurationError(
                "; ".join([f"{run.folder} does not contain recorded steps", *run.notes()])
            )
        text = {"html": report.html, "md": report.markdown, "json": report.to_json}[kind](run)
        if options.output is None:
            print(text, end="")
            return
        data = text.encode(errors="replace")
        with atomic_write(Path(options.output).expanduser()) as file:
            file.write(data)
    messages.show(f"wrote {options.output}, {size_of(len(data))}")

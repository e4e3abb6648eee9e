# SPDX-License-Identifier: Apache-2.0
"""Values of a run as lines of JSON in its folder: no package, account or server is needed."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..core.errors import ConfigurationError
from ..core.files import atomic_write, open_regular, user_path
from .base import ClientTracker, checked, flat, number, on_main_process

logger: logging.Logger = logging.getLogger(__name__)


class LocalTracker(ClientTracker):
    """Writes `values.jsonl` and `config.json` to `logging_dir/run_name`.

    A line of `values.jsonl` is `{"time": seconds since 1970, "step": step, "values": {name: number or text}}`, or
    `{"time": ..., "event": "start"}` and `"end"`. Names of nested mappings are joined by `/`. Numbers that JSON does
    not have are the texts "nan", "inf" and "-inf". A run that continues appends to the file: of two lines for one
    step, the later one is valid. A line is written to the operating system before `log` returns, so that a
    killed process does not lose it.

    Args:
        run_name: the name of the run's folder.
        logging_dir: the folder of all runs.
    """

    name = "local"
    requires_logging_directory = True
    # A line is written before `log` returns, in microseconds.
    background = False

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__(run_name)
        self.folder: Path = user_path(logging_dir, "logging_dir") / run_name
        self._is_delayed = False

    def _open(self) -> TextIO:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "values.jsonl"
        # A name of a file may have bytes that are no text: JSON escapes these.
        # `_close` closes it.
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        file = open(descriptor, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        with open(path, "rb") as written:
            content = written.seek(0, os.SEEK_END)
            written.seek(max(0, content - 1))
            if written.read() not in (b"", b"\n"):
                # A process was killed within a line.
                file.write("\n")
        self._write(file, {"event": "start"})
        return file

    def _close(self, client: TextIO) -> None:
        self._write(client, {"event": "end"})
        client.close()

    def finish_at_exit(self) -> None:
        """Close the file."""
        self.finish()

    def _write(self, file: TextIO, record: dict[str, Any]) -> None:
        file.write(json.dumps({"time": round(time.time(), 3), **record}, ensure_ascii=False) + "\n")
        try:
            file.flush()
        except OSError as error:
            # Only this process logs: its failure would end the run while the others wait.
            if not self._is_delayed:
                logger.warning(
                    f"{self.folder / 'values.jsonl'} cannot be written: {error.strerror}. The run continues, and the "
                    "values are written when they can be"
                )
            self._is_delayed = True
        else:
            self._is_delayed = False

    def _store(self, values: dict[str, Any]) -> None:
        text = json.dumps(_finite(values), indent=2, ensure_ascii=False)
        with atomic_write(self.folder / "config.json") as file:
            file.write(text.encode("utf-8", "backslashreplace"))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and text.

        Args:
            values: {name: number, text, or mapping of them}.
            step: the training step.
            kwargs: none is accepted.
        """
        if kwargs:
            raise TypeError(
                f"the local tracker's log does not take the argument {', '.join(kwargs)}"
            )
        numbers = {}
        for name, value in flat(checked(values, "log")):
            logged = value if isinstance(value, str) else number(value)
            if logged is None:
                self._warn_unsupported(name, value, "numbers, text and mappings of them")
            else:
                numbers[name] = _finite(logged)
        if numbers:
            self._write(self.tracker, {"step": _step(step), "values": numbers})


def _step(step: Any) -> int | float | None:
    """A step as a number: whole, or a fraction (of an epoch, for example)."""
    if step is None:
        return None
    try:
        if int(step) == float(step):
            return int(step)
        return float(step)
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"log(..., step={step!r}): use a number or None") from None


def _finite(value: Any) -> Any:
    """The value with numbers that JSON does not have as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_values(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the lines of a run's `values.jsonl` that hold values, one for each step, in the order of the file.

    Args:
        folder: the run's folder.

    Returns:
        The records. A line that a killed process left incomplete is left out.

    Raises:
        FileNotFoundError: the folder has no `values.jsonl`.
    """
    rows: dict[object, dict[str, Any]] = {}
    path = Path(folder, "values.jsonl")
    with open(path, encoding="utf-8", errors="replace", opener=open_regular) as file:
        for number_of_line, line in enumerate(file):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, Mapping) and isinstance(record.get("values"), dict):
                step = record.get("step")
                if step is None:
                    key = (number_of_line,)
                else:
                    key = (step, *sorted(record["values"]))
                rows.pop(key, None)
                rows[key] = dict(record)
    return list(rows.values())

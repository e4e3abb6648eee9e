# SPDX-License-Identifier: Apache-2.0
"""A terminal's screen, as much of it as a panel below scrolling output needs: what a person reads."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b(?:\[(?P<arguments>[?\d;]*)(?P<final>[A-Za-z])|(?P<single>[78D]))")


class Screen:
    """Lines and a cursor. `history` are the lines that scrolled out at the top."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.height = columns, lines
        self.rows = [""] * lines
        self.history: list[str] = []
        self.row = self.column = 0
        self.rest = ""
        self.saved = (0, 0)
        self.region = (0, lines - 1)

    @property
    def text(self) -> list[str]:
        """All lines, those that scrolled out first."""
        return [line.rstrip() for line in (*self.history, *self.rows)]

    def feed(self, text: str) -> None:
        """Show output. An escape sequence may continue in the next piece."""
        text, self.rest = self.rest + text, ""
        position = 0
        while position < len(text):
            found = _ESCAPE.match(text, position)
            if found:
                position = found.end()
                self._escape(found)
            elif text[position] == "\x1b" and len(text) - position < 12:
                self.rest = text[position:]
                return
            else:
                self._character(text[position])
                position += 1

    def _character(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self.column = 0
        else:
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        top, bottom = self.region
        if self.row != bottom:
            self.row = min(self.row + 1, self.height - 1)
            return
        line = self.rows.pop(top)
        if top == 0:
            self.history.append(line)
        self.rows.insert(bottom, "")

    def _escape(self, found: re.Match[str]) -> None:
        single, final = found["single"], found["final"]
        numbers = [int(part) if part.isdigit() else 0 for part in (found["arguments"] or "").split(";")]
        if single == "7":
            self.saved = self.row, self.column
        elif single == "8":
            self.row, self.column = self.saved
        elif single == "D":
            self._down()
        elif final == "A":
            self.row = max(0, self.row - max(1, numbers[0]))
        elif final == "H":
            self.row, self.column = max(1, numbers[0]) - 1, max(1, (*numbers, 1)[1]) - 1
        elif final == "K":
            self.rows[self.row] = self.rows[self.row][: self.column]
        elif final == "J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            self.rows[self.row + 1 :] = [""] * (self.height - self.row - 1)
        elif final == "r":
            self.region = (max(1, numbers[0]) - 1, (numbers[1] if len(numbers) > 1 else self.height) - 1)
            self.row = self.column = 0
        elif final not in ("m", "h", "l"):
            raise ValueError(f"the screen does not know {found.group()!r}")

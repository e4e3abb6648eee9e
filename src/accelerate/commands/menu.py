# SPDX-License-Identifier: Apache-2.0
"""`accelerate.commands.menu`: a choice on the terminal, under the API's name."""

from __future__ import annotations

from collections.abc import Sequence

from .config import questions


class BulletMenu:
    """A list of choices.

    Args:
        prompt: the line above the choices.
        choices: their texts.
    """

    def __init__(self, prompt: str | None = None, choices: Sequence[str] = ()) -> None:
        self.prompt = prompt
        self.choices: list[str] = list(choices)

    def run(self, default_choice: int = 0) -> int:
        """Return the index of the choice. An empty answer is `default_choice`."""
        options = list(enumerate(self.choices))
        while True:
            index = questions.choose(self.prompt or "", options, default_choice)
            if index is not questions.BACK:
                return int(index)

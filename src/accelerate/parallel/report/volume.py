# SPDX-License-Identifier: Apache-2.0
"""What a rank sends in an optimizer step, by kind of message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommunicationVolume:
    """Messages of one kind that a rank sends in an optimizer step.

    Fields:
        what: the collective and what it carries.
        messages: how many; None where another library decides that.
        sent: their total bytes.
        unit: what `sent` is counted per, for example " a token".
        about: an upper bound where `messages` is None; otherwise the number of messages is an estimate.
    """

    what: str
    messages: int | None
    sent: float
    unit: str = ""
    about: bool = False


class VolumeCounter:
    """Adds up messages by kind. Those of one kind have one unit."""

    def __init__(self, unit: str = "") -> None:
        self.unit = unit
        self._counts: dict[str, tuple[int, float]] = {}

    def add(self, what: str, sent: float, messages: int = 1) -> None:
        """Count messages of a kind that have so many bytes in all."""
        before = self._counts.get(what, (0, 0))
        self._counts[what] = (before[0] + messages, before[1] + sent)

    def volumes(self, about: str | None = None) -> list[CommunicationVolume]:
        """The messages by kind. The number of those of the kind `about` is an estimate."""
        return [
            CommunicationVolume(what, messages, sent, self.unit, what == about)
            for what, (messages, sent) in self._counts.items()
        ]

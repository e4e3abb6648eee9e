# SPDX-License-Identifier: Apache-2.0
"""The other machines of a run, as the one that watches this machine's ranks sees them. The base knows of none."""

from __future__ import annotations

import socket
from collections.abc import Callable

# What a machine does when its ranks must end for another one's sake: reason, exit code, whether the run ends for good.
Stop = Callable[[str, int, bool], None]


class Others:
    """`settle`: seconds in which another machine may turn out to be the cause of a failure here.

    `interval`: seconds between two calls of `tick` at most.
    """

    settle = 5.0
    interval = 1.0

    def callbacks(self, stop: Stop) -> list[tuple[socket.socket, Callable[[], bool]]]:
        """Sockets to wait for, and what to call when one is readable; the call says whether it stays open."""
        return []

    def tick(self, stop: Stop) -> None:
        """Called time and again while the ranks run."""

    def failed(self, told: str, code: int, final: bool = False) -> None:
        """Tell the others what failed here; `final` where the run must not be started again."""

    def finished(self) -> list[str]:
        """The machines whose ranks have all ended without an error, by their names."""
        return []

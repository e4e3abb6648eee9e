# SPDX-License-Identifier: Apache-2.0
"""Waiting for another machine or for resources, with messages about what is missing."""

from __future__ import annotations

import socket
import time

from ..core import messages
from ..core.errors import LaunchError


class Waiting:
    """The time of a wait, and when to report it: after three seconds, then at intervals that double."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = 3.0

    @property
    def seconds(self) -> float:
        """The time since the beginning of the wait."""
        return time.monotonic() - self._began

    def is_due(self) -> bool:
        """Whether to report the wait now."""
        if self.seconds <= self._next:
            return False
        self._next *= 2
        return True


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connect to the launcher of the machine that the others meet at, and wait until it is there.

    Raises:
        LaunchError: it does not answer within `timeout` seconds.
    """
    waiting = Waiting()
    while True:
        try:
            return socket.create_connection((host, port), timeout=2.0)
        except OSError as error:
            if waiting.seconds > timeout:
                raise LaunchError(
                    f"{host}:{port} did not answer within {timeout:.0f} s: {error}"
                ) from None
            if waiting.is_due():
                messages.show(
                    f"{host}:{port} does not answer yet ({error}): is it started, and is the address right?"
                )
            time.sleep(0.2)

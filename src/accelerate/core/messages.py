# SPDX-License-Identifier: Apache-2.0
"""What this package prints on standard error: messages and warnings that begin with its name."""

from __future__ import annotations

import contextlib
import sys

PREFIX = "accelerate: "


def show(text: str) -> None:
    """Print a message. A console that is gone, or a full disk, must not change how the run ends."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX}{text}", file=sys.stderr, flush=True)


def warn(text: str, category: type[Warning] = UserWarning, every_rank: bool = False) -> None:
    """Issue a Python warning at the line of the user's code that called into this package, on rank 0.

    Args:
        text: the warning.
        category: its class.
        every_rank: warn on all ranks: what the warning says may differ between them.
    """
    # Imported here: most launches have nothing to warn of, and start faster.
    import warnings

    from .errors import ConfigurationError
    from .stacks import user_frame
    from .topology import Topology

    # Variables that contradict each other are an error of the run's start, not of this warning.
    with contextlib.suppress(ConfigurationError):
        if Topology.from_environment().rank and not every_rank:
            return
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(f"{PREFIX}{text}", category, frame.f_code.co_filename, frame.f_lineno, registry=registry)

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


def is_rank_0() -> bool:
    """Whether this process issues the messages that are the same on all ranks. It is known before the run starts.

    The processes that torch_xla starts on a machine have no other rank until the device is in use.
    """
    from . import env
    from .errors import ConfigurationError
    from .topology import Topology

    # Variables that contradict each other are an error of the run's start, not of its messages.
    with contextlib.suppress(ConfigurationError):
        topology = Topology.from_environment()
        return topology.rank == 0 and (
            topology.launcher != "none" or not env.get_int("PJRT_LOCAL_PROCESS_RANK")
        )
    return True


def warn(text: str, category: type[Warning] = UserWarning, every_rank: bool = False) -> None:
    """Issue a Python warning at the line of the user's code that called into this package, on rank 0.

    Args:
        text: the warning.
        category: its class.
        every_rank: warn on all ranks: what the warning says may differ between them.
    """
    # Imported here: most launches have nothing to warn of, and start faster.
    import warnings

    from .stacks import user_frame

    if not every_rank and not is_rank_0():
        return
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        f"{PREFIX}{text}", category, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )

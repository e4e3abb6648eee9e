# SPDX-License-Identifier: Apache-2.0
"""The kinds of launchers, one line each, and which of them a launch needs."""

from __future__ import annotations

from .base import Launcher
from .local import LocalLauncher
from .spec import LaunchSpec


def choose(spec: LaunchSpec, in_place: bool = False) -> Launcher:
    """The launcher for a spec, checked. `in_place`: a lone process may take over this one."""
    if spec.num_machines > 1:
        from .static import StaticLauncher

        launcher: Launcher = StaticLauncher(spec)
    else:
        launcher = LocalLauncher(spec, in_place)
    launcher.check()
    return launcher

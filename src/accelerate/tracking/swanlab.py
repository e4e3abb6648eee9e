# SPDX-License-Identifier: Apache-2.0
"""SwanLab."""

from __future__ import annotations

from .base import ImageRunTracker


class SwanLabTracker(ImageRunTracker):
    """Logs to SwanLab.

    Args:
        run_name: the name of the project.
        kwargs: passed to `swanlab.init`.
    """

    name = "swanlab"
    # It sends values from a thread of its own, and its hooks for errors and Ctrl-C close the run before ours could log
    # the values that wait in another one.
    background = False

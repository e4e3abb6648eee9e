# SPDX-License-Identifier: Apache-2.0
"""SwanLab."""

from __future__ import annotations

from .runs import ImageRunTracker


class SwanLabTracker(ImageRunTracker):
    """Logs to SwanLab.

    Args:
        run_name: the name of the project.
        kwargs: passed to `swanlab.init`.
    """

    name = "swanlab"

# SPDX-License-Identifier: Apache-2.0
"""SwanLab."""

from __future__ import annotations

from .runs import ImageRunTracker


class SwanLabTracker(ImageRunTracker):
    """Logs to the project `run_name`; `kwargs` go to `swanlab.init`."""

    name = "swanlab"

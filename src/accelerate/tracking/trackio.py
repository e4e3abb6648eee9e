# SPDX-License-Identifier: Apache-2.0
"""Trackio: a local dashboard with the interface of wandb."""

from __future__ import annotations

from .base import RunTracker


class TrackioTracker(RunTracker):
    """Logs to Trackio.

    Args:
        run_name: the name of the project.
        kwargs: passed to `trackio.init`.
    """

    name = "trackio"
    _run_key_attribute = "name"
    _resume_argument = "name"

# SPDX-License-Identifier: Apache-2.0
"""Trackio: a local dashboard with the calls of wandb."""

from __future__ import annotations

from typing import Any

from .base import named
from .runs import RunTracker


class TrackioTracker(RunTracker):
    """Logs to the project `run_name`; `kwargs` go to `trackio.init`."""

    name = "trackio"

    def _id_of(self, client: Any) -> str | None:
        return named(client, "name")

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"name": run_id, "resume": "allow"}

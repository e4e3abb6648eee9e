# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers: their base classes, those of the services, and the table of names that `log_with` takes."""

from ..core.enums import LoggerType
from ..core.lazy import attach

EXPORTS = {
    "tracking.base": ["GeneralTracker", "logger", "on_main_process"],
    "tracking.local": ["LocalTracker", "read_values"],
    "tracking.registry": [
        "LOGGER_TYPE_TO_CLASS",
        "filter_trackers",
        "get_available_trackers",
        "register_tracker_class",
        "start_trackers",
    ],
}
for kind in LoggerType:
    if kind is not LoggerType.ALL:
        EXPORTS.setdefault(f"tracking.{kind.module}", []).append(kind.class_name)

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, ["registry"], all_public=True)

# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers: one base class, one module for each service, and the table of names that `log_with` takes."""

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
    **{
        f"tracking.{kind.value}": [kind.class_name]
        for kind in LoggerType
        if kind is not LoggerType.ALL
    },
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, ["registry"], all_public=True)

# SPDX-License-Identifier: Apache-2.0
"""`accelerate config explain`: each effective value of a launch, and where it comes from."""

from __future__ import annotations

from ...config.launch import GROUPS
from ...config.launch_settings import Settings

SECRET = ("aws_secret_access_key",)


def explain(settings: Settings, everything: bool = False) -> str:
    """A table of name, value and origin. Without `everything`, options nobody set and that are off are left out."""
    rows = []
    for group in GROUPS:
        for option in group.options:
            value = settings[option.name]
            relevant = option.when is None or settings.get(option.when) or settings["mixed_precision"] == option.when
            if everything or settings.chosen(option.name) or (relevant and value not in (None, False, "")):
                shown = "(hidden)" if option.name in SECRET and value else str(value)
                rows.append((option.name, shown, settings.origin(option.name)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)

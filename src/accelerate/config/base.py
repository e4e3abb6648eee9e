# SPDX-License-Identifier: Apache-2.0
"""What every options object shares: its fields as a dict, and the fields that differ from their defaults."""

from __future__ import annotations

import copy
from dataclasses import MISSING, fields
from typing import Any


class KwargsHandler:
    """Base of the API's `...Kwargs` objects, which are dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """All fields and their values (copies)."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields whose values differ from the defaults: what has to be handed on to torch."""
        values = self.to_dict()
        defaults = {
            field.name: field.default_factory()
            if field.default_factory is not MISSING
            else field.default
            for field in fields(self)  # type: ignore[arg-type]
        }
        return {
            name: value
            for name, value in values.items()
            if name in defaults and defaults[name] != value
        }

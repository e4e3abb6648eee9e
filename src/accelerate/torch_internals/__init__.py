# SPDX-License-Identifier: Apache-2.0
"""What reaches below the public API of torch and other libraries: one module for each subject, with its row.

The rest of the package uses public names only; `tools/budgets.py` checks that. A module here declares one `Internal`
for each thing that it does, and asks it whether it is on. The rows are written to docs/reference/torch_internals.md.
A row that no example, client or documented feature needs is deleted.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field

from ..core import env
from ..core.errors import ConfigurationError, suggestion


@dataclass(frozen=True)
class Internal:
    """One reading or repair of something that is not public.

    Fields:
        name: the name by which `ACCELERATE_TORCH_INTERNALS_OFF` turns it off.
        what: what is read or changed.
        versions: the versions of torch (or of the other library) that it was run with and is needed on.
        upstream: the issue or pull request that would make it unnecessary, or "not reported".
        needed_by: the example, client or documented feature that needs it.
        without: what a user sees if it is off.
        test: the test that fails if it is off, as pytest's node id.
    """

    name: str
    what: str
    versions: str
    upstream: str
    needed_by: str
    without: str
    test: str
    is_on: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Read once whether this row is turned off, before anything runs."""
        object.__setattr__(
            self,
            "is_on",
            self.name not in (env.get("ACCELERATE_TORCH_INTERNALS_OFF") or "").split(","),
        )


def rows() -> dict[str, Internal]:
    """All rows by name; imports every module of this package that can be imported here.

    Raises:
        ConfigurationError: `ACCELERATE_TORCH_INTERNALS_OFF` has a name that is no row.
    """
    table: dict[str, Internal] = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            for row in value if isinstance(value, tuple) else (value,):
                if isinstance(row, Internal):
                    table[row.name] = row
    for name in filter(None, (env.get("ACCELERATE_TORCH_INTERNALS_OFF") or "").split(",")):
        if name not in table:
            raise ConfigurationError(
                f"ACCELERATE_TORCH_INTERNALS_OFF: there is no row {name!r}{suggestion(name, table)}"
            )
    return table

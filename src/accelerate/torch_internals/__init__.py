# SPDX-License-Identifier: Apache-2.0
"""What reaches below the public API of torch and other libraries: one module for each subject, with its rows.

The rest of the package uses public names only, and has no workaround for the behaviour of one version of torch;
`tools/budgets.py` checks the names. The rows are written to docs/reference/torch_internals.md. A row that no example,
client or documented feature needs is deleted.

To add a row:

1. Declare an `Internal` in the module of its subject, above the functions that ask whether it `is_on`. If it is off,
   they do what the public API can do, or raise an error that names the row.
2. Write its test: `tests/torch_internals/test_<module>.py`, on one process and within a second. It fails if the row is
   off; tests/torch_internals/test_rows.py runs it so.
3. Write its reproduction, `tests/torch_internals/upstream/<name>.py`: at most 25 lines of torch without this package,
   ready to be reported. Where torch lacks what the row does, or does it wrong, it ends with
   `raise SystemExit("what is wrong")`. If only some versions do, it has a line `# torch: >=2.13,<2.14.1`.
4. Run `python tools/reference.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field

from ..core import env
from ..core.errors import ConfigurationError, suggestion


@dataclass(frozen=True)
class Internal:
    """One reading or repair of something that is not public, or that one version of a library does wrong.

    Fields:
        name: the name by which `ACCELERATE_TORCH_INTERNALS_OFF` turns it off.
        what: what is read or changed.
        versions: the versions, of torch or of the other library, that it was run with and is needed on.
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
        ConfigurationError: `ACCELERATE_TORCH_INTERNALS_OFF` has a name that is not a row.
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
                f"ACCELERATE_TORCH_INTERNALS_OFF: unknown row {name!r}{suggestion(name, table)}"
            )
    return table

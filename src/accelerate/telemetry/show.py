# SPDX-License-Identifier: Apache-2.0
"""Shows a report: as a table in a notebook, with styles on a terminal, as plain text elsewhere."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Showable(Protocol):
    """What `show_report` shows."""

    def to_html(self) -> str:
        """The report as HTML."""

    def __rich__(self) -> Any: ...


def show_report(report: Showable) -> None:
    """Show a report once, in the form that fits the standard output."""
    if _is_notebook():
        from IPython.display import HTML, display

        display(HTML(report.to_html()))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(report)
    else:
        print(report)


def _is_notebook() -> bool:
    found = sys.modules.get("IPython")
    # Hosted notebooks derive shells of their own from Jupyter's.
    return found is not None and any(
        kind.__name__ == "ZMQInteractiveShell" for kind in type(found.get_ipython()).__mro__
    )

# SPDX-License-Identifier: Apache-2.0
"""What one process shows: a progress bar, and a report as a table, with styles or as plain text."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from ..data_loader.loader import PreparedLoader
from ..state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A `tqdm.auto` progress bar that only the first process of each machine shows.

    Every process iterates; on the others the bar is disabled. For a prepared loader it counts the samples of all
    processes, including those before a resume.

    Args:
        *args: positional arguments of tqdm, the iterable first.
        main_process_only: False shows the bar on all processes.
        **kwargs: arguments of tqdm.

    Raises:
        ImportError: the package tqdm is not installed.

    Example:
        for inputs, targets in tqdm(loader, desc="train"):
            ...
    """
    if args and isinstance(args[0], bool):
        raise ValueError(
            "tqdm's first argument is the iterable; pass main_process_only=True or False by name"
        )
    from tqdm.auto import tqdm as bar

    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    iterable: Any = args[0] if args else kwargs.get("iterable")
    # By `type`: a prepared loader is an instance of its torch class to `isinstance`.
    if issubclass(type(iterable), PreparedLoader):
        size = iterable.plan().global_batch
        if size is not None:
            kwargs = {"unit": " samples", "unit_scale": size, **kwargs}
        first = iterable.first_batch
        if first:
            kwargs = {"initial": first, "total": len(iterable) + iterable.batches_skipped, **kwargs}
    return bar(*args, **kwargs)


class Showable(Protocol):
    """What `show_report` shows."""

    def to_html(self) -> str:
        """The report as HTML."""

    def __rich__(self) -> Any: ...


def show_report(report: Showable) -> None:
    """Show a report once, in the form that fits the standard output."""
    ipython = sys.modules.get("IPython")
    # Hosted notebooks derive shells of their own from Jupyter's.
    shells = [] if ipython is None else type(ipython.get_ipython()).__mro__
    if any(shell.__name__ == "ZMQInteractiveShell" for shell in shells):
        from IPython.display import HTML, display

        display(HTML(report.to_html()))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(report)
    else:
        print(report)

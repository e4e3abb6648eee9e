# SPDX-License-Identifier: Apache-2.0
"""A progress bar that only one process of a machine shows."""

from __future__ import annotations

from typing import Any

from ..core.imports import is_available
from ..state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """The bar of `tqdm.auto`, shown by the local main process only, or by all with `main_process_only=False`.

    Every process iterates over what it is given; the others see a bar that is off. Needs the package tqdm.
    """
    if args and isinstance(args[0], bool):
        raise ValueError(
            "tqdm's first argument is what to iterate over; say main_process_only=True or False by its name"
        )
    if not is_available("tqdm"):
        raise ImportError("the progress bar needs the package tqdm: pip install tqdm")
    from tqdm.auto import tqdm as bar

    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)

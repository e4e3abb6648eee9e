# SPDX-License-Identifier: Apache-2.0
"""Which distribution the installed files belong to: two of them have the name `accelerate`."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path

from .messages import PREFIX
from .version import API_VERSION, __version__

NAME = __name__.partition(".")[0]
FOLDER = Path(__file__).parent.parent
IMPLEMENTATION = f"independent implementation of the Accelerate API {API_VERSION}"
REMEDY = (
    "Run `pip uninstall -y accelerate` until it finds nothing, delete the folder if it is still there, and install "
    "the distribution that you want"
)


def warn_mixed() -> None:
    """Warn that files of another distribution lie among ours."""
    warnings.warn(
        f"{PREFIX}{FOLDER} contains the files of two distributions named accelerate, so imports may fail or behave "
        f"wrongly. {REMEDY}.",
        RuntimeWarning,
        stacklevel=2,
    )


def problems() -> list[str]:
    """Compare our version with the metadata of the installed distributions: a sentence for each problem."""
    installed = importlib.metadata.distributions(name=NAME)
    others = [
        f"{one.version} in {one.locate_file('')}" for one in installed if one.version != __version__
    ]
    if not others:
        return []
    return [
        f"the files in {FOLDER} are version {__version__}, but the metadata, from which client packages read the "
        f"version, is that of {', '.join(others)}. Install this package again. If it is the other distribution: "
        f"{REMEDY}"
    ]

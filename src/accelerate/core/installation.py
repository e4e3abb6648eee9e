# SPDX-License-Identifier: Apache-2.0
"""Which distribution the installed files belong to: two of them have the name `accelerate`."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import warnings
from pathlib import Path

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
        f"{FOLDER} contains the files of two distributions named accelerate, so imports may fail or behave wrongly. "
        f"{REMEDY}. `accelerate env` lists the files.",
        RuntimeWarning,
        stacklevel=2,
    )


def problems() -> list[str]:
    """Compare the package's files with the metadata of the installed distributions. Reads all files of the package.

    Returns:
        One sentence for each problem, with what to do; an empty list if all files are those of this distribution.
    """
    present = list(importlib.metadata.distributions(name=NAME))
    found = []
    others = [f"{one.version} in {one.locate_file('')}" for one in present if one.version != __version__]
    if others:
        found.append(
            f"the files in {FOLDER} are version {__version__}, but the metadata, from which client packages read the "
            f"version, is that of {', '.join(others)}. Install this package again. If it is the other distribution: "
            f"{REMEDY}"
        )
    for one in present:
        recorded = {file.as_posix(): file for file in one.files or []}
        if one.version == __version__ and f"{NAME}/__init__.py" in recorded:  # else an editable installation
            found += _differences(recorded)
    return found


def _differences(recorded: dict[str, importlib.metadata.PackagePath]) -> list[str]:
    present = {path.relative_to(FOLDER.parent).as_posix() for path in FOLDER.rglob("*.py")}
    ours = {name for name in recorded if name.startswith(f"{NAME}/") and name.endswith(".py")}
    changed = sorted(
        name for name in ours & present if _digest(FOLDER.parent / name) != _recorded_digest(recorded[name])
    )
    kinds = (("missing", sorted(ours - present)), ("changed", changed), ("not part of it", sorted(present - ours)))
    return [
        f"{len(names)} files of this installation in {FOLDER} are {kind}: {', '.join(names[:5])}"
        f"{', ...' if len(names) > 5 else ''}. {REMEDY}"
        for kind, names in kinds
        if names
    ]


def _digest(path: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")


def _recorded_digest(file: importlib.metadata.PackagePath) -> str | None:
    return file.hash.value if file.hash is not None else None

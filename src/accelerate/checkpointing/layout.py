# SPDX-License-Identifier: Apache-2.0
"""Names of checkpoints and their files: numbered folders of a project, the newest valid one, rotation."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..core.constants import MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME
from ..core.errors import CheckpointError
from .manifest import check_sizes, read_manifest, read_unreplaced, reason

_NUMBERED = re.compile(r"checkpoint_(\d+)")
RANK_DOCUMENT = re.compile(rf"{RNG_STATE_NAME}_(\d{{1,9}})\.json")
_SET_ASIDE = re.compile(_NUMBERED.pattern + r"\.damaged(-\d+)?")


def numbered(name: str, index: int, ending: str) -> str:
    """`model.safetensors`, `model_1.safetensors`, ...: the API's way of counting files of a kind."""
    if index == 0:
        return f"{name}{ending}"
    return f"{name}_{index}{ending}"


def registered_file(index: int) -> str:
    """The file of a registered object's state in the API's format."""
    return f"custom_checkpoint_{index}.pkl"


def rank_document_name(rank: int) -> str:
    """The document of a rank's own state, which begins with its random states."""
    return f"{RNG_STATE_NAME}_{rank}"


def model_shards(folder: Path, index: int) -> Path:
    """The folder of a sharded model's files in a checkpoint."""
    return folder / f"{MODEL_NAME}_fsdp_{index}"


def optimizer_shards(folder: Path, index: int) -> Path:
    """Return the folder of a sharded optimizer's state."""
    return folder / f"{OPTIMIZER_NAME}_{index}"


def checkpoints_dir(project_dir: str | Path) -> Path:
    """Return the folder of a project's numbered checkpoints."""
    return Path(project_dir) / "checkpoints"


def checkpoint_folder(project_dir: str | Path, iteration: int) -> Path:
    """The folder that automatic naming gives save number `iteration`."""
    return checkpoints_dir(project_dir) / f"checkpoint_{iteration}"


def list_checkpoints(directory: str | Path) -> list[tuple[int, Path]]:
    """(number, path) of each `checkpoint_N` in a directory, oldest first: also what is damaged or no folder."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    matches = [(_NUMBERED.fullmatch(entry.name), entry) for entry in directory.iterdir()]
    return sorted((int(match[1]), entry) for match, entry in matches if match)


def list_damaged(directory: str | Path) -> list[Path]:
    """The folders of a directory that `set_aside` has renamed, by number."""
    found = [
        (match, entry)
        for entry in Path(directory).iterdir()
        if (match := _SET_ASIDE.fullmatch(entry.name))
    ]
    return [
        entry
        for _, entry in sorted((int(match[1]), entry) for match, entry in found if entry.is_dir())
    ]


def candidates(directory: str | Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The checkpoints to try, newest first, whose files have their sizes; and (folder, reason) of the others."""
    found = [(folder, unfit(folder)) for _, folder in reversed(list_checkpoints(directory))]
    return [folder for folder, why in found if why is None], [
        (folder, why) for folder, why in found if why is not None
    ]


def unfit(folder: Path) -> str | None:
    """Why a folder is not a valid checkpoint, without reading its files; None if no problem is found."""
    try:
        read_unreplaced(folder, lambda: check_sizes(folder, read_manifest(folder)))
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be read: {reason(error)}"
    return None


def newest_valid(directory: str | Path) -> Path | None:
    """The newest `checkpoint_N` that seems complete (by sizes, not checksums), or None."""
    return next(iter(candidates(directory)[0]), None)


def rotate(directory: str | Path, total_limit: int | None) -> list[Path]:
    """Remove the oldest checkpoints beyond `total_limit` and return them; the newest valid one is never removed.

    Each is renamed before its files go, so that a kill in between leaves no half checkpoint under its name.
    """
    removed: list[Path] = []
    if total_limit is None:
        return removed
    for trash in _hidden(Path(directory), _NUMBERED.pattern, "trash"):
        shutil.rmtree(trash, ignore_errors=True)  # a kill has interrupted its removal
    # A link is the user's: what it leads to is not removed, and it takes no place of the others. Nor does a file.
    present = [
        folder
        for _, folder in list_checkpoints(directory)
        if folder.is_dir() and not folder.is_symlink()
    ]
    last = newest_valid(directory)
    for folder in present[: max(0, len(present) - total_limit)]:
        if folder != last:
            discard(folder)
            removed.append(folder)
    return removed


def discard(folder: Path) -> None:
    """Remove a folder: gone under its name at once, its files after that."""
    trash = folder.with_name(f".{folder.name}.trash-{uuid.uuid4().hex[:8]}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def siblings(folder: Path, kind: str) -> Iterator[Path]:
    """The hidden folders next to `folder` that an interrupted save of it has left: `tmp` or `swap`."""
    return _hidden(folder.parent, re.escape(folder.name), kind)


def _hidden(directory: Path, name: str, kind: str) -> Iterator[Path]:
    """Folders (no links) that have exactly a name that this package gives; `name` is a regular expression."""
    pattern = re.compile(rf"\.{name}\.{kind}-[0-9a-f]{{8}}")
    if directory.is_dir():
        named = sorted(entry for entry in directory.iterdir() if pattern.fullmatch(entry.name))
        yield from (entry for entry in named if entry.is_dir() and not entry.is_symlink())


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to `<name>.damaged` (or `.damaged-2`, ...), which frees its number; the new path."""
    target = free_name(folder, "damaged")
    os.rename(folder, target)
    return target


def free_name(path: Path, ending: str) -> Path:
    """`<path>.<ending>`, or `<path>.<ending>-2`, ...: the first that nothing has."""
    number = 1
    while os.path.lexists(
        target := path.with_name(f"{path.name}.{ending}" + (f"-{number}" if number > 1 else ""))
    ):
        number += 1
    return target

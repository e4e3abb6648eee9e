# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what was saved, by how many processes, and each file's size and checksums."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from ..core import json_text
from ..core.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from ..core.errors import CheckpointError
from ..core.files import require_regular
from ..core.json_text import JSONObject
from .blocks import BlockIO, CorruptFile, FileRecord

MANIFEST = "checkpoint_manifest.json"
FORMAT = "accelerate-checkpoint"
VERSION = 1
LOADER_NAME = "dl_state_dict"  # of the API's files with positions in data loaders
# Of the progress.
_NUMBERS = (
    "step", "epoch", "accumulation_step", "iteration", "training_loader", "accumulation_steps", "step_samples",
)  # fmt: skip

# Names of the API's own format; what matches is part of a checkpoint when a folder has no manifest.
_API_FILES = re.compile(
    rf"({MODEL_NAME}(_\d+)?\.bin|{SAFE_MODEL_NAME}(_\d+)?\.safetensors|{OPTIMIZER_NAME}(_\d+)?\.bin"
    rf"|{SCHEDULER_NAME}(_\d+)?\.bin|{SAMPLER_NAME}(_\d+)?\.bin|{LOADER_NAME}(_\d+)?\.bin"
    rf"|{RNG_STATE_NAME}_\d+\.pkl|{re.escape(SCALER_NAME)}|custom_checkpoint_\d+\.pkl"
    rf"|{MODEL_NAME}_fsdp_\d+|{OPTIMIZER_NAME}_\d+)"
)


def is_api_file(name: str) -> bool:
    """Whether the API's own format has a file (or folder of shards) of this name."""
    return _API_FILES.fullmatch(name) is not None


class CorruptCheckpoint(CheckpointError):
    """A folder that is no valid checkpoint: its manifest is missing or unreadable, or a file differs from it."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. `progress` is the position of the run (step, epoch, iteration, ...)."""

    layout: str
    world_size: int
    progress: JSONObject
    models: list[JSONObject]
    optimizers: list[JSONObject]
    files: dict[str, FileRecord]
    mesh: dict[str, int] = field(default_factory=dict)
    created: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Serialize the manifest to JSON with a checksum."""
        body = {**asdict(self), "files": {name: record.to_json() for name, record in self.files.items()}}
        return json.dumps({"format": FORMAT, "crc32": _checksum(body), "manifest": body}, indent=1).encode()


def stamp() -> JSONObject:
    """The fields of a manifest with the time and the versions of the libraries."""
    libraries = {"python": platform.python_version()}
    for name in ("accelerate", "torch", "numpy", "safetensors"):
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "libraries": libraries}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CorruptCheckpoint when there is none or it cannot be trusted."""
    path = folder / MANIFEST
    try:
        data = json_text.read(path)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            found = "a file" if folder.exists() else "a link to what does not exist" if folder.is_symlink() else None
            raise CorruptCheckpoint(f"{folder} is {found}" if found else f"{folder}: no such folder") from None
        raise CorruptCheckpoint(
            f"{folder} has no {MANIFEST}: it is not a finished checkpoint, or another library wrote it"
        ) from None
    except (OSError, json_text.JSONTextError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("manifest"), dict):
        raise CorruptCheckpoint(f"{path} is not the manifest of a checkpoint")
    body = data["manifest"]
    if type(body.get("version")) is not int:
        raise CorruptCheckpoint(f"{path} does not contain the version of its format")
    if body["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {body['version']}; this accelerate reads up to {VERSION}. Update accelerate."
        )
    if data.get("crc32") != _checksum(body):
        raise CorruptCheckpoint(f"{path} was changed after it was written: its checksum does not match")
    try:
        _check_body(body)
        files = {_inside(name, path): FileRecord.from_json(record) for name, record in body.pop("files").items()}
        return Manifest(files=files, **body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} cannot be understood: {error!r}") from error


def _check_body(body: JSONObject) -> None:
    """Raise ValueError for a field that is of another kind than this library writes."""
    if body["layout"] not in ("native", "compat"):
        raise ValueError(f"layout {str(body['layout'])[:40]!r} is not known")
    if type(body["world_size"]) is not int or body["world_size"] < 1:
        raise ValueError("world_size is not a number of processes")
    for name in ("progress", "files", "mesh", "libraries"):
        if not isinstance(body.get(name, {}), dict):
            raise ValueError(f"{name} is not an object")
    check_progress(body["progress"])
    for name in ("models", "optimizers"):
        for row in _list(body[name], name):
            if not isinstance(row, dict) or not isinstance(row.get("sharded"), bool):
                raise ValueError(f"{name} has a row without the entry `sharded`")
            if not isinstance(row.get("class"), str):
                raise ValueError(f"{name} has a row without a class")
    for row in body["optimizers"]:
        if any(not isinstance(option, str) for option in _list(row["options"], "options")):
            raise ValueError("the options of an optimizer are not names")
        for group in _list(row["shapes"], "shapes"):
            for shape in _list(group, "shapes"):
                if any(type(extent) is not int for extent in _list(shape, "shapes")):
                    raise ValueError("the shapes of an optimizer are not lists of sizes")


def check_progress(progress: Mapping[str, object]) -> None:
    """Raise ValueError unless the entries of the run's position are non-negative integers."""
    for name in _NUMBERS:
        value = progress.get(name, 0)
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"progress.{name} is {str(value)[:60]!r}, not a number")
    trackers = progress.get("trackers", {})
    if not isinstance(trackers, dict) or not all(isinstance(key, str) for key in trackers):
        raise ValueError("progress.trackers is not an object")


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def reason(error: BaseException) -> str:
    """The reason in an error from reading a file, for a message that names the file already."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptCheckpoint unless every file exists with its size. Content is not read.

    Other files that a load could mistake for a file of the checkpoint are an error too.
    """
    problems = [f"{name} is none of its files" for name in _foreign(folder, manifest)]
    for name, record in manifest.files.items():
        try:
            size = require_regular(folder / name)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        except (OSError, ValueError) as error:
            problems.append(f"{name} cannot be read ({reason(error)})")
            continue
        if size != record.size:
            problems.append(f"{name} has {size} bytes where {record.size} were written")
    if problems:
        raise CorruptCheckpoint(f"{folder} is damaged: {'; '.join(problems)}")


def _foreign(folder: Path, manifest: Manifest) -> list[str]:
    """Files that the manifest does not list, under a name of the format or in a folder of shards."""
    tops = [entry for entry in folder.iterdir() if is_api_file(entry.name)] if folder.is_dir() else []
    paths = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*"))) if path.is_file()]
    names = (path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name not in manifest.files]


def check_files(io: BlockIO, folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CorruptCheckpoint, with every bad file's name, unless the checksums of these files match."""
    problems = []
    for name in names:
        try:
            io.check(folder / name, manifest.files[name])
        except KeyError:
            problems.append(f"{name} is not in the manifest")
        except CorruptFile as error:
            problems.append(f"{name}: {error}")
        except (OSError, ValueError) as error:
            problems.append(f"{name} cannot be read ({reason(error)})")
    if problems:
        raise CorruptCheckpoint(f"{folder} is damaged: {'; '.join(problems)}")


def verify(folder: str | Path) -> Manifest:
    """Read all files of a checkpoint and compare them with its manifest, which is returned.

    Raises CorruptCheckpoint with the name of each file that is missing, cut short or changed.

    Example:
        manifest = verify("run/checkpoints/checkpoint_3")
        print(manifest.progress["step"], sum(file.size for file in manifest.files.values()))
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    with BlockIO() as io:
        check_files(io, folder, manifest, manifest.files)
    return manifest


def _checksum(body: JSONObject) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _inside(name: str, path: Path) -> str:
    steps = PurePosixPath(name).parts
    if not steps or name.startswith("/") or ".." in steps:
        raise CorruptCheckpoint(f"{path} names a file outside of its folder: {name}")
    return name

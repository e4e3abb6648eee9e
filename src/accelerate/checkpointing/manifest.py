# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what was saved, by how many processes, and each file's size and checksums."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

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
from ..core.files import read_regular, require_regular
from ..core.json_text import JSONObject
from ..core.safetensors_header import CorruptFile
from .blocks import BlockIO, FileRecord

T = TypeVar("T")

MANIFEST = "checkpoint_manifest.json"
FORMAT = "accelerate-checkpoint"
VERSION = 1
ATTEMPTS = 50  # to read a folder that is replaced meanwhile
LOADER_NAME = "dl_state_dict"  # of the API's files with positions in data loaders

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
    """The contents of a checkpoint.

    Fields:
        world_size: the processes of the run that saved it.
        progress: the position of the run (step, epoch, iteration, ...).
        ranks: whose states it has: "all", or "rank 0 only".
    """

    layout: str
    world_size: int
    progress: JSONObject
    models: list[JSONObject]
    optimizers: list[JSONObject]
    files: dict[str, FileRecord]
    mesh: dict[str, int] = field(default_factory=dict)
    created: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    ranks: str = "all"
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Serialize the manifest to JSON with a checksum."""
        body = {
            **asdict(self),
            "files": {name: record.to_json() for name, record in self.files.items()},
        }
        return json.dumps(
            {"format": FORMAT, "crc32": _checksum(body), "manifest": body}, indent=1
        ).encode()


def is_shared(manifest: Manifest) -> bool:
    """Whether all ranks have saved into one folder, and not each machine into its own."""
    pattern = re.compile(rf"{RNG_STATE_NAME}_\d+\.(json|pkl)")
    return (
        sum(pattern.fullmatch(name) is not None for name in manifest.files) == manifest.world_size
    )


def stamp() -> JSONObject:
    """The fields of a manifest with the time and the versions of the libraries."""
    libraries = {"python": platform.python_version()}
    for name in ("accelerate", "torch", "numpy", "safetensors"):
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "libraries": libraries,
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CorruptCheckpoint when there is none or it cannot be trusted."""
    path = folder / MANIFEST
    try:
        data = json_text.read(path)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            if folder.exists():
                found = "a file"
            elif folder.is_symlink():
                found = "a link to what does not exist"
            else:
                found = None
            raise CorruptCheckpoint(
                f"{folder} is {found}" if found else f"{folder}: no such folder"
            ) from None
        raise CorruptCheckpoint(
            f"{folder} has no {MANIFEST}: it is not a finished checkpoint, or another library wrote it"
        ) from None
    except (OSError, json_text.JSONTextError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {reason(error)}") from error
    if (
        not isinstance(data, dict)
        or data.get("format") != FORMAT
        or not isinstance(data.get("manifest"), dict)
    ):
        raise CorruptCheckpoint(f"{path} is not the manifest of a checkpoint")
    body = data["manifest"]
    if body.get("version", 0) > VERSION:
        raise CheckpointError(
            f"{path} has format version {body['version']}; this accelerate reads up to {VERSION}. Update accelerate."
        )
    if data.get("crc32") != _checksum(body):
        raise CorruptCheckpoint(
            f"{path} was changed after it was written: its checksum does not match"
        )
    try:
        files = {
            _inside(name, path): FileRecord.from_json(record)
            for name, record in body.pop("files").items()
        }
        return Manifest(files=files, **body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} cannot be understood: {error!r}") from error


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
    if folder.is_dir():
        tops = [entry for entry in folder.iterdir() if is_api_file(entry.name)]
    else:
        tops = []
    paths = [
        path
        for top in tops
        for path in ([top] if top.is_file() else sorted(top.rglob("*")))
        if path.is_file()
    ]
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

    def check() -> Manifest:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
        with BlockIO() as io:
            check_files(io, folder, manifest, manifest.files)
        return manifest

    return read_unreplaced(folder, check)


def fingerprint(folder: Path) -> int | None:
    """A checksum of the manifest's text, which is another one after each save; None where there is no manifest."""
    try:
        return zlib.crc32(read_regular(folder / MANIFEST, json_text.LIMIT))
    except OSError:
        return None


def read_unreplaced(folder: Path, read: Callable[[], T]) -> T:
    """What `read` returns or raises. It is called again where a save has replaced the folder meanwhile."""
    for _ in range(ATTEMPTS):
        before = fingerprint(folder)
        try:
            result = read()
        except (CheckpointError, OSError):
            if fingerprint(folder) == before:
                raise
        else:
            if fingerprint(folder) == before:
                return result
    raise always_replaced(folder)


def always_replaced(folder: Path) -> CheckpointError:
    """The error for a folder that was replaced in each of the attempts to read it."""
    return CheckpointError(
        f"{folder} was replaced {ATTEMPTS} times while it was read: another run saves into it faster than it is read. "
        "Read a checkpoint that stays: that run can save each one into a folder of its own"
    )


def _checksum(body: JSONObject) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _inside(name: str, path: Path) -> str:
    steps = PurePosixPath(name).parts
    if not steps or name.startswith("/") or ".." in steps:
        raise CorruptCheckpoint(f"{path} names a file outside of its folder: {name}")
    return name

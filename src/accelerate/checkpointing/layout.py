# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folder: names of checkpoints and files, the manifest with each file's checksums, rotation."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ..core import env, json_text
from ..core.bucket_path import BucketPath
from ..core.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from ..core.errors import BucketAccessError, BucketUnreachableError, CheckpointError
from ..core.files import location, read_regular, reason, require_regular
from ..core.json_text import JSONObject
from ..core.tensor_files import CorruptFile
from .files import BlockIO, FileRecord

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

MANIFEST = "checkpoint_manifest.json"
INDEX = "index.json"  # of a folder of shards in a bucket: where each of them is
REPLACED = ".replaced"  # in a swap folder: the manifest of the checkpoint whose files it replaces
FORMAT = "accelerate-checkpoint"
VERSION = 1
ATTEMPTS = 50  # to read a folder that is replaced meanwhile
_TOKEN = "parts-"  # what the folder of a save's files in a bucket begins with
# The folder of a save's files in a bucket, and what is in it.
_PARTS = re.compile(rf"(.*?/{_TOKEN}[0-9a-f]{{32}})/.*")
_DAY = 86400.0  # seconds after which the files of an unfinished save may go
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
    """A folder that is not a valid checkpoint: its manifest is missing or unreadable, or a file differs from it."""


class CheckpointMismatch(CheckpointError):
    """A valid checkpoint of a different model, optimizer or set of objects. The message lists the differences."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Fields:
        world_size: the processes of the run that saved it.
        progress: the position of the run (step, epoch, iteration, ...).
        ranks: whose states it has: "all", or "rank 0 only".
        certificate: the sha256 of the run's certificate (`accelerate certify`), if it has one.
        token: in a bucket, the folder of the files, which no other save has.
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
    certificate: str = ""
    token: str = ""
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Serialize the manifest to JSON with a checksum."""
        body = {
            **asdict(self),
            "files": {name: record.to_json() for name, record in self.files.items()},
        }
        for name in ("certificate", "token"):
            # Earlier versions of this package do not know these fields.
            if not body[name]:
                del body[name]
        return json.dumps(
            {"format": FORMAT, "crc32": _checksum(body), "manifest": body}, indent=1
        ).encode()

    def files_in(self, folder: Path) -> Path:
        """The folder that has the files of this checkpoint. In a bucket it knows them, and looks none up."""
        place = folder / self.token
        if isinstance(place, BucketPath):
            return place.with_objects(self.files)
        return place


def is_shared(manifest: Manifest) -> bool:
    """Whether all ranks have saved into one folder, and not each machine into its own."""
    pattern = re.compile(rf"{RNG_STATE_NAME}_\d+\.(json|pkl)")
    return (
        sum(pattern.fullmatch(name) is not None for name in manifest.files) == manifest.world_size
    )


def stamp() -> JSONObject:
    """The fields of a manifest with the time, the versions of the libraries and the certificate."""
    libraries = {"python": platform.python_version()}
    for name in ("accelerate", "torch", "numpy", "safetensors"):
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    certificate = ""
    path = env.get("ACCELERATE_CERTIFICATE")
    if path is not None:
        try:
            certificate = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            logger.warning(
                "ACCELERATE_CERTIFICATE=%s cannot be read (%s): the checkpoint does not refer to "
                "it",
                path,
                reason(error),
            )
    return {
        "certificate": certificate,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "libraries": libraries,
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CorruptCheckpoint when there is none or it cannot be trusted."""
    try:
        return parse_manifest(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir() and not isinstance(folder, BucketPath):
            if folder.exists():
                found = "a file"
            elif folder.is_symlink():
                found = "a broken link"
            else:
                found = None
            raise CorruptCheckpoint(
                f"{folder} is {found}" if found else f"{folder}: no such folder"
            ) from None
        raise CorruptCheckpoint(
            f"{folder} does not have a {MANIFEST}: the checkpoint is not finished, or another "
            "library wrote it"
        ) from None


def parse_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises CorruptCheckpoint when it cannot be trusted, FileNotFoundError without one."""
    try:
        data = json_text.read(path)
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        raise
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
        if "token" in body:
            _inside(body["token"], path)
        return Manifest(files=files, **body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} cannot be parsed: {error!r}") from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptCheckpoint unless every file exists with its size. Content is not read.

    Other files that a load could mistake for a file of the checkpoint are an error too.

    Args:
        folder: of the files, which is `manifest.files_in(...)`.
        manifest: lists them.
    """
    if isinstance(folder, BucketPath):
        folder = folder.listed()
    problems = [f"{name} is not one of its files" for name in _foreign(folder, manifest)]
    for name, record in manifest.files.items():
        try:
            size = require_regular(folder / name)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            problems.append(f"{name} cannot be read ({reason(error)})")
            continue
        if size != record.size:
            problems.append(f"{name} has {size} bytes where {record.size} were written")
    if problems:
        raise CorruptCheckpoint(f"{folder} is damaged: {'; '.join(problems)}")


def _foreign(folder: Path, manifest: Manifest) -> list[str]:
    """Files that the manifest does not list, under a name of the format or in a folder of shards."""
    if not folder.is_dir():
        return []
    paths: list[Path] = []
    for entry in folder.iterdir():
        if is_api_file(entry.name):
            paths += [entry, *sorted(entry.rglob("*"))]
    names = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    return [name for name in names if name not in manifest.files]


def foreign_files(folder: Path) -> list[str]:
    """The files below a checkpoint that no save has written, under names that no load takes for its own."""
    manifest = read_manifest(folder)
    own = {MANIFEST, *manifest.files}
    names = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_part = isinstance(folder, BucketPath) and _PARTS.fullmatch(f"/{name}")
        if name not in own and not is_part and path.is_file():
            names.append(name)
    return sorted(names)


def check_files(io: BlockIO, folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CorruptCheckpoint, with every bad file's name, unless the checksums of these files match.

    `folder` is that of the files, as in `check_sizes`.
    """
    problems = []
    for name in names:
        try:
            io.check(folder / name, manifest.files[name])
        except KeyError:
            problems.append(f"{name} is not in the manifest")
        except CorruptFile as error:
            problems.append(f"{name}: {error}")
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            problems.append(f"{name} cannot be read ({reason(error)})")
    if problems:
        raise CorruptCheckpoint(f"{folder} is damaged: {'; '.join(problems)}")


def verify(folder: str | Path) -> Manifest:
    """Read all files of a checkpoint and compare them with its manifest, which is returned.

    Raises CorruptCheckpoint with the name of each file that is missing, truncated or changed.

    Example:
        manifest = verify("run/checkpoints/checkpoint_3")
        print(manifest.progress["step"], sum(file.size for file in manifest.files.values()))
    """
    checkpoint = location(folder, "verify")

    def check() -> Manifest:
        manifest = read_manifest(checkpoint)
        place = manifest.files_in(checkpoint)
        check_sizes(place, manifest)
        with BlockIO() as io:
            check_files(io, place, manifest, manifest.files)
        return manifest

    return read_unreplaced(checkpoint, check)


def fingerprint(folder: Path) -> int | None:
    """A checksum of the manifest's text, which is another one after each save; None where there is no manifest.

    A manifest that is missing because a save replaces it, file by file, is waited for.
    """
    for _ in range(100):
        try:
            return zlib.crc32(read_regular(folder / MANIFEST, json_text.LIMIT))
        except CheckpointError:
            raise
        except OSError:
            if isinstance(folder, BucketPath):
                break
            real = Path(os.path.realpath(folder))
            if not any((swap / REPLACED).exists() for swap in siblings(real, "swap")):
                break
            time.sleep(0.02)
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
        f"{folder} was replaced {ATTEMPTS} times while it was being read: another run saves into "
        "it faster than it can be read. Let that run save each checkpoint into its own folder"
    )


def _checksum(body: JSONObject) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _inside(name: str, path: Path) -> str:
    steps = PurePosixPath(name).parts
    if not steps or name.startswith("/") or ".." in steps:
        raise CorruptCheckpoint(f"{path} names a file outside its folder: {name}")
    return name


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
    return location(project_dir, "project_dir") / "checkpoints"


def checkpoint_folder(project_dir: str | Path, iteration: int) -> Path:
    """The folder that automatic naming gives save number `iteration`."""
    return checkpoints_dir(project_dir) / f"checkpoint_{iteration}"


def list_checkpoints(directory: str | Path) -> list[tuple[int, Path]]:
    """The (number, path) of each `checkpoint_N` in a directory, oldest first, including damaged ones and files.

    In a bucket those with a manifest: what an unfinished save has left has none.
    """
    directory = location(directory, "directory")
    if not directory.is_dir():
        return []
    matches = [(_NUMBERED.fullmatch(entry.name), entry) for entry in directory.iterdir()]
    found = sorted((int(match[1]), entry) for match, entry in matches if match)
    if not isinstance(directory, BucketPath):
        return found
    finished = set(_finished([folder for _, folder in found]))
    return [(number, folder) for number, folder in found if folder in finished]


def list_named(directory: Path) -> list[Path]:
    """The finished checkpoints directly in a directory, whatever their names."""
    return _finished(sorted(directory.iterdir()))


def _finished(folders: list[Path]) -> list[Path]:
    """Those of the folders that have a manifest."""
    with _requests() as pool:
        present = list(pool.map(_has_manifest, folders))
    return list(itertools.compress(folders, present))


def _has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _requests() -> ThreadPoolExecutor:
    """Threads that wait for answers of a store."""
    return ThreadPoolExecutor(16, "checkpoint-requests")


def is_taken(folder: Path) -> bool:
    """Whether there is something that a save would replace: a folder, or in a bucket a finished checkpoint."""
    if isinstance(folder, BucketPath):
        return _has_manifest(folder)
    return folder.exists()


def list_damaged(directory: str | Path) -> list[Path]:
    """The folders of a directory that `set_aside` has renamed, by number."""
    found = [
        (match, entry)
        for entry in location(directory, "directory").iterdir()
        if (match := _SET_ASIDE.fullmatch(entry.name))
    ]
    return [
        entry
        for _, entry in sorted((int(match[1]), entry) for match, entry in found if entry.is_dir())
    ]


def candidates(directory: str | Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The checkpoints to try, newest first, whose files have their sizes; and (folder, reason) of the others."""
    folders = [folder for _, folder in reversed(list_checkpoints(directory))]
    with _requests() as pool:
        reasons = pool.map(unfit, folders)
    found = list(zip(folders, reasons, strict=True))
    return [folder for folder, why in found if why is None], [
        (folder, why) for folder, why in found if why is not None
    ]


def unfit(folder: Path) -> str | None:
    """Why a folder is not a valid checkpoint, without reading its files; None if no problem is found."""

    def check() -> None:
        manifest = read_manifest(folder)
        check_sizes(manifest.files_in(folder), manifest)

    try:
        read_unreplaced(folder, check)
    except (BucketAccessError, BucketUnreachableError):
        raise  # it may be valid
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be read: {reason(error)}"
    return None


def newest_valid(directory: str | Path) -> Path | None:
    """The newest `checkpoint_N` that looks complete (by sizes, not checksums), or None."""
    for _, folder in reversed(list_checkpoints(directory)):
        if unfit(folder) is None:
            return folder
    return None


def rotate(directory: str | Path, total_limit: int | None) -> list[Path]:
    """Remove the oldest checkpoints beyond `total_limit` and return them; the newest valid one is never removed.

    Each is renamed before its files are removed, so that a kill in between does not leave half a checkpoint
    under its name. In a bucket, the manifest is removed first, objects that are not from saves stay, and leftovers of
    unfinished saves are removed after a day.
    """
    removed: list[Path] = []
    if total_limit is None:
        return removed
    directory = location(directory, "directory")
    if isinstance(directory, BucketPath):
        for leftover in unfinished(directory):
            remove_objects(leftover)
    for trash in _hidden(directory, _NUMBERED.pattern, "trash"):
        shutil.rmtree(trash, ignore_errors=True)  # a kill has interrupted its removal
    for folder in superfluous(directory, total_limit):
        discard(folder)
        removed.append(folder)
    return removed


def superfluous(directory: Path, total_limit: int) -> list[Path]:
    """The oldest checkpoints beyond `total_limit`, without the newest valid one."""
    # A link is the user's: what it leads to is not removed, and it takes no place of the others. Nor does a file.
    present = [
        folder
        for _, folder in list_checkpoints(directory)
        if folder.is_dir() and not folder.is_symlink()
    ]
    last = newest_valid(directory)
    return [folder for folder in present[: max(0, len(present) - total_limit)] if folder != last]


def discard(folder: Path) -> None:
    """Remove a folder: gone under its name at once, its files after that. One that cannot be renamed goes in place."""
    if isinstance(folder, BucketPath):
        (folder / MANIFEST).unlink()
        remove_objects(folder)
        return
    trash = folder.with_name(f".{folder.name}.trash-{uuid.uuid4().hex[:8]}")
    try:
        folder.rename(trash)
    except OSError:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
        return
    shutil.rmtree(trash, ignore_errors=True)


def new_token() -> str:
    """A name for the folder of the files of one save in a bucket."""
    return f"{_TOKEN}{uuid.uuid4().hex}"


def remove_objects(folder: BucketPath) -> None:
    """Delete the files of saves below a folder. Other objects are not ours."""
    keys = [entry.key for entry in folder.bucket.objects(folder.key)]
    folder.bucket.delete([key for key in keys if _PARTS.fullmatch(f"/{key}")])


def leftovers_of(path: Path) -> list[Path]:
    """What killed saves have left, a day ago or earlier, in a project or a folder of checkpoints."""
    now = time.time()
    if isinstance(path, BucketPath):
        return [*unfinished(path, now=now)]
    leftovers = []
    for directory in (path, checkpoints_dir(path)):
        for folder in _hidden(directory, _NUMBERED.pattern, "tmp"):
            if folder.stat().st_mtime < now - _DAY:
                leftovers.append(folder)
    return leftovers


def unfinished(folder: BucketPath, age: float = _DAY, now: float = 0.0) -> list[BucketPath]:
    """The folders of files that saves which did not finish have left below a folder: a checkpoint, or their directory.

    Args:
        folder: what to look in.
        age: seconds by which each of the files is older than `now`. A save may be under way that has younger ones.
        now: seconds since the epoch; at least the time of the newest object, which is by the store's clock.
    """
    written: dict[BucketPath, float] = {}
    for entry in folder.bucket.objects(folder.key):
        now = max(now, entry.modified)
        match = _PARTS.fullmatch(f"/{entry.key}")
        if match is not None:
            parts = BucketPath(folder.bucket, match[1].removeprefix("/"))
            written[parts] = max(written.get(parts, 0.0), entry.modified)
    leftovers = []
    for parts, modified in written.items():
        if modified <= now - age and not _is_committed(parts):
            leftovers.append(parts)
    return sorted(leftovers)


def _is_committed(parts: BucketPath) -> bool:
    try:
        return parse_manifest(parts.parent / MANIFEST).token == parts.name
    except FileNotFoundError:
        return False
    except CorruptCheckpoint:
        return True  # nobody knows


def siblings(folder: Path, kind: str) -> Iterator[Path]:
    """The hidden folders next to `folder` that an interrupted save of it has left: `tmp` or `swap`."""
    return _hidden(folder.parent, re.escape(folder.name), kind)


def _hidden(directory: Path, name: str, kind: str) -> Iterator[Path]:
    """Folders (no links) that have exactly a name that this package gives; `name` is a regular expression."""
    pattern = re.compile(rf"\.{name}\.{kind}-[0-9a-f]{{8}}")
    if directory.is_dir():
        named = sorted(entry for entry in directory.iterdir() if pattern.fullmatch(entry.name))
        yield from (entry for entry in named if entry.is_dir() and not entry.is_symlink())


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that a load has skipped, with the identity of its folder at that time."""

    name: str
    reason: str
    identity: tuple[int, int, int] | None

    @classmethod
    def found(cls, folder: Path, reason: str) -> DamagedCheckpoint:
        """Create the record of a damaged checkpoint in `folder`."""
        return cls(folder.name, reason, folder_identity(folder))


def folder_identity(folder: Path) -> tuple[int, int, int] | None:
    """What identifies a folder: another folder of the same name has another identity."""
    if isinstance(folder, BucketPath):
        return None
    try:
        found = folder.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to `<name>.damaged` (or `.damaged-2`, ...), which frees its number; the new path."""
    target = free_name(folder, "damaged")
    # By copies where the folder cannot be renamed.
    shutil.move(folder, target)
    return target


def free_name(path: Path, ending: str) -> Path:
    """`<path>.<ending>`, or `<path>.<ending>-2`, ...: the first that nothing has."""
    number = 1
    while os.path.lexists(
        target := path.with_name(f"{path.name}.{ending}" + (f"-{number}" if number > 1 else ""))
    ):
        number += 1
    return target

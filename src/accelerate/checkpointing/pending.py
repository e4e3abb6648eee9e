# SPDX-License-Identifier: Apache-2.0
"""A save in progress: what a rank writes, where it is written until the commit, and the commit, by kind of place."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..core.bucket_path import BucketPath
from ..core.errors import (
    BucketAccessError,
    BucketUnreachableError,
    CheckpointError,
    ConfigurationError,
)
from ..core.files import follow_links
from ..core.json_text import JSONObject
from ..runtime.agreement import Process
from .commit import RunLocks, check_lock, commit, drop_temporary, open_temporary, save_target
from .files import FileRecord, Segment
from .kinds import ObjectState
from .layout import (
    MANIFEST,
    CorruptCheckpoint,
    DamagedCheckpoint,
    Manifest,
    folder_identity,
    new_token,
    parse_manifest,
    rank_document_name,
    remove_objects,
    set_aside,
)

logger: logging.Logger = logging.getLogger(__name__)

COMPLETION = 1800.0  # seconds within which every rank must have come to an exchange
_VISIBLE = 10.0  # seconds until a folder made on another machine must be visible here


@dataclass
class Options:
    """How a run is saved.

    Fields:
        checkpoints: the directory to rotate in after the commit; None for no rotation.
        locks: where the run keeps, to its end, that it saves into `checkpoints`. None: it does not.
        damaged: checkpoints that a load has skipped. Those in the same directory are renamed before the save.
    """

    layout: str = "native"
    safe_serialization: bool = True
    save_on_each_node: bool = False
    timeout: float = COMPLETION
    checkpoints: Path | None = None
    total_limit: int | None = None
    locks: RunLocks | None = None
    damaged: Sequence[DamagedCheckpoint] = ()

    def __post_init__(self) -> None:
        if self.layout not in ("native", "compat"):
            raise ConfigurationError(f"layout={self.layout!r}: use 'native' or 'compat'")


# Writes the shards of a rank below a folder, unless it gets an error of the rank. Returns the records of files, and
# the names of files whose records this rank is to compute.
WriteShards = Callable[[Path, BaseException | None], tuple[dict[str, FileRecord], list[str]]]


class UndecidedError(CheckpointError):
    """Whether a commit was made is not known."""


@dataclass
class PendingCheckpoint:
    """A save in progress: what this rank writes, and where. This class is for local and shared folders.

    Args:
        given: the folder as the caller names it, to compare with other ranks.
    """

    given: Path
    process: Process
    options: Options
    folder: Path = field(init=False)
    world_size: int = field(init=False)
    # that of the folder next to `folder` that is written to; empty until it is known
    temporary_name: str = ""
    is_alone: bool = False  # only rank 0 saves; then `process` is a run of one
    home: int = 0  # the rank that owns the folder this rank writes to
    files: dict[str, list[Segment]] = field(default_factory=dict)
    pickled: dict[str, object] = field(default_factory=dict)
    sharded: WriteShards | None = None
    locks: RunLocks | None = None  # on the rank that owns the folder
    error: BaseException | None = None  # of this rank; all raise it at the next exchange
    about: JSONObject = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # what the layout has no place for
    # the states of this rank that are written once
    entries: list[ObjectState] = field(default_factory=list)
    digests: dict[str, str] | None = None  # of `entries`, by key

    def __post_init__(self) -> None:
        self.folder = self.given.absolute()
        self.world_size = self.process.num_processes

    @property
    def temporary(self) -> Path:
        """The folder that this rank writes to."""
        return self.folder.with_name(self.temporary_name)

    @property
    def hook_folder(self) -> Path:
        """The folder that save hooks write to."""
        return self.temporary

    @property
    def is_home(self) -> bool:
        """Whether this rank owns the folder, and writes what is written once."""
        return self.home == self.process.process_index

    @property
    def may_be_home(self) -> bool:
        """Whether `find_home` may find that this rank is one."""
        is_first_here = self.options.save_on_each_node and self.process.local_process_index == 0
        return self.process.process_index == 0 or is_first_here

    def open(self) -> None:
        """Follow links to the folder; rank 0 also prepares it."""
        if self._is_damaged:
            # A damaged checkpoint that is a link is renamed itself, not its target.
            self.folder = follow_links(self.folder.parent, "save_state") / self.folder.name
        else:
            self.folder = follow_links(self.folder, "save_state")
        if self.process.process_index == 0:
            self._make_temporary()

    def find_home(self) -> None:
        """Find the folder of rank 0, or, on a machine that does not share it, that of this machine's first rank."""
        longest = 0.5 if self.options.save_on_each_node else _VISIBLE
        if self.process.process_index == 0 or _appears(self.temporary, longest):
            return
        if not self.options.save_on_each_node:
            raise CheckpointError(
                f"rank 0 writes to the folder {self.folder.parent}, which is not shared with this "
                "rank's machine. Save to a shared file system, or set "
                "ProjectConfiguration(save_on_each_node=True)"
            )
        self.home = self.process.process_index - self.process.local_process_index
        if self.is_home:
            self._make_temporary()
        elif not _appears(self.temporary, _VISIBLE):
            raise CheckpointError(
                f"the folder {self.folder.parent} is not shared by the ranks of this machine"
            )

    def keep_own_files(self) -> None:
        """Drop what is written once: another rank writes it."""
        mine = f"{rank_document_name(self.process.process_index)}."
        self.files = {name: pieces for name, pieces in self.files.items() if name.startswith(mine)}
        self.pickled = {
            name: value for name, value in self.pickled.items() if name.startswith(mine)
        }

    def _make_temporary(self) -> None:
        """Take the folder's lock, free its name, create the temporary folder."""
        directory = self.options.checkpoints
        if self.options.locks is not None and directory is not None:
            self.options.locks.acquire_run(directory)
        target = self.folder
        if not self._is_damaged:
            target = save_target(self.folder)
        self.locks = RunLocks()
        self.locks.acquire(target, directory)
        self._free_numbers()
        self.folder = save_target(self.folder)
        self.temporary_name = open_temporary(self.folder, self.temporary_name).name

    @property
    def _is_damaged(self) -> bool:
        return any(self.folder.name == damaged.name for damaged in self.options.damaged)

    def _free_numbers(self) -> None:
        """Rename the damaged checkpoints that the run has skipped, so that it can use their numbers."""
        for damaged in self.options.damaged:
            folder = self.folder.with_name(damaged.name)
            identity = folder_identity(folder)
            if identity is None:
                continue
            if identity != damaged.identity:
                if folder == self.folder:
                    raise CheckpointError(
                        f"{folder} was saved by another run after this run loaded it"
                    )
                continue
            moved = set_aside(folder)
            logger.warning(
                "skipped damaged checkpoint %s, which is now %s: %s",
                folder,
                moved.name,
                damaged.reason,
            )

    def hook_files(self) -> dict[str, list[Segment]]:
        """The files of save hooks that are not where they belong yet."""
        return {}

    def claim(self) -> JSONObject:
        """On the home rank: what the rank that commits needs, besides the manifest."""
        assert self.locks is not None
        return {"lock": self.locks.acquire(self.folder, self.options.checkpoints)}

    def commit(self, manifest: Manifest, claim: JSONObject) -> None:
        """Make what was written the checkpoint. Any rank may call it, with what the home rank has claimed."""
        check_lock(self.folder, self.options.checkpoints, claim["lock"])
        commit(self.temporary, self.folder, manifest)

    def close(self) -> None:
        """Release the lock of this save."""
        if self.locks is not None:
            self.locks.release()

    def discard(self, is_undecided: bool = False) -> None:
        """Clean up after a failed save: remove its temporary folder, then release the lock.

        Args:
            is_undecided: whether the files may have become the checkpoint, or still may.
        """
        try:
            if self.is_home and self.temporary_name:
                drop_temporary(self.temporary)
        finally:
            self.close()


@dataclass
class BucketCheckpoint(PendingCheckpoint):
    """A save into a bucket, where nothing can be renamed.

    The files of each save have a folder of their own, and the manifest, which is written last, names it. It is written
    only if it is still the one that was there when the save began. There are no locks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # All machines share a bucket.
        self.options = dataclasses.replace(self.options, save_on_each_node=False)
        # of the manifest that rank 0 has seen
        self._version: JSONObject | None = None

    @property
    def manifest(self) -> BucketPath:
        """The object that makes it a checkpoint."""
        path = self.folder / MANIFEST
        assert isinstance(path, BucketPath)
        return path

    @property
    def temporary(self) -> Path:
        """The folder that this rank writes to."""
        return self.folder / self.temporary_name

    @property
    def _local_folder(self) -> Path:
        return Path(tempfile.gettempdir(), f"accelerate-{self.temporary_name}")

    @property
    def hook_folder(self) -> Path:
        """A local folder, which the ranks of this machine share."""
        self._local_folder.mkdir(mode=0o700, exist_ok=True)
        return self._local_folder

    def open(self) -> None:
        """On rank 0: name the folder of the files, and look which checkpoint is there."""
        if self.manifest.key == MANIFEST:
            raise ConfigurationError(
                f"{self.folder} is an entire bucket: use a folder in it, such as "
                f"{self.folder / 'checkpoint'}"
            )
        if self.process.process_index == 0:
            self._version = self.manifest.bucket.version(self.manifest.key)
            self.temporary_name = new_token()

    def find_home(self) -> None:
        """Nothing: rank 0 is the home of all ranks."""

    def hook_files(self) -> dict[str, list[Segment]]:
        """What hooks have written on this machine, on its first rank."""
        files: dict[str, list[Segment]] = {}
        if self.process.local_process_index == 0:
            for path in self._local_folder.rglob("*"):
                if path.is_file():
                    content: Segment = b""
                    if path.stat().st_size:
                        content = np.memmap(path, mode="r").data
                    files[path.relative_to(self._local_folder).as_posix()] = [content]
        return files

    def claim(self) -> JSONObject:
        """The version of the manifest that may be replaced."""
        return {"version": self._version}

    def commit(self, manifest: Manifest, claim: JSONObject) -> None:
        """Write the manifest, then delete the files of the checkpoint that it replaces."""
        token = self.temporary_name
        content = dataclasses.replace(manifest, token=token).to_bytes()
        older = self._objects()
        bucket, key = self.manifest.bucket, self.manifest.key

        def is_ours(written: bytes) -> bool:
            return token.encode() in written

        try:
            if claim["version"] is None:
                is_written = bucket.create(key, content, is_ours)
            else:
                is_written = bucket.replace(key, content, claim["version"], is_ours)
        except OSError as error:
            # Also a refusal: a request before it, without an answer, may have written it.
            raise UndecidedError(f"it may have been saved: {error}") from error
        if not is_written:
            raise CheckpointError(f"another run saved into {self.folder} after this save began")
        try:
            bucket.delete(older)
        except OSError as error:
            logger.warning("%s: files of the replaced checkpoint remain: %s", self.folder, error)

    def _objects(self) -> list[str]:
        """The keys of the files of the checkpoint that is there."""
        try:
            manifest = parse_manifest(self.manifest)
        except (FileNotFoundError, CorruptCheckpoint):
            return []
        place = manifest.files_in(self.folder)
        assert isinstance(place, BucketPath) and place.objects is not None
        return list(place.objects)

    def close(self) -> None:
        """Remove the local folder of hooks."""
        if self.temporary_name and self.process.local_process_index == 0:
            shutil.rmtree(self._local_folder, ignore_errors=True)

    def discard(self, is_undecided: bool = False) -> None:
        """Delete what was written, unless it may be a checkpoint: then it stays, and is removed after a day."""
        self.close()
        may_delete = not isinstance(self.error, BucketUnreachableError)
        if self.is_home and self.temporary_name and may_delete and not is_undecided:
            try:
                assert isinstance(self.temporary, BucketPath)
                remove_objects(self.temporary)
            except OSError as error:
                if not isinstance(self.error, BucketAccessError):
                    logger.warning("%s: files of the failed save remain: %s", self.folder, error)


def pending_checkpoint(given: Path, process: Process, options: Options) -> PendingCheckpoint:
    """A save that begins."""
    if isinstance(given, BucketPath):
        return BucketCheckpoint(given, process, options)
    return PendingCheckpoint(given, process, options)


def _appears(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

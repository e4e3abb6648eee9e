# SPDX-License-Identifier: Apache-2.0
"""`accelerate checkpoint`: which checkpoints are complete and undamaged, and what a bucket keeps of its promises."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.buckets import is_bucket
from ..core.errors import (
    BucketAccessError,
    BucketUnreachableError,
    CheckpointError,
    ConfigurationError,
)
from ..core.files import location
from ..core.objects import size_of
from .parser import Parser, exit_on, print_error

if TYPE_CHECKING:
    from ..checkpointing.layout import Manifest


def parser() -> Parser:
    """Return the parser of `accelerate checkpoint`."""
    what = "List, verify, copy and remove checkpoints in folders and buckets, and check a bucket."
    made = Parser(prog="accelerate checkpoint", description=what)
    actions = made.add_subparsers(
        dest="action", required=True, metavar="list | verify | copy | prune | check"
    )

    def add(name: str, what: str, place: str) -> Any:
        action = actions.add_parser(name, help=what, description=what)
        action.add_argument("path", help=place)
        return action

    place = "a checkpoint, a folder of checkpoints, or the folder of a project; or such a place in a bucket"
    what = "show the checkpoints, and whether each is complete, without reading the weights"
    add("list", what, place)
    what = "read every file and compare its checksum with the manifest; exit code 1 if one differs"
    add("verify", what, place)
    what = (
        "copy checkpoints between folders and buckets; each file is compared with its checksum, and a copy is a "
        "checkpoint when its last file is written"
    )
    add("copy", what, place).add_argument("target", help="a folder, or a place in a bucket")
    what = "remove what killed saves have left, after a day, and with --keep the oldest checkpoints"
    action = add("prune", what, place)
    action.add_argument("--keep", type=int, metavar="N", help="keep the newest N checkpoints")
    action.add_argument("--dry_run", action="store_true", help="only show what would be removed")
    what = (
        "try on small objects, which are removed again, what checkpoints rely on: rights, conditional writes, reads "
        "and listings that show what was written; exit code 1 if the store does otherwise"
    )
    action = add("check", what, "a place in a bucket, such as s3://bucket/run")
    action.add_argument("--json", action="store_true", help="print one JSON object")
    action.add_argument(
        "--size", type=int, default=64, help="MiB of the object that measures the speed (64)"
    )
    return made


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 1 if a checkpoint is incomplete or damaged, or if there is none."""
    options = parser().parse_args(arguments)
    with exit_on(ConfigurationError):
        if options.action == "check":
            kept = _check_store(options.path, options.size, options.json)
            sys.exit(0 if kept else 1)
        path = location(options.path, "path")
    with exit_on(BucketAccessError, BucketUnreachableError, code=1):
        folders, damaged = _folders(path)
        if options.action == "prune":
            _prune(folders, path, options.keep, options.dry_run)
            sys.exit(0)
        if not folders and not (damaged and options.action == "list"):
            print_error(f"there is no checkpoint in {path}")
            sys.exit(1)
        if options.action == "copy":
            with exit_on(ConfigurationError):
                target = location(options.target, "target")
                sound = [_copied(folder, path, target) for folder in folders]
        else:
            check = _verified if options.action == "verify" else _listed
            sound = [check(folder) for folder in folders]
        if options.action == "list":
            _list_leftovers(path, damaged)
    sys.exit(0 if all(sound) else 1)


def _list_leftovers(path: Path, damaged: list[Path]) -> None:
    from ..checkpointing.layout import leftovers_of

    for folder in damaged:
        print(
            f"set aside {folder}: a run has renamed it when it could not be loaded; no run reads or removes it"
        )
    for folder in leftovers_of(path):
        print(f"unfinished {folder}: a save was killed; `accelerate checkpoint prune` removes it")


def _prune(folders: list[Path], path: Path, keep: int | None, is_dry: bool) -> None:
    """Remove what killed saves have left below a path, and the oldest checkpoints beyond `keep`."""
    from ..checkpointing.layout import discard, leftovers_of, superfluous

    removed = leftovers_of(path)
    if keep is not None and folders != [path]:
        removed += superfluous(folders[0].parent, keep)
    word = "would remove" if is_dry else "removed"
    for folder in removed:
        if not is_dry:
            discard(folder)
        print(f"{word} {folder}")
    if not removed:
        print(f"there is nothing to remove in {path}")


def _copied(folder: Path, path: Path, target: Path) -> bool:
    """Copy a checkpoint at or below `path` to its place at or below `target`."""
    from ..checkpointing.copying import copy_checkpoint

    start = time.perf_counter()
    if folder != path:
        target = target / folder.relative_to(path)
    try:
        manifest = copy_checkpoint(folder, target)
    except (CheckpointError, OSError) as error:
        print(f"BAD  {error}")
        return False
    seconds = time.perf_counter() - start
    print(f"ok   {target}: {_about(manifest)}, copied in {seconds:.2f} s")
    return True


def _check_store(location: str, size: int, as_json: bool) -> bool:
    """Print each promise of the store of a location. Return whether all were kept."""
    if not is_bucket(location):
        raise ConfigurationError(
            f"{location} is a local path: check a place in a bucket, such as s3://bucket/run"
        )
    from .bucket_check import StoreCheck

    promises = []
    for promise in StoreCheck(location, size << 20).promises():
        promises.append(promise)
        if not as_json:
            word = "ok  " if promise.kept else "BAD "
            print(f"{word} {promise.name}: {promise.detail}", flush=True)
    if as_json:
        rows = [dataclasses.asdict(promise) for promise in promises]
        print(json.dumps({"location": location, "promises": rows}, indent=1))
    return all(promise.kept for promise in promises)


def _folders(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints at `path`, oldest first, and the damaged ones that runs have renamed there.

    `path` is a checkpoint, a folder of checkpoints or a project's folder.
    """
    from ..checkpointing.layout import checkpoints_dir, list_checkpoints, list_damaged

    if not path.is_dir():
        return [], []
    for directory in (path, checkpoints_dir(path)):
        if directory.is_dir():
            folders = [folder for _, folder in list_checkpoints(directory)]
            damaged = list_damaged(directory)
            if folders or damaged:
                return folders, damaged
    return [path], []


def _verified(folder: Path) -> bool:
    from ..checkpointing.layout import verify

    start = time.perf_counter()
    try:
        manifest = verify(folder)
    except (CheckpointError, OSError) as error:
        print(f"BAD  {error}")
        return False
    seconds = time.perf_counter() - start
    print(f"ok   {folder}: {_about(manifest)}, read in {seconds:.2f} s")
    return True


def _listed(folder: Path) -> bool:
    from ..checkpointing.layout import read_manifest, unfit

    why = unfit(folder)
    print(f"BAD  {why}" if why else f"ok   {folder}: {_about(read_manifest(folder))}")
    return why is None


def _about(manifest: Manifest) -> str:
    size = size_of(sum(record.size for record in manifest.files.values()))
    position = "".join(
        f", {name} {manifest.progress[name]}"
        for name in ("epoch", "step")
        if name in manifest.progress
    )
    if manifest.world_size == 1:
        processes = "1 process"
    else:
        processes = f"{manifest.world_size} processes"
    certificate = ""
    if manifest.certificate:
        certificate = f", certificate {manifest.certificate[:12]}"
    return f"{len(manifest.files)} files, {size}, saved by {processes}{position}{certificate}"

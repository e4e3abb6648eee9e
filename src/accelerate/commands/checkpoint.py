# SPDX-License-Identifier: Apache-2.0
"""`accelerate checkpoint`: which checkpoints are complete and undamaged, and what a bucket keeps of its promises."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import env
from ..core.bucket_path import BucketPath
from ..core.buckets import is_bucket
from ..core.errors import (
    BucketAccessError,
    BucketUnreachableError,
    CheckpointError,
    ConfigurationError,
)
from ..core.files import location
from ..core.imports import is_available
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
    action = add("list", what, place)
    action.add_argument(
        "--uploads", action="store_true", help="also show unfinished uploads to S3; needs boto3"
    )
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
    run = {"list": _list, "verify": _verify, "copy": _copy, "prune": _prune, "check": _check_store}
    with (
        exit_on(ConfigurationError),
        exit_on(BucketAccessError, BucketUnreachableError, code=1),
    ):
        is_good = run[options.action](options)
    sys.exit(0 if is_good else 1)


def _list(options: argparse.Namespace) -> bool:
    path = location(options.path, "path")
    if options.uploads:
        _list_uploads(path)
    folders, damaged = _folders(path)
    if not folders and not damaged:
        return _nothing(path)
    sound = [_listed(folder) for folder in folders]
    _list_leftovers(path, damaged)
    return all(sound)


def _verify(options: argparse.Namespace) -> bool:
    path = location(options.path, "path")
    folders, _ = _folders(path)
    sound = [_verified(folder) for folder in folders]
    return all(sound) if folders else _nothing(path)


def _copy(options: argparse.Namespace) -> bool:
    path = location(options.path, "path")
    target = location(options.target, "target")
    folders, _ = _folders(path)
    sound = [_copied(folder, path, target) for folder in folders]
    return all(sound) if folders else _nothing(path)


def _nothing(path: Path) -> bool:
    print_error(f"there is no checkpoint in {path}")
    return False


def _list_leftovers(path: Path, damaged: list[Path]) -> None:
    from ..checkpointing.layout import leftovers_of

    for folder in damaged:
        print(
            f"set aside {folder}: a run has renamed it when it could not be loaded; no run reads or removes it"
        )
    for folder in leftovers_of(path):
        print(f"unfinished {folder}: a save was killed; `accelerate checkpoint prune` removes it")


def _list_uploads(path: Path) -> None:
    """Print the uploads to S3 that were neither completed nor removed. obstore does not list them."""
    if not isinstance(path, BucketPath) or not path.bucket.url.startswith("s3://"):
        raise ConfigurationError(f"--uploads: {path} is not in a bucket of S3")
    if not is_available("boto3"):
        raise ConfigurationError("--uploads: `pip install boto3`, which lists them")
    boto3: Any = importlib.import_module("boto3")
    errors: Any = importlib.import_module("botocore.exceptions")
    name = path.bucket.url.removeprefix("s3://")
    region = env.all_with_prefix("AWS_").get("AWS_REGION")
    try:
        client = boto3.client("s3", region_name=region)
        pages = client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=name, Prefix=path.key):
            for upload in page.get("Uploads", ()):
                print(f"upload {upload['Key']}: begun {upload['Initiated']}, not completed")
    except (errors.BotoCoreError, errors.ClientError) as error:
        raise ConfigurationError(f"--uploads: {path}: {error}") from None


def _prune(options: argparse.Namespace) -> bool:
    """Remove what killed saves have left, and the oldest checkpoints beyond those to keep."""
    from ..checkpointing.layout import discard, leftovers_of, superfluous

    path = location(options.path, "path")
    if not path.is_dir():
        return _nothing(path)
    folders, _ = _folders(path)
    removed = leftovers_of(path)
    if options.keep is not None and folders not in ([], [path]):
        removed += superfluous(folders[0].parent, options.keep)
    for folder in removed:
        if options.dry_run:
            print(f"would remove {folder}")
        else:
            discard(folder)
            print(f"removed {folder}")
    if not removed:
        print(f"there is nothing to remove in {path}")
    return True


def _copied(folder: Path, path: Path, target: Path) -> bool:
    """Copy a checkpoint at or below `path` to its place at or below `target`."""
    from ..checkpointing.copying import copy_checkpoint

    if folder != path:
        target = target / folder.relative_to(path)
    return _reported(target, "copied", lambda: copy_checkpoint(folder, target))


def _check_store(options: argparse.Namespace) -> bool:
    """Print each promise of the store of a location. Return whether all were kept."""
    if not is_bucket(options.path):
        raise ConfigurationError(
            f"{options.path} is a local path: check a place in a bucket, such as s3://bucket/run"
        )
    from .bucket_check import StoreCheck

    promises = []
    for promise in StoreCheck(options.path, options.size << 20).promises():
        promises.append(promise)
        if not options.json:
            word = "ok  " if promise.kept else "BAD "
            print(f"{word} {promise.name}: {promise.detail}", flush=True)
    if options.json:
        rows = [dataclasses.asdict(promise) for promise in promises]
        print(json.dumps({"location": options.path, "promises": rows}, indent=1))
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

    return _reported(folder, "read", lambda: verify(folder))


def _reported(folder: Path, done: str, act: Callable[[], Manifest]) -> bool:
    """Print what `act` has found out about the checkpoint in a folder, and how long it took. Whether it succeeded."""
    start = time.perf_counter()
    try:
        manifest = act()
    except (CheckpointError, OSError) as error:
        print(f"BAD  {error}")
        return False
    seconds = time.perf_counter() - start
    print(f"ok   {folder}: {_about(manifest)}, {done} in {seconds:.2f} s")
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

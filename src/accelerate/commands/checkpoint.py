# SPDX-License-Identifier: Apache-2.0
"""`accelerate checkpoint`: which checkpoints are complete and undamaged, and what a bucket keeps of its promises."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
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
from ..core.objects import counted, names_in_words, size_of
from .parser import Parser, exit_on, print_error

if TYPE_CHECKING:
    from ..checkpointing.layout import Manifest

_FACTS = (
    "problem", "files", "bytes", "world_size", "epoch", "step", "certificate", "seconds",
)  # fmt: skip
# Files that tell what a folder without a manifest is.
_SIGNS = {
    "adapter_config.json": "it contains the adapters of a peft model, which "
    "PeftModel.from_pretrained reads",
    "config.json": "it contains a model, which from_pretrained reads",
    "random_states_*": "another library saved it, or the save did not finish. It does not have a "
    "manifest to verify",
    ".metadata": "it contains a torch.distributed.checkpoint checkpoint",
    "*.distcp": "it contains a torch.distributed.checkpoint checkpoint whose .metadata is missing",
    "*.safetensors": "it contains weights but not the manifest of a checkpoint",
    "*.bin": "it contains weights but not the manifest of a checkpoint",
    "telemetry": "it is the folder of a run that has not saved a checkpoint",
}


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

    place = "a checkpoint, a folder of checkpoints or the folder of a project, local or in a bucket"
    what = "show the checkpoints and whether each is complete, without reading the weights"
    as_json = {"action": "store_true", "help": "print one JSON object"}
    action = add("list", what, place)
    action.add_argument("--json", **as_json)
    action.add_argument(
        "--uploads", action="store_true", help="also show unfinished uploads to S3; needs boto3"
    )
    what = "read every file and compare its checksum with the manifest; exit code 1 if any differs"
    add("verify", what, place).add_argument("--json", **as_json)
    what = (
        "copy checkpoints between folders and buckets; each file is compared with its checksum, "
        "and a copy becomes valid when its last file is written"
    )
    add("copy", what, place).add_argument("target", help="a folder or a location in a bucket")
    what = "remove leftovers of killed saves after a day and, with --keep, the oldest checkpoints"
    action = add("prune", what, place)
    action.add_argument("--keep", type=int, metavar="N", help="keep the newest N checkpoints")
    action.add_argument(
        "--dry_run", action="store_true", help="show what would be removed, and remove nothing"
    )
    what = (
        "test with small temporary objects what checkpoints rely on: permissions, conditional "
        "writes, and reads and listings that show what was written; exit code 1 if a test fails"
    )
    action = add("check", what, "a location in a bucket, such as s3://bucket/run")
    action.add_argument("--json", **as_json)
    action.add_argument(
        "--size",
        type=int,
        default=64,
        help="size in MiB of the object that measures the speed (64)",
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
    from ..checkpointing.layout import leftovers_of

    path = location(options.path, "path")
    if options.uploads:
        if options.json:
            raise ConfigurationError("--uploads and --json exclude each other")
        _list_uploads(path)
    folders, damaged = _folders(path)
    rows = _rows(folders, _read_sizes, options)
    unfinished: list[Path] = []
    if path.is_dir():
        unfinished = leftovers_of(path)
    if options.json:
        _print_json(path, rows, set_aside=damaged, unfinished=unfinished)
    else:
        for folder in damaged:
            print(
                f"set aside {folder}: a run renamed it because it could not be loaded; no run "
                "reads or removes it"
            )
        for folder in unfinished:
            print(
                f"unfinished {folder}: a save was killed; `accelerate checkpoint prune` removes it"
            )
    if not folders and not damaged:
        return _nothing(path)
    return all(row["ok"] for row in rows)


def _verify(options: argparse.Namespace) -> bool:
    from ..checkpointing.layout import foreign_files, verify

    path = location(options.path, "path")
    folders, _ = _folders(path)
    rows = _rows(folders, verify, options, "read")
    for folder, row in zip(folders, rows, strict=True):
        row["foreign"] = foreign_files(folder) if row["ok"] else []
        if row["foreign"] and not options.json:
            names = names_in_words(row["foreign"])
            print(f"note {folder} also contains files that are not part of it: {names}")
    if options.json:
        _print_json(path, rows)
    return all(row["ok"] for row in rows) if folders else _nothing(path)


def _copy(options: argparse.Namespace) -> bool:
    path = location(options.path, "path")
    target = location(options.target, "target")
    folders, _ = _folders(path)
    sound = [_copied(folder, path, target) for folder in folders]
    return all(sound) if folders else _nothing(path)


def _nothing(path: Path) -> bool:
    print_error(f"there is no checkpoint in {path}{_what_it_is(path)}")
    return False


def _what_it_is(path: Path) -> str:
    """What a place without a checkpoint is, as far as the names of its files say it."""
    if isinstance(path, BucketPath):
        return ""
    if not path.exists():
        return ", which does not exist"
    if not path.is_dir():
        return ", which is a file: pass the folder of a checkpoint or of a project"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return ", which is empty"
    below = [name for name in names if (path / name).is_dir() and _folders(path / name)[0]]
    if below:
        return f": pass a folder in it that has one, such as {path / below[0]}"
    for name, what in _SIGNS.items():
        if fnmatch.filter(names, name):
            return f": {what}"
    return f", which has {names_in_words(names)}"


def _list_uploads(path: Path) -> None:
    """Print the uploads to S3 that were neither completed nor removed. obstore does not list them."""
    if not isinstance(path, BucketPath) or not path.bucket.url.startswith("s3://"):
        raise ConfigurationError(f"--uploads: {path} is not in an S3 bucket")
    if not is_available("boto3"):
        raise ConfigurationError("--uploads needs boto3: pip install boto3")
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
    row = _examined(target, lambda target: copy_checkpoint(folder, target))
    print(_text(row, "copied"), flush=True)
    return bool(row["ok"])


def _check_store(options: argparse.Namespace) -> bool:
    """Print each promise of the store of a location. Return whether all were kept."""
    if not is_bucket(options.path):
        raise ConfigurationError(
            f"{options.path} is a local path: check a location in a bucket, such as s3://bucket/run"
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

    `path` is a checkpoint, a folder of checkpoints or a project's folder. Where no checkpoint is numbered, those under
    other names are meant.
    """
    from ..checkpointing.layout import (
        MANIFEST,
        checkpoints_dir,
        list_checkpoints,
        list_damaged,
        list_named,
    )

    if not path.is_dir():
        return [], []
    for directory in (path, checkpoints_dir(path)):
        if directory.is_dir():
            folders = [folder for _, folder in list_checkpoints(directory)]
            damaged = list_damaged(directory)
            if folders or damaged:
                return folders, damaged
    if (path / MANIFEST).is_file():
        return [path], []
    return list_named(path), []


def _read_sizes(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files have their sizes. CheckpointError for another one."""
    from ..checkpointing.layout import read_manifest, unfit

    why = unfit(folder)
    if why is not None:
        raise CheckpointError(why)
    return read_manifest(folder)


def _rows(
    folders: Sequence[Path],
    examine: Callable[[Path], Manifest],
    options: argparse.Namespace,
    done: str = "",
) -> list[dict[str, Any]]:
    """What `examine` finds out about each checkpoint. Without --json each is printed at once."""
    rows = []
    for folder in folders:
        row = _examined(folder, examine)
        rows.append(row)
        if not options.json:
            print(_text(row, done), flush=True)
    return rows


def _examined(folder: Path, examine: Callable[[Path], Manifest]) -> dict[str, Any]:
    """What is known about the checkpoint in a folder, as an object of JSON. `examine` raises what is wrong with it."""
    row: dict[str, Any] = {"path": str(folder), "ok": False, **dict.fromkeys(_FACTS)}
    start = time.perf_counter()
    try:
        manifest = examine(folder)
    except (CheckpointError, OSError) as error:
        return {**row, "problem": str(error)}
    row["ok"] = True
    row["files"] = len(manifest.files)
    row["bytes"] = sum(record.size for record in manifest.files.values())
    row["world_size"] = manifest.world_size
    row["epoch"] = manifest.progress.get("epoch")
    row["step"] = manifest.progress.get("step")
    row["certificate"] = manifest.certificate or None
    row["seconds"] = round(time.perf_counter() - start, 3)
    return row


def _text(row: dict[str, Any], done: str) -> str:
    """The line of a checkpoint. `done`: what took the time."""
    if not row["ok"]:
        return f"BAD  {row['problem']}"
    facts = [f"{row['files']} files", size_of(row["bytes"])]
    facts.append(f"saved by {counted(row['world_size'], 'process')}")
    facts += [f"{name} {row[name]}" for name in ("epoch", "step") if row[name] is not None]
    if row["certificate"]:
        facts.append(f"certificate {row['certificate'][:12]}")
    if done:
        facts.append(f"{done} in {row['seconds']:.2f} s")
    return f"ok   {row['path']}: {', '.join(facts)}"


def _print_json(path: Path, rows: list[dict[str, Any]], **others: list[Path]) -> None:
    lists = {name: list(map(str, folders)) for name, folders in others.items()}
    print(json.dumps({"path": str(path), "checkpoints": rows, **lists}, indent=1))

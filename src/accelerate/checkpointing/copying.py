# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints between folders and buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..core.bucket_path import BucketPath
from ..core.constants import MODEL_NAME, SAFE_MODEL_NAME
from ..core.errors import AccelerateError, CheckpointError
from ..core.files import named_errors, read_range
from ..runtime.agreement import OneProcess
from .files import FileRecord
from .layout import MANIFEST, CorruptCheckpoint, Manifest, check_sizes, read_manifest
from .pending import Options, UndecidedError, pending_checkpoint

_FILES = 4  # that are copied at the same time
_BLOCKS = 4  # of a file that are read at the same time


def copy_checkpoint(source: Path, target: Path) -> Manifest:
    """Copy a checkpoint to another folder or place in a bucket.

    Each block is compared with its checksum on the way. The manifest is written last: an interrupted copy is not a
    checkpoint.

    Returns:
        The manifest.

    Raises:
        CheckpointError: the source is damaged, or there is another checkpoint at the target.
    """
    manifest = read_manifest(source)
    pending = pending_checkpoint(target, OneProcess(), Options())
    try:
        pending.open()
        if (target / MANIFEST).exists():
            if _content(read_manifest(target)) != _content(manifest):
                raise CheckpointError(
                    f"{target} already has a different checkpoint: choose another destination, or "
                    "remove it"
                )
            pending.discard()
            return manifest
        check_sizes(manifest.files_in(source), manifest)
        copy_files(source, pending.temporary, manifest, manifest.files)
        pending.commit(_content(manifest), pending.claim())
    except BaseException as error:
        pending.error = error
        pending.discard(isinstance(error, UndecidedError))
        raise
    pending.close()
    return manifest


def _content(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, token="")


@contextlib.contextmanager
def local_models(path: Path, beside: Path) -> Iterator[Path]:
    """A local copy of the models of a checkpoint in a bucket, until the end of the block, or the local path itself.

    Args:
        path: a checkpoint, or the file or folder of a model in it.
        beside: the copy is on the disk of this folder, where what is made of it goes.
    """
    if not isinstance(path, BucketPath):
        yield path
        return
    checkpoint, inner = path, ""
    # Where neither has one, the error is about the place that was given.
    if not (path / MANIFEST).exists() and (path.parent / MANIFEST).exists():
        checkpoint, inner = path.parent, path.name
    manifest = read_manifest(checkpoint)
    kinds = (SAFE_MODEL_NAME, MODEL_NAME, "adapter")
    names = [name for name in manifest.files if name.startswith(kinds)]
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".from-bucket-", dir=beside) as folder:
        copy = Path(folder, checkpoint.name)
        copy_files(checkpoint, copy, manifest, names)
        (copy / MANIFEST).write_bytes(_content(manifest).to_bytes())
        try:
            yield copy / inner
        except AccelerateError as error:
            error.args = (str(error).replace(str(copy), str(checkpoint)),)
            raise


def copy_files(source: Path, target: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Copy files of the checkpoint `source`, which are compared with their checksums, to below another folder."""
    files = manifest.files_in(source)
    with ThreadPoolExecutor(_FILES) as pool:
        jobs = []
        for name in names:
            jobs.append(pool.submit(_copy_file, files / name, target / name, manifest.files[name]))
        for job in jobs:
            job.result()


def _copy_file(source: Path, target: Path, record: FileRecord) -> None:
    blocks = _checked_blocks(source, record)
    if isinstance(target, BucketPath):
        target.bucket.write(target.key, blocks, record.size)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with named_errors(target), open(target, "xb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _checked_blocks(source: Path, record: FileRecord) -> Iterator[memoryview]:
    for number, checksum in enumerate(record.crc32):
        start = number % _BLOCKS * record.block
        if start == 0:
            offset = number * record.block
            size = min(_BLOCKS * record.block, record.size - offset)
            window = memoryview(read_range(source, offset, size))
        block = window[start : start + record.block]
        if f"{zlib.crc32(block):08x}" != checksum:
            raise CorruptCheckpoint(
                f"{source} is damaged: block {number} of {record.block} bytes differs from what "
                "was written"
            )
        yield block

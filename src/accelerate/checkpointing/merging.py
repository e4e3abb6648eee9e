# SPDX-License-Identifier: Apache-2.0
"""Merging the shards of a model into one file of weights, with a bounded amount of memory."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core import json_text
from ..core.constants import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import atomic_write, user_path
from ..core.objects import names_in_words
from ..core.tensor_files import write_atomically
from ..state import PartialState
from .documents import damage
from .files import BlockIO, file_head, host_view, in_file_order
from .layout import MANIFEST, check_files, numbered, read_manifest
from .sharded import FILES, load_entries, shard_entries
from .weights import plan_shards

logger: logging.Logger = logging.getLogger(__name__)

_SHARDS = re.compile(rf"{MODEL_NAME}_fsdp_(\d+)")
WINDOW = 256 << 20  # bytes of a model that are read at a time, or one tensor


@dataclass(frozen=True)
class Merged:
    """One written file: how many tensors it holds, and their size in bytes."""

    path: Path
    tensors: int
    size: int


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge the shards of a model: `model.safetensors` (or `pytorch_model.bin`) in the folder `output_path`.

    `checkpoint_dir` is the folder of shards, or a checkpoint that has one or several: the second model becomes
    `model_1.safetensors`. The main process does it. Raises CheckpointError when there are no shards, or damaged ones.
    """
    state = PartialState()
    if state.is_main_process:
        folder = user_path(checkpoint_dir, "checkpoint_dir")
        output = user_path(output_path, "output_path")
        merge(folder, output, safe_serialization, remove_checkpoint_dir)
    state.wait_for_everyone()


def merge(folder: Path, output: Path, safe: bool = True, remove: bool = False) -> list[Merged]:
    """What `merge_fsdp_weights` does, on this process alone; the files that were written.

    A safetensors file takes 1 GiB of memory (or thrice the largest tensor); torch's format takes as much as the model.
    """
    models = find_models(folder)
    if remove:
        _check_removal(folder, models, output)
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"{output} is a file: use a folder for the merged weights")
    for shards in models.values():
        checkpoint = shards.parent
        if (checkpoint / MANIFEST).exists():
            manifest = read_manifest(checkpoint)
            with BlockIO() as io:
                check_files(
                    io,
                    checkpoint,
                    manifest,
                    [n for n in manifest.files if n.startswith(f"{shards.name}/")],
                )
    written = [_merge_one(shards, output, index, safe) for index, shards in models.items()]
    if remove:
        shutil.rmtree(folder)
    return written


def find_models(folder: Path) -> dict[int, Path]:
    """{number of the model: folder of its shards}: the folder itself, or those in a checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"the folder {folder} does not exist")
    found = {
        int(match[1]): entry
        for entry in sorted(folder.iterdir())
        if (match := _SHARDS.fullmatch(entry.name)) and entry.is_dir()
    }
    if found:
        return dict(sorted(found.items()))
    if folder.name.startswith(f"{OPTIMIZER_NAME}_"):
        raise CheckpointError(
            f"{folder} holds the shards of an optimizer: use {MODEL_NAME}_fsdp_0 next to it"
        )
    if any(folder.glob("*.safetensors")) or (folder / ".metadata").exists():
        if not (folder / MANIFEST).exists():
            return {0: folder}
        raise CheckpointError(
            f"{folder} is a checkpoint of unsharded models, so there is nothing to merge. "
            "`accelerate export` makes a folder that from_pretrained reads"
        )
    raise CheckpointError(
        f"{folder} does not hold the shards of a model: use a checkpoint, or the "
        f"{MODEL_NAME}_fsdp_0 in it"
    )


def _check_removal(folder: Path, models: Mapping[int, Path], output: Path) -> None:
    """Raise ConfigurationError if removing the folder would remove more than what is merged."""
    if folder.is_symlink():
        raise ConfigurationError(
            f"{folder} is a link, which is not removed: use the folder that it points to"
        )
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)):
        raise ConfigurationError(
            f"removing {folder} would also remove the merged weights in {output}: use a folder "
            "outside it"
        )
    if folder in models.values():
        return
    known = {MANIFEST, *(shards.name for shards in models.values())}
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    if others:
        raise ConfigurationError(
            f"removing {folder} would also remove {names_in_words(others)}: name "
            "the folder of the shards itself, or keep the checkpoint"
        )


def shard_tensors(shards: Path) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a model on the meta device, under the names of its shards, and the prefix of these names."""
    with damage(shards / FILES):
        if (shards / FILES).exists():
            names = json_text.read(shards / FILES)
        else:
            names = []
    missing = [name for name in names if not (shards / name).exists()]
    if missing:
        raise CheckpointError(
            f"{shards} is not complete: it lacks {', '.join(missing)}. Copy all its files again"
        )
    entries = {}
    for name, entry in shard_entries(shards).items():
        values = math.prod(entry.size)
        present = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if present < values:
            raise CheckpointError(
                f"{shards} holds {present} of the {values} values of {name}: a file of shards is missing"
            )
        entries[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    if all(name.startswith("optimizer.") for name in entries):
        raise CheckpointError(f"{shards} does not hold any tensors of a model")
    # The API's own shards name everything below `model.`; ours do not.
    is_own = any(shards.glob("*.safetensors"))
    if is_own or not all(name.startswith("model.") for name in entries):
        return entries, ""
    return entries, "model."


def _merge_one(shards: Path, output: Path, index: int, safe: bool) -> Merged:
    entries, prefix = shard_tensors(shards)
    output.mkdir(parents=True, exist_ok=True)
    if safe:
        name, ending = (SAFE_MODEL_NAME, ".safetensors")
    else:
        name, ending = (MODEL_NAME, ".bin")
    path = output / numbered(name, index, ending)
    if safe:
        _stream(shards, entries, prefix, path)
    else:
        tensors = read_tensors(shards, entries)
        write_atomically(
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, path
        )
    size = sum(tensor.nbytes for tensor in entries.values())
    logger.info("%s: %d tensors of %s", path, len(entries), shards)
    return Merged(path, len(entries), size)


def _stream(shards: Path, entries: Mapping[str, torch.Tensor], prefix: str, path: Path) -> None:
    """Write a safetensors file, reading a few tensors of the shards at a time."""
    ordered = in_file_order(entries)
    plain = {name.removeprefix(prefix): tensor for name, tensor in ordered.items()}
    with atomic_write(path) as file:
        file.write(file_head(plain))
        for names in plan_shards(ordered, WINDOW):
            wanted = {name: ordered[name] for name in names}
            for tensor in read_tensors(shards, wanted).values():
                if tensor.numel():
                    file.write(host_view(tensor))


def read_tensors(shards: Path, entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read whole tensors from shards, by the names of these."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in entries.items()
    }
    load_entries(tensors, shards)
    return tensors

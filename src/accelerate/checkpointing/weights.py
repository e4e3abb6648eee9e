# SPDX-License-Identifier: Apache-2.0
"""A model's weights as files of their own, one or several with an index; and the API's `save` and `load`."""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from ..core.errors import ConfigurationError, WeightFileError
from ..core.files import atomic_write, follow_links, fsync_path, user_path
from ..core.messages import warn
from ..core.tensor_files import write_atomically, write_file
from ..placement.sizes import convert_file_size_to_int
from ..state import PartialState
from .compat import load_pickled
from .files import BlockIO, only_tensors, segments, with_own_storages, without_aliases

logger: logging.Logger = logging.getLogger(__name__)


def is_writer(process: PartialState, on_each_node: bool) -> bool:
    """Whether a process writes what is written once: the main process, or the first one of each machine."""
    if on_each_node:
        return process.is_local_main_process
    return process.is_main_process


def plan_shards(state: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Names of the tensors in each shard, in order: a shard is full when the next tensor would pass `limit` bytes."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def save_model(
    state: Mapping[str, object],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    process: PartialState,
    save_on_each_node: bool = False,
    write: Callable[..., object] | None = None,
) -> None:
    """Write a model's full state into a folder: `model.safetensors`, or numbered shards and their index.

    Every rank may call it; the main process (of each machine, with `save_on_each_node`) writes. Tied weights are
    stored once. Shards of an earlier save in the folder are removed. Without `safe_serialization`, torch.save writes.
    Raises ValueError when `save_directory` is a file, WeightFileError naming the entry that cannot be stored, OSError
    naming the file or folder that cannot be written. If given, `write(content, path, safe_serialization=...)`
    writes each file.
    """
    folder = follow_links(user_path(save_directory, "save_model: save_directory"), "save_model")
    if folder.is_file():
        raise ConfigurationError(f"save_model: {folder} is a file: pass a folder")
    try:
        limit = convert_file_size_to_int(max_shard_size)
    except ValueError as error:
        raise ConfigurationError(
            f"save_model: max_shard_size={max_shard_size!r}: {error}"
        ) from None
    if not is_writer(process, save_on_each_node):
        return
    folder.mkdir(parents=True, exist_ok=True)
    kept: Mapping[str, object] = dict(state)
    aliases: dict[str, str] = {}
    if safe_serialization:
        kept, aliases = without_aliases(clean_tensors(state))
    shards = plan_shards(only_tensors(kept), limit)
    if safe_serialization:
        single, pattern, index = (
            SAFE_WEIGHTS_NAME,
            SAFE_WEIGHTS_PATTERN_NAME,
            SAFE_WEIGHTS_INDEX_NAME,
        )
    else:
        single, pattern, index = (WEIGHTS_NAME, WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME)
    names = file_names(single, pattern, len(shards))
    shards[0] += [name for name, value in kept.items() if not isinstance(value, torch.Tensor)]
    contents = [{name: kept[name] for name in members} for members in shards]
    files = dict(zip(names, contents, strict=True))
    index_of_several = index if len(shards) > 1 else None
    if write is None:
        _write_files(folder, files, aliases, index_of_several, safe_serialization)
    else:
        (folder / index).unlink(missing_ok=True)
        for name, content in files.items():
            write(content, str(folder / name), safe_serialization=safe_serialization)
        if index_of_several is not None:
            write_index(folder / index_of_several, files)
    remove_stale(folder, single, pattern, index, set(names))
    logger.info("model weights saved in %s (%d file(s))", folder, len(names))


def clean_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors of a state; an entry of another kind cannot stand in a safetensors file and is named in an error."""
    bad = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if bad:
        raise WeightFileError(
            "these entries are not tensors, and a safetensors file cannot contain them: "
            f"{', '.join(bad[:20])}. Pass safe_serialization=False, or remove them from the state "
            "dict."
        )
    return only_tensors(state)


def _write_files(
    folder: Path,
    files: Mapping[str, Mapping[str, object]],
    aliases: Mapping[str, str],
    index: str | None = None,
    safe: bool = True,
) -> None:
    """Write all files under temporary names, then rename each, the index last."""
    token = uuid.uuid4().hex[:8]
    temporary = {name: folder / f".{name}.{token}.tmp" for name in files}
    try:
        with BlockIO() as io:
            for name, content in files.items():
                if safe:
                    here = {alias: kept for alias, kept in aliases.items() if kept in content}
                    io.write(temporary[name], segments(only_tensors(content), here))
                else:
                    write_file(with_own_storages(content), temporary[name])
                    fsync_path(temporary[name])
        if index is not None:
            # Until the new index is there no old one may name half of the new shards.
            (folder / index).unlink(missing_ok=True)
        for name, path in temporary.items():
            os.replace(path, folder / name)
    except BaseException:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise
    if index is not None:
        write_index(folder / index, files)
    fsync_path(folder)


def file_names(single: str, pattern: str, count: int) -> list[str]:
    """The names of the files of a model's weights: one, or several with numbers."""
    suffixes = (f"-{number:05d}-of-{count:05d}" for number in range(1, count + 1))
    if count == 1:
        return [single]
    return [pattern.format(suffix=suffix) for suffix in suffixes]


def write_index(path: Path, files: Mapping[str, Mapping[str, object]]) -> None:
    """Write the index of files, {name of a file: {name: tensor}}."""
    total = 0
    where: dict[str, str] = {}
    for name, content in files.items():
        for entry, value in content.items():
            where[entry] = name
            if isinstance(value, torch.Tensor):
                total += value.numel() * value.element_size()
    content = {"metadata": {"total_size": total}, "weight_map": where}
    with atomic_write(path, "w") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")


def remove_stale(folder: Path, single: str, pattern: str, index: str, written: set[str]) -> None:
    """Remove the files of an earlier save, which readers might take for those that were written."""
    start, _, ending = map(re.escape, pattern.partition("{suffix}"))
    shard = re.compile(rf"{start}-\d{{5}}-of-\d{{5}}{ending}")
    stale = {single}
    if len(written) == 1:
        stale.add(index)
    for entry in folder.iterdir():
        is_stale = entry.name in stale or shard.fullmatch(entry.name)
        if is_stale and entry.name not in written and not entry.is_dir():
            entry.unlink()


# --- the API's utility functions -----------------------------------------------------------------------------------


def save(
    obj: Any,
    f: str | os.PathLike[str],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write `obj` to the file `f` atomically, on the main process (of each machine).

    With `safe_serialization` a dict of tensors becomes a safetensors file, else torch.save writes it.
    Every process may call it. Raises ConfigurationError for another object than a dict with `safe_serialization`.
    """
    state = PartialState()
    if not is_writer(state, save_on_each_node):
        return
    if safe_serialization:
        if not isinstance(obj, Mapping):
            raise ConfigurationError(
                f"save: a safetensors file holds a dict of tensors, not a {type(obj).__name__}: "
                "use safe_serialization=False"
            )
        kept, aliases = without_aliases(clean_tensors(obj))
        if aliases:
            pairs = ", ".join(f"{alias} ({name})" for alias, name in sorted(aliases.items()))
            warn(
                "save: tensors that share memory are written once. Omitted names, each with the "
                f"name that is written: {pairs}",
                every_rank=True,
            )
        path = follow_links(user_path(f, "save"), "save")
        _write_files(path.parent, {path.name: kept}, aliases)
        return
    if isinstance(f, (str, os.PathLike)):
        write_atomically(obj, user_path(f, "save"))
    else:
        torch.save(obj, f)


def load(f: str | os.PathLike[str], map_location: Any = None, **kwargs: Any) -> Any:
    """Load a torch.save file as plain data; `weights_only=False` in `kwargs` trusts the file. As torch.load else.

    Raises CheckpointError for a file that holds more than plain data.
    """
    weights_only = kwargs.pop("weights_only", None)
    if weights_only is False:
        return torch.load(f, map_location=map_location, weights_only=False, **kwargs)
    return load_pickled(f, map_location=map_location, **kwargs)

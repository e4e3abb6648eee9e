# SPDX-License-Identifier: Apache-2.0
"""The API's functions that save and load the objects of a run without an `Accelerator`, in the API's own format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.serialization import MAP_LOCATION

from ..core.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from ..core.errors import ConfigurationError, MissingCheckpointError
from ..core.files import user_path
from ..core.tensor_files import write_atomically
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..state import PartialState
from .compat import load_pickled
from .files import with_own_storages
from .kinds import compat_files
from .layout import numbered, registered_file
from .loading import load_options, load_run
from .run_state import HasState, RunState, StateDict
from .weights import is_writer, save


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[StateDict],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[HasState],
    dataloaders: Sequence[object],
    process_index: int,
    step: int,
    scaler: HasState | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Save states into a folder, as the files that `Accelerator.save_state(layout="compat")` writes.

    Every process calls it. Each process writes the states of its random number generators, and the main process
    also everything else. The files are written into the folder itself, without checksums: a killed process leaves it
    incomplete.

    Args:
        output_dir: the folder, which is created if it does not exist.
        model_states: the `state_dict()` of each model, unsharded.
        optimizers: unsharded ones, prepared or not.
        schedulers: prepared or not.
        dataloaders: those with a `state_dict`, as prepared ones, are saved.
        process_index: the rank of this process.
        step: the step in the accumulation window.
        scaler: a gradient scaler.
        save_on_each_node: the main process of each machine writes, for folders that are not shared.
        safe_serialization: write weights as safetensors files; otherwise torch.save writes them.

    Returns:
        The folder.
    """
    folder = user_path(output_dir, "save_accelerator_state")
    folder.mkdir(parents=True, exist_ok=True)
    writes_shared = is_writer(PartialState(), save_on_each_node)
    ending = Path(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
    for index, weights in enumerate(model_states):
        path = folder / numbered(ending.stem, index, ending.suffix)
        save(weights, path, save_on_each_node, safe_serialization)
    run = RunState(
        optimizers=[PreparedOptimizer(optimizer) for optimizer in optimizers],
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
        progress={"accumulation_step": step},
    )
    files, _ = compat_files(run, {}, process_index, writes_shared)
    for name, value in files.items():
        write_atomically(with_own_storages(value), folder / name)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[HasState],
    dataloaders: Sequence[object],
    process_index: int,
    scaler: HasState | None = None,
    map_location: MAP_LOCATION = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, int]:
    """Load what `save_accelerator_state` or `Accelerator.save_state` saved for unsharded models.

    Every process calls it. All files are read, and compared with the objects, before one of these changes.

    Args:
        input_dir: the folder.
        models: prepared or not, as many as were saved.
        optimizers: likewise.
        schedulers: likewise.
        dataloaders: likewise.
        process_index: the rank of this process.
        scaler: a gradient scaler.
        map_location: accepted for compatibility: states are copied to the devices of the objects.
        load_kwargs: arguments of `torch.load`: `weights_only=False` trusts pickles with any content.
        load_model_func_kwargs: `strict=False` loads what fits.

    Returns:
        A dictionary whose `step` is the step in the accumulation window.

    Raises:
        CheckpointError: files are missing, damaged, or belong to other objects.
    """
    folder = user_path(input_dir, "load_accelerator_state")
    if not folder.is_dir():
        raise MissingCheckpointError(f"load_accelerator_state: the folder {folder} does not exist")
    process = PartialState()
    if process_index != process.process_index:
        raise ConfigurationError(
            f"load_accelerator_state: process_index is {process_index}, but this process has rank "
            f"{process.process_index}: each process loads its own states"
        )
    run = RunState(
        models=[PreparedModel(model) for model in models],
        optimizers=[PreparedOptimizer(optimizer) for optimizer in optimizers],
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
    )
    options = {**load_options(load_kwargs), **load_model_func_kwargs}
    report = load_run(run, folder, process=process, **options)
    return {"step": int(report.progress.get("accumulation_step", 0))}


def save_custom_state(
    obj: HasState, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Save the state of an object to the file `custom_checkpoint_<index>.pkl`, on the main process.

    Args:
        obj: has `state_dict`.
        path: the folder, which exists.
        index: the number of the object.
        save_on_each_node: the main process of each machine writes.
    """
    save(
        obj.state_dict(),
        user_path(path, "save_custom_state") / registered_file(index),
        save_on_each_node,
    )


def load_custom_state(
    obj: HasState, path: str | os.PathLike[str], index: int = 0, allow_pickle: bool = False
) -> None:
    """Load the state of an object from the file `custom_checkpoint_<index>.pkl`.

    Args:
        obj: has `load_state_dict`.
        path: the folder.
        index: the number of the object.
        allow_pickle: accept pickled objects, which can run any code. False reads plain data only.

    Raises:
        CheckpointError: the file cannot be read, or holds more than plain data.
    """
    file = user_path(path, "load_custom_state") / registered_file(index)
    obj.load_state_dict(load_pickled(file, allow_pickle))

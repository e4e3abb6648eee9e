# SPDX-License-Identifier: Apache-2.0
"""Running a model that is spread over devices: hooks, offloaded weights, and a guard against moves."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError
from ..core.modules import class_names, move_module
from . import logger
from .align import attach_align_device_hook_on_blocks, offloading_hook, restore_offloaded
from .module_hooks import guard_moves
from .names import Place, complete_device_map, device_for, entry_for, join, owner_of, tensor_at
from .offload import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)
from .sizes import named_module_tensors
from .subclasses import data_address, is_marked_quantized
from .tensors import QUANTIZED, TiedCopies, as_device, set_module_tensor_to_device
from .tied import find_tied_parameters, retie_parameters


def dispatch(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Place | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> None:
    """`big_modeling.dispatch_model` for a map that was checked to name every tensor."""
    class_names(model, "preload_module_classes", preload)
    completed = complete_device_map(model, device_map)
    places = _apart(model, completed)
    if any(offloading_hook(module) is not None for module in model.modules()):
        # It was dispatched before: start again from the complete model.
        restore_offloaded(model)
    if main_device is None:
        accelerators = (device for device in completed.values() if device not in ("cpu", "disk"))
        main_device = next(accelerators, "cpu")
    devices = set(places.values())
    needs_hooks = len(devices) > 1 or "disk" in devices or force_hooks
    if not needs_hooks and not is_marked_quantized(model):
        for device in map(as_device, devices):
            tensors = named_module_tensors(model, recurse=True)
            empty = [name for name, tensor in tensors if tensor.is_meta]
            if empty and device.type != "meta":
                raise CheckpointError(
                    f"the tensors {', '.join(empty[:5])} of {type(model).__name__} are on the meta device and cannot "
                    f"be moved to {device}: load a checkpoint first (load_checkpoint_and_dispatch does both)"
                )
            move_module(model, device)
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return
    # Main memory is no device apart from the CPU, and from the GPU of a machine where both share it.
    offloaded: tuple[str, ...] = ("cpu", "disk")
    if main_device in ("cpu", "mps"):
        offloaded = ("disk",)
    tied = find_tied_parameters(model)
    weights = _offloaded_weights(model, places, offloaded, state_dict, offload_dir, offload_index)
    if weights is not None:
        _name_tied(weights, model, tied)
        _keep_unlisted(weights, model, places, offloaded)
        for name in itertools.chain.from_iterable(tied):
            # A checkpoint has one name of a tied weight, which may be on the disk while this one stays in memory.
            device = device_for(name, places)
            if device not in offloaded and name in weights and tensor_at(model, name).is_meta:
                set_module_tensor_to_device(model, name, device, value=weights[name])
    execution_devices: dict[str, Any] = {"": main_device, **places}
    for name, device in places.items():
        if device in ("cpu", "disk"):
            execution_devices[name] = main_device
    attach_align_device_hook_on_blocks(
        model,
        execution_device=execution_devices,
        offload={name: device in offloaded for name, device in places.items()},
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload,
        tied_params_map=_tied_copies(model, tied, weights),
    )
    offloaded_to = [device for device in reversed(offloaded) if device in devices]
    if offloaded_to:
        logger.info(
            "Some parameters are on the meta device because they were offloaded to the "
            f"{' and '.join(offloaded_to)}."
        )
    _retie_by_device(model, tied)
    guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]


def check_complete(
    model: nn.Module, weights: Mapping[str, torch.Tensor], offload_buffers: bool
) -> None:
    """Raise CheckpointError where a weight of the model that would be offloaded has no values in `weights`."""
    kind = type(model).__name__
    folder = getattr(weights, "save_folder", None)
    index = getattr(weights, "index", {})
    stay: set[str] = set()
    if not offload_buffers:
        stay.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in stay or not isinstance(tensor, torch.Tensor):
            continue
        if name not in weights:
            if folder is None:
                raise CheckpointError(
                    f"the state dict lacks {name} of {kind}: pass the complete state_dict"
                )
            raise CheckpointError(
                f"the offload folder {folder} lacks {name} of {kind}: it belongs to a different "
                "model; use an empty folder"
            )
        if folder is None and weights[name].is_meta:
            raise CheckpointError(
                f"{name} of {kind} is on the meta device and does not have values to offload: "
                "load a checkpoint first (load_checkpoint_and_dispatch does both), or pass a "
                "state_dict"
            )
        shape = index.get(name, {}).get("shape", tensor.shape)
        if tuple(shape) != tensor.shape and type(tensor).__name__ not in QUANTIZED:
            raise CheckpointError(
                f"the offload folder {folder} has {name} with the shape {tuple(shape)}, but in "
                f"{kind} the shape is {tuple(tensor.shape)}: it belongs to a different model; use "
                "an empty folder"
            )


def _apart(model: nn.Module, places: Mapping[str, Any]) -> dict[str, Any]:
    """The same map without an entry inside another: a module with one inside is named by its children and tensors."""
    split: set[str] = set()
    for key in places:
        while key:
            key = key.rpartition(".")[0]
            split.add(key)
    result: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in split:
            names = [join(name, leaf) for leaf, _ in named_module_tensors(module)]
        elif not name or name.rpartition(".")[0] in split:
            names = [name]
        else:
            continue
        for part in names:
            entry = entry_for(part, places)
            if entry is not None:
                result[part] = places[entry]
    return result


def _offloaded_weights(
    model: nn.Module,
    places: Mapping[str, Any],
    offloaded: Sequence[str],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader | None:
    """The mapping from which offloaded weights are read; None if there are none."""
    on_cpu = [name for name, device in places.items() if device == "cpu"]
    on_disk = [name for name, device in places.items() if device == "disk"]
    if on_cpu and "cpu" in offloaded and state_dict is None:
        entries = extract_submodules_state_dict(model.state_dict(), on_cpu)
        state_dict = {
            name: value.to("cpu")
            for name, value in entries.items()
            if isinstance(value, torch.Tensor)
        }
    if not on_disk:
        offload_dir = None
    elif offload_index is None:
        if offload_dir is None:
            modules = ", ".join(name or "the entire model" for name in on_disk)
            raise ValueError(
                "We need an `offload_dir` to dispatch this model according to this `device_map`, the following "
                f"submodules need to be offloaded: {modules}."
            )
        if not os.path.isfile(os.path.join(offload_dir, INDEX_NAME)):
            weights = extract_submodules_state_dict(model.state_dict(), on_disk)
            if weights:
                offload_state_dict(offload_dir, weights)
            else:
                offload_dir = None
    if state_dict is None and offload_dir is None and offload_index is None:
        return None
    return OffloadedWeightsLoader(
        state_dict=state_dict, save_folder=offload_dir, index=offload_index
    )


def _name_tied(weights: OffloadedWeightsLoader, model: nn.Module, tied: list[list[str]]) -> None:
    """Let each tied weight be found under all its names: what is stored or in memory may know one of them only."""
    for group in tied:
        stored = [name for name in group if name in weights]
        parameter = tensor_at(model, group[0])
        if stored:
            unknown = sorted(set(group).difference(stored))
            weights.aliases.update(dict.fromkeys(unknown, stored[0]))
        elif not parameter.is_meta:
            in_memory = dict.fromkeys(group, parameter.detach())
            weights.state_dict = {**weights.state_dict, **in_memory}


def _keep_unlisted(
    weights: OffloadedWeightsLoader,
    model: nn.Module,
    places: Mapping[str, Any],
    offloaded: Sequence[str],
) -> None:
    """Keep in memory the weights that are to be offloaded and are stored nowhere, such as those of a new head."""
    unlisted = {}
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        if name in weights or parameter.is_meta:
            continue
        if device_for(name, places) in offloaded:
            unlisted[name] = parameter.detach().to("cpu")
    weights.state_dict = {**weights.state_dict, **unlisted}


def _tied_copies(
    model: nn.Module, tied: list[list[str]], weights: OffloadedWeightsLoader | None
) -> TiedCopies:
    """An empty entry for each tied parameter, by the addresses under which hooks may meet it."""
    in_memory: Mapping[str, torch.Tensor] = {}
    if weights is not None:
        in_memory = weights.state_dict
    names = list(itertools.chain.from_iterable(tied))
    tensors = [tensor_at(model, name) for name in names]
    tensors += [in_memory[name] for name in names if name in in_memory]
    return {data_address(tensor): {} for tensor in tensors if not tensor.is_meta}


def _retie_by_device(model: nn.Module, tied: list[list[str]]) -> None:
    """Make tied parameters one again where they are on one device: those apart each stay where they run.

    One that is offloaded stays with its twin for good where that is on the device on which it would be brought; those
    that are offloaded together share what the modules hold meanwhile, so that it can be seen that they are one.
    """
    meta = torch.device("meta")
    for group in tied:
        by_device: dict[torch.device, list[str]] = {}
        for name in group:
            by_device.setdefault(tensor_at(model, name).device, []).append(name)
        for name in list(by_device.get(meta, [])):
            owner, leaf = owner_of(model, name)
            hook = offloading_hook(owner)
            if hook is None or hook.execution_device is None:
                continue
            device = as_device(hook.execution_device)
            if device in by_device and device != meta:
                hook.resident.add(leaf)
                by_device[meta].remove(name)
                by_device[device].append(name)
        retie_parameters(model, by_device.values())

# SPDX-License-Identifier: Apache-2.0
"""Running a model that is spread over devices: hooks, offloaded weights, and a guard against moves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError, PrepareError
from ..core.imports import is_available
from ..core.modules import class_names, move_module
from ..logging import rank_0_logger
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
from .subclasses import data_address
from .tensors import QUANTIZED, TiedCopies, as_device, set_module_tensor_to_device
from .tied import find_tied_parameters, retie_parameters

_logger = rank_0_logger(__name__)

# How libraries mark a model whose weights bitsandbytes has quantised.
_QUANTIZED_MARKS = ("is_loaded_in_8bit", "is_loaded_in_4bit")


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
        main_device = next(
            (place for place in completed.values() if place not in ("cpu", "disk")), "cpu"
        )
    kinds = set(places.values())
    if not (len(kinds) > 1 or "disk" in kinds or force_hooks or _is_quantized(model)):
        for place in kinds:
            _move(model, as_device(place))
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return
    # Main memory is no device apart from the CPU, and from the GPU of a machine where both share it.
    offloaded = ("disk",) if main_device in ("cpu", "mps") else ("cpu", "disk")
    tied = find_tied_parameters(model)
    weights = _offloaded_weights(model, places, offloaded, state_dict, offload_dir, offload_index)
    if weights is not None:
        _name_tied(weights, model, tied)
        _keep_unlisted(weights, model, places, offloaded)
        for name in (name for group in tied for name in group):
            # A checkpoint has one name of a tied weight, which may be on the disk while this one stays in memory.
            place = device_for(name, places)
            if place not in offloaded and name in weights and tensor_at(model, name).is_meta:
                set_module_tensor_to_device(model, name, place, value=weights[name])
    attach_align_device_hook_on_blocks(
        model,
        execution_device={
            "": main_device,
            **{
                name: main_device if place in ("cpu", "disk") else place
                for name, place in places.items()
            },
        },
        offload={name: place in offloaded for name, place in places.items()},
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload,
        tied_params_map=_tied_copies(model, tied, weights),
    )
    offloaded_to = [place for place in offloaded if place in places.values()]
    if offloaded_to:
        where = " and ".join(reversed(offloaded_to))
        _logger.info(
            f"Some parameters are on the meta device because they were offloaded to the {where}."
        )
    _retie_by_device(model, tied)
    guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]


def _move(model: nn.Module, device: torch.device) -> None:
    empty = [name for name, tensor in named_module_tensors(model, recurse=True) if tensor.is_meta]
    if empty and device.type != "meta":
        raise CheckpointError(
            f"{', '.join(empty[:5])} of {type(model).__name__} "
            f"{'is' if len(empty) == 1 else 'are'} on the meta device and cannot be moved to {device}: load a "
            "checkpoint first (load_checkpoint_and_dispatch does both)"
        )
    move_module(model, device)


def check_complete(
    model: nn.Module, weights: Mapping[str, torch.Tensor], offload_buffers: bool
) -> None:
    """Raise CheckpointError where a weight of the model that would be offloaded has no values in `weights`."""
    if offload_buffers:
        stay = set()
    else:
        stay = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in stay or not isinstance(tensor, torch.Tensor):
            continue
        folder = getattr(weights, "save_folder", None)
        if folder is None:
            origin = "the state dict"
        else:
            origin = f"the offload folder {folder}"
        if name not in weights:
            raise CheckpointError(
                f"{origin} lacks {name} of {type(model).__name__}: "
                + (
                    "give the complete state_dict"
                    if folder is None
                    else "it is of another model; give an empty one"
                )
            )
        if folder is None and weights[name].is_meta:
            raise CheckpointError(
                f"{name} of {type(model).__name__} is on the meta device and has no values to offload: load a "
                "checkpoint first (load_checkpoint_and_dispatch does both), or give a state_dict"
            )
        shape = getattr(weights, "index", {}).get(name, {}).get("shape")
        if (
            shape is not None
            and type(tensor).__name__ not in QUANTIZED
            and tuple(shape) != tensor.shape
        ):
            raise CheckpointError(
                f"{origin} has {name} of the shape {tuple(shape)}, and that of {type(model).__name__} is "
                f"{tuple(tensor.shape)}: it is of another model; give an empty folder"
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
        else:
            if not name or name.rpartition(".")[0] in split:
                names = [name]
            else:
                names = []
        for part in names:
            entry = entry_for(part, places)
            if entry is not None:
                result[part] = places[entry]
    return result


def check_quantized(model: nn.Module, device: torch.device, training: bool) -> bool:
    """Return whether `model` has 8- or 4-bit weights, which must stay on the device where they were quantised.

    Args:
        model: any model. Libraries mark those with such weights with `is_loaded_in_8bit` or `is_loaded_in_4bit`.
        device: the device of this process.
        training: whether the model is to be trained; if not, its modules may be on any device.

    Raises:
        PrepareError: the model is to be trained, and its device map has modules on the disk or on another device.
    """
    if not any(getattr(model, mark, False) for mark in _QUANTIZED_MARKS):
        return False
    if training:
        _check_trainable(model, set((getattr(model, "hf_device_map", None) or {}).values()), device)
    return True


def _check_trainable(model: nn.Module, places: set[Any], device: torch.device) -> None:
    # bitsandbytes trains on the CPU too, if the entire run is there.
    offloaded = places & (
        {"disk"} if device.type == "cpu" and is_available("bitsandbytes") else {"cpu", "disk"}
    )
    if offloaded:
        raise PrepareError(
            f"{type(model).__name__} has 8- or 4-bit weights, and its hf_device_map offloads modules to "
            f"{' and '.join(sorted(offloaded))}: such a model cannot be trained. Load it with "
            f"device_map={{'': {str(device)!r}}}"
        )
    if len(places) == 1 and _is_elsewhere(place := next(iter(places)), device):
        raise PrepareError(
            f"{type(model).__name__} has 8- or 4-bit weights on device {place}, this process trains on {device}: "
            "they cannot be moved. Load it with device_map={'': Accelerator().local_process_index}"
        )


def _is_elsewhere(place: Any, device: torch.device) -> bool:
    if isinstance(place, torch.device):
        return place.type != device.type
    # A number is the index of an accelerator; on a run on the CPU it has no meaning.
    return isinstance(place, int) and device.type != "cpu" and place != (device.index or 0)


def _is_quantized(model: nn.Module) -> bool:
    """Whether the model is quantized with bitsandbytes: such weights are only moved by hooks."""
    method = getattr(model, "quantization_method", "bitsandbytes")
    return method == "bitsandbytes" and any(
        getattr(model, mark, False) for mark in ("is_quantized", *_QUANTIZED_MARKS)
    )


def _offloaded_weights(
    model: nn.Module,
    places: Mapping[str, Any],
    offloaded: Sequence[str],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader | None:
    """The mapping from which offloaded weights are read; None if there are none."""
    on_cpu = [name for name, place in places.items() if place == "cpu" and "cpu" in offloaded]
    on_disk = [name for name, place in places.items() if place == "disk"]
    if on_cpu and state_dict is None:
        kept = extract_submodules_state_dict(model.state_dict(), on_cpu)
        state_dict = {
            name: value.to("cpu") for name, value in kept.items() if isinstance(value, torch.Tensor)
        }
    if on_disk and offload_dir is None and offload_index is None:
        raise ValueError(
            "We need an `offload_dir` to dispatch this model according to this `device_map`, the following submodules "
            f"need to be offloaded: {', '.join(name or 'the entire model' for name in on_disk)}."
        )
    folder = offload_dir if on_disk else None
    if (
        folder is not None
        and offload_index is None
        and not os.path.isfile(os.path.join(folder, INDEX_NAME))
    ):
        weights = extract_submodules_state_dict(model.state_dict(), on_disk)
        if weights:
            offload_state_dict(folder, weights)
        else:
            folder = None
    if state_dict is None and folder is None and offload_index is None:
        return None
    return OffloadedWeightsLoader(state_dict=state_dict, save_folder=folder, index=offload_index)


def _name_tied(weights: OffloadedWeightsLoader, model: nn.Module, tied: list[list[str]]) -> None:
    """Let each tied weight be found under all its names: what is stored or in memory may know one of them only."""
    for group in tied:
        stored = next((name for name in group if name in weights), None)
        present = next(
            (tensor for tensor in (tensor_at(model, name) for name in group) if not tensor.is_meta),
            None,
        )
        for name in group:
            if name in weights:
                continue
            if stored is not None:
                weights.aliases[name] = stored
            elif present is not None:
                weights.state_dict = {**weights.state_dict, name: present.detach()}


def _keep_unlisted(
    weights: OffloadedWeightsLoader,
    model: nn.Module,
    places: Mapping[str, Any],
    offloaded: Sequence[str],
) -> None:
    """Keep in memory the weights that are to be offloaded and are stored nowhere, such as those of a new head."""
    unlisted = {
        name: parameter.detach().to("cpu")
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in weights and not parameter.is_meta and device_for(name, places) in offloaded
    }
    if unlisted:
        weights.state_dict = {**weights.state_dict, **unlisted}


def _tied_copies(
    model: nn.Module, tied: list[list[str]], weights: OffloadedWeightsLoader | None
) -> TiedCopies:
    """An empty entry for each tied parameter, by the addresses under which hooks may meet it."""
    kept = {} if weights is None else weights.state_dict
    copies: TiedCopies = {}
    for name in (name for group in tied for name in group):
        for tensor in (tensor_at(model, name), kept.get(name)):
            if tensor is not None and tensor.device.type != "meta":
                copies[data_address(tensor)] = {}
    return copies


def _retie_by_device(model: nn.Module, tied: list[list[str]]) -> None:
    """Make tied parameters one again where they are on one device: those apart each stay where they run.

    One that is offloaded stays with its twin for good where that is on the device on which it would be brought; those
    that are offloaded together share what the modules hold meanwhile, so that it can be seen that they are one.
    """
    for group in tied:
        by_device: dict[torch.device, list[str]] = {}
        for name in group:
            by_device.setdefault(tensor_at(model, name).device, []).append(name)
        meta = torch.device("meta")
        for name in list(by_device.get(meta, [])):
            owner, leaf = owner_of(model, name)
            hook = offloading_hook(owner)
            if hook is None or hook.execution_device is None:
                device = None
            else:
                device = as_device(hook.execution_device)
            if hook is not None and device in by_device and device != meta:
                hook.resident.add(leaf)
                by_device[meta].remove(name)
                by_device[device].append(name)
        retie_parameters(model, by_device.values())

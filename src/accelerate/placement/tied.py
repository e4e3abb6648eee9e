# SPDX-License-Identifier: Apache-2.0
"""Parameters that are one under several names: found, tied again after a move, kept on one device, saved once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from . import logger
from .names import DeviceMap, device_for, owner_of, tensor_at


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The groups of names that refer to the same parameter of `model`, each sorted.

    Works on the meta device too, as it compares the identity of the parameters. Tie first, move later: parameters
    that were moved one by one are no longer the same. Takes no further arguments: a TypeError names any.
    """
    if kwargs:
        raise TypeError(f"find_tied_parameters takes only a model, not {', '.join(kwargs)}")
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie each group of names in `tied_params` to one parameter again: the first that has data."""
    for group in tied_params:
        tensors = [tensor_at(model, name) for name in group]
        with_data_first = sorted(tensors, key=lambda tensor: tensor.is_meta)
        for name in group:
            owner, leaf = owner_of(model, name)
            setattr(owner, leaf, with_data_first[0])


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the config of a transformers model ties some weights; False for any other model."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    if any(hasattr(module, "_tie_weights") for module in model.modules()):
        return True
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder_decoder and getattr(config, "tie_encoder_decoder", False):
        return True
    configs = [config]
    if hasattr(config, "get_text_config"):
        configs.append(config.get_text_config(decoder=True))
    if not any(getattr(part, "tie_word_embeddings", False) for part in configs):
        return False
    output: Any = getattr(model, "get_output_embeddings", lambda: None)
    return output() is not None


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: DeviceMap
) -> None:
    """Log a warning for each group of tied parameters that a device map puts on several devices.

    Args:
        tied_params: groups of names, from `find_tied_parameters`.
        device_map: name of a module -> device.

    Raises:
        ValueError: a parameter has no device in the map.
    """
    for group in tied_params:
        devices = {name: device_for(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(
                f"Tied parameters are on different devices: {devices}. "
                "Please modify your custom device map or set `device_map='auto'`. "
            )


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """The identity of a tensor's memory: device, address and size of its storage.

    Tensors that share memory share it, also where they are different views of it.
    """
    local = tensor
    if hasattr(tensor, "to_local"):
        local = tensor.to_local()
    if local.device.type == "xla":
        from safetensors.torch import storage_ptr, storage_size

        return local.device, storage_ptr(local), storage_size(local)
    storage = local.untyped_storage()
    # Neither the meta device nor a fake tensor has addresses; the identity of the storage object is used instead.
    if storage.device.type == "meta":
        return local.device, StorageWeakRef(storage).cdata, storage.nbytes()
    return local.device, storage.data_ptr(), storage.nbytes()


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as safetensors can write it: every tensor contiguous, in separate memory, and once.

    Of several names for one tensor the first stays, and a warning in the log names the others: they come back where
    the model ties them. Views that only share memory (rows of one matrix, for example) are all kept, as copies.
    """
    names: dict[Any, list[str]] = defaultdict(list)
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            names[id_tensor_storage(value)].append(name)
    cleaned = dict(state_dict)
    dropped: list[str] = []
    for group in names.values():
        # An empty storage has no address: two of them are not one tensor.
        if len(group) > 1 and cleaned[group[0]].untyped_storage().nbytes():
            dropped += _separate(cleaned, group)
    if dropped:
        logger.warning(
            f"Removed shared tensor {set(dropped)} while saving. This should be OK, but check by verifying that you "
            "don't receive any warning while reloading"
        )
    for name, value in cleaned.items():
        if isinstance(value, torch.Tensor):
            cleaned[name] = value.contiguous()
    return cleaned


def _separate(state: dict[str, Any], group: list[str]) -> list[str]:
    """Drop the repeated names of one view from `state`, copy its distinct views apart; the names that were dropped."""
    views: dict[Any, str] = {}
    dropped = []
    for name in group:
        value = state[name]
        view = (value.storage_offset(), value.shape, value.stride(), value.dtype)
        if views.setdefault(view, name) != name:
            dropped.append(name)
            del state[name]
    if len(views) > 1:
        for name in views.values():
            state[name] = state[name].clone(memory_format=torch.contiguous_format)
    return dropped

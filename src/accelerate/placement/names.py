# SPDX-License-Identifier: Apache-2.0
"""Dotted names of a model: whose tensor a name is, and which entry of a device map speaks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import suggestion
from ..core.modules import direct_tensors

# A place a part of a model may be sent to: a device, an accelerator's index, or "disk".
Place = int | str | torch.device
DeviceMap = Mapping[str, Any]


def join(prefix: str, name: str) -> str:
    """`name` below `prefix`, as torch writes it: an empty side leaves no dot."""
    return ".".join(filter(None, (prefix, name)))


def is_within(name: str, prefix: str) -> bool:
    """Whether `name` is the module or tensor `prefix` or one inside it; everything is within the empty prefix."""
    return not prefix or f"{name}.".startswith(f"{prefix}.")


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a tensor, and the tensor's own name in it.

    Raises ValueError where there is no such submodule, parameter or buffer.
    """
    path, _, leaf = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ValueError(
            f"{type(module).__name__} has no submodule {path!r} to hold {tensor_name!r}: {error}"
        ) from None
    if not isinstance(getattr(owner, leaf, None), torch.Tensor):
        raise ValueError(
            f"{type(owner).__name__} does not have a parameter or a buffer named {leaf}"
            f"{suggestion(leaf, direct_tensors(owner))}"
        )
    return owner, leaf


def tensor_at(module: nn.Module, tensor_name: str) -> torch.Tensor:
    """The parameter or buffer at a dotted name; one that is registered as None counts as missing."""
    owner, leaf = owner_of(module, tensor_name)
    tensor: torch.Tensor = getattr(owner, leaf)
    return tensor


def entry_for(name: str, device_map: DeviceMap) -> str | None:
    """The most precise key of `device_map` that speaks for a tensor or module, or None where none does."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def device_for(name: str, device_map: DeviceMap) -> Any:
    """Where `device_map` puts a tensor or module. Raises ValueError where no key of it speaks for that name."""
    entry = entry_for(name, device_map)
    if entry is None:
        raise ValueError(
            f"The `device_map` does not contain the module {name}: assign a device to it or to "
            "one of its parents."
        )
    return device_map[entry]


def complete_device_map(model: nn.Module, device_map: DeviceMap) -> dict[str, Any]:
    """The map with all names of modules that have several, placed as the first one. The CPU is the text `"cpu"`."""
    completed = dict(device_map)
    for name, device in device_map.items():
        if isinstance(device, torch.device) and device.type == "cpu":
            completed[name] = "cpu"
    first_names: dict[int, str] = {}
    further_names: set[str] = set()
    for target, module in model.named_modules(remove_duplicate=False):
        source = first_names.setdefault(id(module), target)
        if source == target:
            continue
        further_names.add(target)
        if target.rpartition(".")[0] in further_names:
            continue
        if entry_for(source, completed) is None:
            source, target = target, source
        inside = {key: device for key, device in completed.items() if is_within(key, source)}
        entry = entry_for(source, completed)
        if entry is not None and not inside:
            inside = {source: completed[entry]}
        for key, device in inside.items():
            name = target + key[len(source) :]
            entry = entry_for(name, completed)
            if entry is None or completed[entry] != device:
                completed[name] = device
    return completed

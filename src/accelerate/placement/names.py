# SPDX-License-Identifier: Apache-2.0
"""Dotted names of a model: whose tensor a name is, and which entry of a device map speaks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import suggestion

# A place a part of a model may be sent to: a device, an accelerator's index, or "disk".
Place = int | str | torch.device
DeviceMap = Mapping[str, Any]


def join(prefix: str, name: str) -> str:
    """`name` below `prefix`, as torch writes it: an empty side leaves no dot."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def is_within(name: str, prefix: str) -> bool:
    """Whether `name` is the module or tensor `prefix` or one inside it; everything is within the empty prefix."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


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
    if leaf not in owner._parameters and leaf not in owner._buffers:
        near = suggestion(leaf, [*owner._parameters, *owner._buffers])
        raise ValueError(f"{owner} does not have a parameter or a buffer named {leaf}{near}")
    return owner, leaf


def tensor_at(module: nn.Module, tensor_name: str) -> torch.Tensor:
    """The parameter or buffer at a dotted name; one that is registered as None counts as missing."""
    owner, leaf = owner_of(module, tensor_name)
    found = owner._parameters.get(leaf, owner._buffers.get(leaf))
    if found is None:
        raise ValueError(f"{tensor_name} of {type(module).__name__} is registered as None: it holds no tensor")
    return found


def entry_for(name: str, device_map: DeviceMap) -> str | None:
    """The most precise key of `device_map` that speaks for a tensor or module, or None where none does."""
    while True:
        if name in device_map:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def device_for(name: str, device_map: DeviceMap) -> Any:
    """Where `device_map` puts a tensor or module. Raises ValueError where no key of it speaks for that name."""
    entry = entry_for(name, device_map)
    if entry is None:
        raise ValueError(f"The `device_map` does not contain the module {name}: give it, or a parent of it, a device.")
    return device_map[entry]


def as_device_map(device_map: DeviceMap) -> dict[str, Any]:
    """A device map in which the CPU is always the text `"cpu"`, also where it was given as a torch device."""
    return {
        name: "cpu" if isinstance(place, torch.device) and place.type == "cpu" else place
        for name, place in device_map.items()
    }


def normalized_classes(classes: str | Iterable[str] | None) -> list[str]:
    """Names of classes, given as one name, several or None, as a list."""
    if classes is None:
        return []
    return [classes] if isinstance(classes, str) else list(classes)

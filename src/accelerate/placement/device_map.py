# SPDX-License-Identifier: Apache-2.0
"""Which part of a model goes to which device: a plan that fills device after device, and checks of a given map."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigurationError
from .memory import get_max_memory
from .names import DeviceMap, entry_for, is_within, join, normalized_classes
from .sizes import Dtype, NamedPart, children_of, compute_module_sizes, get_max_layer_size
from .tied import check_tied_parameters_in_config, check_tied_parameters_on_same_device, find_tied_parameters

logger = logging.getLogger(__name__)


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """`device_map` with the entries of a module replaced by one for the module, wherever they all name one device.

    Changes the map in place and returns it. `module_name` is the module to start from.
    """
    below = [name for name in device_map if is_within(name, module_name)]
    if len(below) > 1 and len({device_map[name] for name in below}) == 1:
        device = device_map[below[0]]
        for name in below:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    inside = [name for name in below if name != module_name]
    depth = len(module_name.split(".")) + 1 if module_name else 1
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in inside):
        clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that `device_map` gives every tensor of the model's state dict a device.

    Raises ValueError with the names of those without one. Keys that fit no submodule are named in a warning.
    """
    missing = [name for name in model.state_dict() if entry_for(name, device_map) is None]
    known = {name for name, _ in model.named_modules()}
    for kind in (model.named_parameters, model.named_buffers):
        known.update(name for name, _ in kind(remove_duplicate=False))
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}", UserWarning
        )
    if missing:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters: " + ", ".join(missing)
        )


def check_plan_name(kind: str) -> None:
    """Raises ConfigurationError for text in place of a device map that names no way to plan one."""
    if kind not in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ConfigurationError(
            "If passing a string for `device_map`, please choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'."
        )


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MutableMapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Any]:
    """Plan where each part of `model` goes: accelerators first, then `"cpu"`, then `"disk"`, in the model's order.

    No device gets more than its `max_memory` (bytes or text such as `"10GiB"`; by default what is free). The first
    accelerator and the CPU keep room for the largest layer still to come, which is brought there when it runs from
    further down. Modules of `no_split_module_classes` stay whole; parameters that are tied go together where they fit.
    `dtype` and `special_dtypes` say in what the weights will be stored. The model may be on the meta device.

    `clean_result` groups entries by module; `offload_buffers` says that buffers move with offloaded weights instead of
    staying on the accelerator; with `fallback_allocation` a device that the next module does not fit gets the first
    later one that does, instead of nothing. `verbose` prints every step.

    Example:
        device_map = infer_auto_device_map(model, max_memory={0: "10GiB", "cpu": "30GiB"})
    """
    tied = find_tied_parameters(model)
    if check_tied_parameters_in_config(model) and not tied:
        logger.warning(
            "The model weights are not tied. Please use the `tie_weights` method before using the `infer_auto_device` "
            "function."
        )
    planner = _Planner(
        model,
        get_max_memory(max_memory),
        normalized_classes(no_split_module_classes),
        compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes),
        tied,
        fallback_allocation,
        print if verbose else _silent,
    )
    device_map: dict[str, Any] = planner.run()
    if not offload_buffers:
        buffers = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)
        planner.warn_of_buffers(buffers)
    planner.tell_of_empty_devices()
    if clean_result:
        device_map = clean_device_map(device_map)
    check_tied_parameters_on_same_device(tied, device_map)
    return device_map


def _silent(text: str) -> None:
    """What `verbose=False` prints."""


class _Planner:
    """Fills one device after the other with the parts of a model, splitting a part that does not fit."""

    def __init__(
        self,
        model: nn.Module,
        max_memory: dict[Any, Any],
        unsplittable: list[str],
        sizes: Mapping[str, int],
        tied: list[list[str]],
        fallback: bool,
        say: Any,
    ) -> None:
        self.unsplittable = unsplittable
        self.sizes = sizes
        self.tied = tied
        self.fallback = fallback
        self.say = say
        self.limits = max_memory
        self.devices = [*max_memory] if "disk" in max_memory else [*max_memory, "disk"]
        accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        self.accelerators = accelerators
        # Where layers from further down are brought to run: there must be room for the largest of them.
        self.landing = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
        self.ahead: list[NamedPart] = _parts("", model)
        self.used: dict[Any, Any] = dict.fromkeys(self.devices, 0)
        self.needed: dict[Any, Any] = {}
        self.device_map: OrderedDict[str, Any] = OrderedDict()
        self.at = 0
        self.largest: Any = 0
        self.largest_names: list[str] = []
        self._measure_largest()

    # The plan

    def run(self) -> OrderedDict[str, Any]:
        while self.ahead:
            name, part = self.ahead.pop(0)
            self.say(f"\nTreating module {name}.")
            self.largest_names = [known for known in self.largest_names if not is_within(known, name)]
            if not self.largest_names:
                self._measure_largest()
            self._treat(name, part)
        return self.device_map

    def _treat(self, name: str, part: nn.Module | torch.Tensor) -> None:
        """Put a part on the present device, or split it or what it is tied to, or go on to the next device."""
        device = self.devices[self.at]
        room = self._room(device)
        partners = self._partners(name)
        together = self.sizes[name] + sum(self.sizes[partner] for partner, _ in partners)
        if room is None or together <= room:
            self._put(name, partners, device, together, room)
            return
        if partners and self.sizes[name] <= room:
            # It is what this part is tied to that does not fit: less of that, or all of it on a later device.
            if not self._split_partner(name, part, partners):
                self._leave(device, name, part, together)
            return
        self.say(f"Not enough space on {device} to put {name} (space available {room}, module size {together}).")
        if inside := self._inside(name, part):
            self.say(f"Splitting {name}.")
            self.ahead[:0] = inside
            self._measure_largest()
            return
        self.say("This module cannot be split, going to the next device.")
        self._leave(device, name, part, together)

    def _put(self, name: str, partners: list[NamedPart], device: Any, size: Any, room: Any) -> None:
        names = [partner for partner, _ in partners]
        beside = f" and {names}" if names else ""
        left = "" if room is None else f" (available={room})"
        self.say(f"Putting {name}{beside} (size={size}){left} on {device}.")
        self.used[device] += size
        for placed in (name, *names):
            self.device_map[placed] = device
        if names:
            self.ahead = [entry for entry in self.ahead if entry[0] not in names]

    def _leave(self, device: Any, name: str, part: nn.Module | torch.Tensor, size: Any) -> None:
        """Go on to the next device with this part, unless a later one fits this device and fallback is wanted."""
        reserved = self.largest if device in self.landing else 0
        self.ahead.insert(0, (name, part))
        if self.used[device] == 0 and device != "disk":
            if self.fallback and self._bring_forward(device):
                return
            self.needed[device] = size + reserved
        self.used[device] += reserved
        self.at += 1

    # Sizes

    def _room(self, device: Any) -> Any:
        """The bytes free on a device, less the room for the largest layer ahead; None on disk, where all fits."""
        if device == "disk":
            return None
        return self.limits[device] - self.used[device] - (self.largest if device in self.landing else 0)

    def _measure_largest(self) -> None:
        modules = [(name, part) for name, part in self.ahead if isinstance(part, nn.Module)]
        self.largest, self.largest_names = get_max_layer_size(modules, self.sizes, self.unsplittable)

    def _inside(self, name: str, part: nn.Module | torch.Tensor) -> list[NamedPart]:
        """What a part splits into; nothing where it has no submodules or must stay whole."""
        if isinstance(part, nn.Module) and children_of(name, part, self.unsplittable):
            return _parts(name, part)
        return []

    # Tied parameters

    def _partners(self, name: str) -> list[NamedPart]:
        """The parts still ahead that hold a parameter which is tied to one inside the part `name`."""
        found: dict[str, NamedPart] = {}
        for group in self.tied:
            outside = [tied for tied in group if not is_within(tied, name)]
            if outside and len(outside) < len(group):
                for tied in outside:
                    entry = next((entry for entry in self.ahead if is_within(tied, entry[0])), None)
                    if entry is not None:
                        found.setdefault(entry[0], entry)
        return list(found.values())

    def _split_partner(self, name: str, part: nn.Module | torch.Tensor, partners: list[NamedPart]) -> bool:
        """Split the first part that can be split of those tied to this one, and treat this one again."""
        self.say(f"Not enough space to put {name} together with {[partner for partner, _ in partners]}.")
        for partner, module in partners:
            inside = self._inside(partner, module)
            if not inside:
                continue
            self.say(f"Splitting {partner}.")
            at = next(i for i, (found, _) in enumerate(self.ahead) if found == partner)
            self.ahead[at : at + 1] = inside
            self.ahead.insert(0, (name, part))
            self._measure_largest()
            return True
        return False

    # Fallback

    def _bring_forward(self, device: Any) -> bool:
        """Move the first part ahead that fits an empty device to the front, however deep inside; False if none."""
        self._measure_largest()
        room = self._room(device)
        candidates: list[tuple[NamedPart, tuple[NamedPart, ...]]] = [(entry, ()) for entry in reversed(self.ahead)]
        while candidates:
            (name, part), parents = candidates.pop()
            partners = [partner for partner, _ in self._partners(name) if not is_within(name, partner)]
            # A part without tensors fits anywhere and makes no use of the device.
            if 0 < self.sizes[name] <= room - sum(self.sizes[partner] for partner in partners):
                for parent, module in parents:
                    at = next(i for i, (found, _) in enumerate(self.ahead) if found == parent)
                    self.ahead[at : at + 1] = self._inside(parent, module)
                self.ahead = [(name, part), *(entry for entry in self.ahead if entry[0] != name)]
                return True
            candidates.extend((entry, (*parents, (name, part))) for entry in reversed(self._inside(name, part)))
        return False

    # What the plan has to say

    def warn_of_buffers(self, sizes: Mapping[str, int]) -> None:
        """Warn where the buffers of offloaded parts, which stay on an accelerator, find no room on any."""
        stay = sum(sizes[name] for name, device in self.device_map.items() if device in ("cpu", "disk"))
        if stay and self.accelerators and all(self.limits[d] < stay + self.used[d] for d in self.accelerators):
            warnings.warn(
                f"Current model requires {stay} bytes of buffer for offloaded layers, which seems does not fit any "
                "GPU's remaining memory. If you are experiencing a OOM later, please consider using "
                "offload_buffers=True."
            )

    def tell_of_empty_devices(self) -> None:
        """Log the devices that got nothing as their memory is too small, and what each would have needed."""
        lines = [
            f"  - {device}: {size} bytes required"
            for device, size in self.needed.items()
            if device not in self.device_map.values()
        ]
        if lines:
            logger.info(
                "No module could be assigned to these devices, as their `max_memory` is too small:\n"
                + "\n".join(lines)
                + "\nThe minimum is that of this plan and may change with the other limits."
            )


def _parts(name: str, module: nn.Module) -> list[NamedPart]:
    """What a module is made of: its own parameters, its submodules, its own buffers, all by full name."""
    groups = (module.named_parameters(recurse=False), module.named_children(), module.named_buffers(recurse=False))
    return [(join(name, own), part) for group in groups for own, part in group]

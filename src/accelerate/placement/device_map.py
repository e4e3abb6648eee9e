# SPDX-License-Identifier: Apache-2.0
"""Device maps: a plan that assigns modules to one device after another, checks of a given map, and memory limits."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core import devices
from ..core.errors import ConfigurationError
from ..core.messages import warn
from ..core.modules import class_names
from ..core.objects import flat_list
from . import logger
from .names import DeviceMap, complete_device_map, entry_for, is_within
from .sizes import (
    Dtype,
    Measured,
    NamedPart,
    children_of,
    compute_module_sizes,
    convert_file_size_to_int,
    get_max_layer_size,
    measure,
    members_of,
)
from .tied import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
)


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """`device_map` with the entries of a module replaced by one for the module, wherever they all name one device.

    Changes the map in place and returns it. `module_name` is the module to start from.
    """
    devices: dict[str, set[Any]] = defaultdict(set)  # of what is in each module
    entries: Counter[str] = Counter()
    paths: dict[str, list[str]] = {}
    for name in device_map:
        if is_within(name, module_name):
            paths[name] = _path(name, module_name)
    for name, path in paths.items():
        entries.update(path)
        for ancestor in path:
            devices[ancestor].add(device_map[name])
    for name, path in paths.items():
        uniform = [ancestor for ancestor in path if len(devices[ancestor]) == 1]
        if uniform and entries[uniform[0]] > 1:
            device_map[uniform[0]] = device_map.pop(name)
    return device_map


def _path(name: str, start: str) -> list[str]:
    """The names of the modules from `start` down to `name`, both included."""
    path = [name]
    while path[0] != start:
        path.insert(0, path[0].rpartition(".")[0])
    return path


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that `device_map` assigns a device to every tensor of the model's state dict.

    Raises ValueError with the names of those without one, and TypeError for what is not a mapping. Keys that fit no
    submodule are named in a warning.
    """
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"device_map is {device_map!r} instead of a mapping from names to devices: "
            "infer_auto_device_map creates one, and load_checkpoint_and_dispatch also takes "
            "'auto'"
        )
    completed = complete_device_map(model, device_map)
    missing = [name for name in model.state_dict() if entry_for(name, completed) is None]
    names: set[str] = set()
    for members in (model.named_modules, model.named_parameters, model.named_buffers):
        names.update(name for name, _ in members(remove_duplicate=False))
    unknown = [name for name in device_map if name not in names]
    if unknown:
        warn(f"The following device_map keys do not match any submodules in the model: {unknown}")
    for name, device in device_map.items():
        if str(completed[name]) != str(device):
            raise ValueError(
                f"device_map puts {name} on {device!r}, but this is another name of a module that "
                f"is on {completed[name]!r}"
            )
    if missing:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters: "
            + ", ".join(missing)
        )


def plan_device_map(
    model: nn.Module,
    kind: str,
    max_memory: MutableMapping[int | str, int | str] | None,
    no_split_module_classes: str | Sequence[str] | None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
    allow_disk: bool = True,
) -> dict[str, Any]:
    """A device map that is planned in the way `kind`, such as "auto"; the others as in `infer_auto_device_map`.

    Raises ConfigurationError for another word, ValueError where modules are on the disk without `allow_disk`.
    """
    if kind not in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ConfigurationError(
            "If passing a string for `device_map`, please choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'."
        )
    options: dict[str, Any] = {
        "no_split_module_classes": no_split_module_classes,
        "dtype": dtype,
        "special_dtypes": special_dtypes,
    }
    if kind != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, low_zero=kind == "balanced_low_0", **options
        )
    device_map = infer_auto_device_map(
        model, max_memory, offload_buffers=offload_buffers, **options
    )
    if not allow_disk:
        _check_no_disk(model, device_map, max_memory, no_split_module_classes, dtype)
    return device_map


def _check_no_disk(
    model: nn.Module,
    device_map: DeviceMap,
    max_memory: MutableMapping[int | str, int | str] | None,
    no_split_module_classes: str | Sequence[str] | None,
    dtype: Dtype | None,
) -> None:
    """Raise ValueError with what is missing where a planned map has modules on the disk, and there is no folder."""
    sizes = compute_module_sizes(model, dtype=dtype)
    missing = {name: sizes[name] for name, device in device_map.items() if device == "disk"}
    if not missing:
        return
    modules = [(name, part) for name, part in members_of("", model) if isinstance(part, nn.Module)]
    largest, layers = get_max_layer_size(modules, sizes, no_split_module_classes)
    block = layers[0] if layers else "none"
    limits = [f"{limit:,.0f} on {device}" for device, limit in get_max_memory(max_memory).items()]
    raise ValueError(
        "At least one of the model submodule will be offloaded to disk, please pass along an "
        f"`offload_folder`. The model has {sizes['']:,} bytes, of which {sum(missing.values()):,} "
        f"do not fit. The limits are {', '.join(limits)}; memory for the largest block ({block}, "
        f"{largest:,} bytes) stays free where offloaded weights run. To avoid the disk, allow a "
        f"total of {sizes[''] + largest:,} bytes in `max_memory`"
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
    """Plan on which device each module of `model` goes: accelerators first, then `"cpu"`, then `"disk"`.

    Modules are assigned in the order of the model. The first accelerator and the CPU keep memory free for the largest
    layer that is not yet assigned, because offloaded layers are moved there to run. Tied parameters are placed
    together if they fit.

    Args:
        model: the model, which may be on the meta device.
        max_memory: the memory to use on each device, in bytes or as text such as `"10GiB"`. Default: the free memory.
        no_split_module_classes: names of module classes that are not split over devices.
        dtype: the dtype in which the weights will be stored. Default: their own.
        special_dtypes: the dtypes of individual weights, by name.
        verbose: print every step.
        clean_result: replace the entries of a module with one entry if they all name the same device.
        offload_buffers: also offload the buffers of offloaded modules instead of keeping them on the accelerator.
        fallback_allocation: if the next module does not fit on an empty device, assign the next module that does.

    Returns:
        {name of a module or tensor: device}.

    Example:
        device_map = infer_auto_device_map(model, max_memory={0: "10GiB", "cpu": "30GiB"})
    """
    unsplittable = class_names(model, "no_split_module_classes", no_split_module_classes)
    measured = measure(model, dtype, special_dtypes, unsplittable)
    tied = find_tied_parameters(model)
    if check_tied_parameters_in_config(model) and not tied:
        logger.warning(
            "The model weights are not tied: call `model.tie_weights()` before `infer_auto_device_map`."
        )
    planner = _Planner(
        model,
        get_max_memory(max_memory),
        unsplittable,
        measured,
        tied,
        fallback_allocation,
        verbose,
    )
    device_map: dict[str, Any] = OrderedDict(complete_device_map(model, planner.run()))
    if not offload_buffers:
        planner.warn_of_buffers(measured.buffers)
    planner.log_empty_devices()
    if clean_result:
        device_map = clean_device_map(device_map)
    check_tied_parameters_on_same_device(tied, device_map)
    return device_map


class _Planner:
    """Assigns modules and tensors to one device after another, and splits a module that does not fit."""

    def __init__(
        self,
        model: nn.Module,
        max_memory: dict[Any, Any],
        unsplittable: list[str],
        measured: Measured,
        tied: list[list[str]],
        fallback: bool,
        verbose: bool,
    ) -> None:
        self.unsplittable = unsplittable
        self.sizes = measured.sizes
        self.tied = tied
        self.layers = measured.layers
        self.fallback = fallback
        self.verbose = verbose
        self.limits = max_memory
        self.devices = [*max_memory]
        if "disk" not in max_memory:
            self.devices.append("disk")
        self.accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        # Offloaded layers are moved to these devices to run: the largest of them must fit there.
        self.landing = [*self.accelerators[:1], "cpu"]
        if "mps" in self.accelerators:
            self.landing = ["mps"]
        self.ahead: list[NamedPart] = members_of("", model)
        self.used: dict[Any, Any] = dict.fromkeys(self.devices, 0)
        self.needed: dict[Any, Any] = {}
        self.device_map: dict[str, Any] = {}
        self.current = 0  # the index of the device that is being filled
        self.largest: Any = 0
        self.largest_names: set[str] = set()  # what is ahead with a layer of that size
        self._measure_largest()

    def log(self, text: str) -> None:
        """Print a step of a verbose plan."""
        if self.verbose:
            print(text)

    # --- planning

    def run(self) -> dict[str, Any]:
        while self.ahead:
            name, part = self.ahead.pop(0)
            self.log(f"\nTreating module {name}.")
            self.largest_names.discard(name)
            if not self.largest_names:
                self._measure_largest()
            self._assign(name, part)
        return self.device_map

    def _assign(self, name: str, part: nn.Module | torch.Tensor) -> None:
        """Put a part on the current device, or split it or what it is tied to, or advance to the next device."""
        device = self.devices[self.current]
        free = self._free_bytes(device)
        partners = self._partners(name)
        together = self.sizes[name] + sum(self.sizes[partner] for partner, _ in partners)
        if together <= free:
            self._put(name, [partner for partner, _ in partners], device, together, free)
            return
        if partners and self.sizes[name] <= free:
            # This part fits and what it is tied to does not: split that, or place all of it on a later device.
            if not self._split_partner(name, part, partners):
                self._leave(device, name, part, together)
            return
        self.log(
            f"Not enough space on {device} to put {name} (space available {free}, module size {together})."
        )
        inside = self._inside(name, part)
        if inside:
            self.log(f"Splitting {name}.")
            self.ahead[:0] = inside
            self._measure_largest()
            return
        self.log("This module cannot be split, going to the next device.")
        self._leave(device, name, part, together)

    def _put(self, name: str, partners: list[str], device: Any, size: Any, free: Any) -> None:
        names = [name, *partners]
        self.log(f"Putting {' and '.join(names)} (size={size}, available={free}) on {device}.")
        self.used[device] += size
        self.device_map.update(dict.fromkeys(names, device))
        self.ahead = [entry for entry in self.ahead if entry[0] not in partners]

    def _leave(self, device: Any, name: str, part: nn.Module | torch.Tensor, size: Any) -> None:
        """Advance to the next device with this part, unless a later part fits on this one and fallback is enabled."""
        reserved = self._reserved_bytes(device)
        self.ahead.insert(0, (name, part))
        if self.used[device] == 0:
            if self.fallback and self._bring_forward(device):
                return
            self.needed[device] = size + reserved
        self.used[device] += reserved
        self.current += 1

    # --- sizes

    def _free_bytes(self, device: Any) -> Any:
        """The free bytes of a device, less those reserved for the largest layer ahead. The disk has no limit."""
        if device == "disk":
            return math.inf
        return self.limits[device] - self.used[device] - self._reserved_bytes(device)

    def _reserved_bytes(self, device: Any) -> Any:
        if device in self.landing:
            return self.largest
        return 0

    def _measure_largest(self) -> None:
        layers = {
            name: self.layers[name] for name, part in self.ahead if isinstance(part, nn.Module)
        }
        self.largest = max(layers.values(), default=0)
        self.largest_names = {name for name, size in layers.items() if size == self.largest}

    def _inside(self, name: str, part: nn.Module | torch.Tensor) -> list[NamedPart]:
        """What a part splits into; empty if it has no submodules or must not be split."""
        if isinstance(part, nn.Module) and children_of(name, part, self.unsplittable):
            return members_of(name, part)
        return []

    # --- tied parameters

    def _partners(self, name: str) -> list[NamedPart]:
        """What is ahead with a parameter that is tied to one of the part `name`."""
        partners: dict[str, NamedPart] = {}
        for group in self.tied:
            outside = [tied for tied in group if not is_within(tied, name)]
            if len(outside) == len(group):
                continue
            for tied in outside:
                holders = [entry for entry in self.ahead if is_within(tied, entry[0])]
                if holders:
                    partners.setdefault(holders[0][0], holders[0])
        return list(partners.values())

    def _split_partner(
        self, name: str, part: nn.Module | torch.Tensor, partners: list[NamedPart]
    ) -> bool:
        """Split the first splittable part that is tied to this one, and assign this one again."""
        self.log(
            f"Not enough space to put {name} together with {[partner for partner, _ in partners]}."
        )
        for partner, module in partners:
            inside = self._inside(partner, module)
            if not inside:
                continue
            self.log(f"Splitting {partner}.")
            self._split_ahead(partner, inside)
            self.ahead.insert(0, (name, part))
            self._measure_largest()
            return True
        return False

    def _split_ahead(self, name: str, inside: list[NamedPart]) -> None:
        index = [ahead for ahead, _ in self.ahead].index(name)
        self.ahead[index : index + 1] = inside

    # --- fallback

    def _bring_forward(self, device: Any) -> bool:
        """Move the first part ahead that fits on an empty device to the front, at any depth. False if none does."""
        self._measure_largest()
        free = self._free_bytes(device)
        # With each part those that it is in.
        candidates: list[list[NamedPart]] = [[entry] for entry in reversed(self.ahead)]
        while candidates:
            *parents, (name, part) = candidates.pop()
            partners = [
                partner for partner, _ in self._partners(name) if not is_within(name, partner)
            ]
            left = free - sum(self.sizes[partner] for partner in partners)
            # A part without tensors fits anywhere and would not use the device.
            if 0 < self.sizes[name] <= left:
                for parent, module in parents:
                    self._split_ahead(parent, self._inside(parent, module))
                others = [entry for entry in self.ahead if entry[0] != name]
                self.ahead = [(name, part), *others]
                return True
            for entry in reversed(self._inside(name, part)):
                candidates.append([*parents, (name, part), entry])
        return False

    # --- warnings

    def warn_of_buffers(self, sizes: Mapping[str, int]) -> None:
        """Warn if the buffers of offloaded modules, which stay on an accelerator, fit on none."""
        offloaded = [name for name, device in self.device_map.items() if device in ("cpu", "disk")]
        stay = sum(sizes[name] for name in offloaded)
        left = [self.limits[device] - self.used[device] for device in self.accelerators]
        if left and stay > max(0, *left):
            warn(
                f"Current model requires {stay} bytes of buffer for offloaded layers, which does not seem to fit any "
                "GPU's remaining memory. If memory runs out later, use offload_buffers=True."
            )

    def log_empty_devices(self) -> None:
        """Log the devices that are too small for any module, and what each would have needed."""
        lines = [
            f"  - {device}: {size} bytes required"
            for device, size in self.needed.items()
            if device not in self.device_map.values()
        ]
        if lines:
            logger.info(
                "No module could be assigned to these devices, as their `max_memory` is too small:\n"
                + "\n".join(lines)
                + "\nThe minimum is for this plan and may change with the other limits."
            )


# --- how many bytes each device may hold ---------------------------------------------------------------------------

MaxMemory = dict[Any, Any]

# In this order a plan fills them, after the accelerators that have an index.
_NAMED = ("mps", "cpu", "disk")
# Of a lone accelerator's free memory, the part that a plan may fill unasked: the rest is for activations.
_SHARE_OF_ONE = 0.9
# How far a share exceeds the mean, in sizes of the largest block: blocks never fill a device exactly.
_SLACK = 1.25


def get_max_memory(max_memory: MutableMapping[int | str, int | str] | None = None) -> MaxMemory:
    """Return the memory that each device may use, in the order accelerators by index, `mps`, `cpu`, `disk`.

    Args:
        max_memory: device -> bytes, or text such as "10GiB", which is replaced by the number. Default: the free memory
            of each accelerator and of this machine.

    Returns:
        Device -> bytes.

    Raises:
        ConfigurationError: a device is unknown.
    """
    if max_memory is None:
        return _free_memory()
    for device, size in max_memory.items():
        if isinstance(size, str):
            max_memory[device] = convert_file_size_to_int(size)
    present = range(devices.device_count())
    indices: list[int] = []
    for device in max_memory:
        if device in _NAMED:
            continue
        if not isinstance(device, int) or isinstance(device, bool):
            raise ConfigurationError(
                f"Device {device} is not recognized, available devices are integers(for GPU/XPU), 'mps', 'cpu' and "
                "'disk'"
            )
        indices.append(device)
        if device not in present:
            logger.warning(
                f"Device {device} is not available, available devices are {list(present)}"
            )
    ordered: list[int | str] = [*sorted(indices), *_NAMED]
    return {
        device: convert_file_size_to_int(max_memory[device])
        for device in ordered
        if device in max_memory
    }


def _free_memory() -> MaxMemory:
    import psutil

    kind = devices.accelerator_type()
    main = psutil.virtual_memory().available
    if kind == "mps":
        # One memory for both: a part that is offloaded from it to the CPU gains nothing.
        return {"mps": main}
    free: MaxMemory = {}
    shared = False
    for index in range(devices.device_count(kind)):
        try:
            # The first tensor on a device takes the memory of its context, which is not the model's to fill.
            device = torch.device(kind, index)  # type: ignore[arg-type]
            torch.zeros(1, device=device)
            free[index] = devices.memory_info(device)[0]
            if kind == "cuda" and torch.cuda.is_available():
                # Without own memory it uses the main memory.
                shared = shared or bool(torch.cuda.get_device_properties(index).is_integrated)
        except RuntimeError as error:
            logger.warning(
                f"Device {kind}:{index} is not used because its free memory is unknown: {error}. "
                "Pass max_memory to use it"
            )
    # An integrated device uses the main memory: it is counted once, for the device.
    if shared:
        return free
    return {**free, "cpu": main}


def get_balanced_memory(
    model: nn.Module,
    max_memory: MutableMapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> MaxMemory:
    """Return memory limits with which `infer_auto_device_map` distributes a model evenly over the accelerators.

    Args:
        model: the model, which may be on the meta device.
        max_memory: device -> the maximum bytes (or text such as "10GiB") on it. Default: the free memory.
        no_split_module_classes: names of classes whose modules stay on one device.
        dtype: as in `compute_module_sizes`.
        special_dtypes: as in `compute_module_sizes`.
        low_zero: use device 0 only for what does not fit on the others.

    Returns:
        Device -> bytes. The last accelerator keeps its full limit, because equal shares may be too small.
    """
    limits = get_max_memory(max_memory)
    shared = [device for device in limits if device not in ("cpu", "disk") and limits[device] > 0]
    if not shared:
        return limits
    if len(shared) == 1:
        low_zero = False
        if max_memory is None:
            limits[shared[0]] *= _SHARE_OF_ONE
            logger.info(
                f"The plan may fill {_SHARE_OF_ONE:.0%} of the free memory on device {shared[0]}; "
                "the rest is reserved for the forward pass. Pass `max_memory` to fill more, at "
                "your own risk."
            )
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    total = sizes[""]
    sharing = len(shared)
    if low_zero:
        sharing -= 1
    block = _largest_block(model, sizes, no_split_module_classes)
    share = total // sharing + int(_SLACK * max(block, _mean_layer(sizes)))
    indices = sorted(device for device in shared if isinstance(device, int))
    for index in indices[:-1]:
        if index or not low_zero:
            limits[index] = min(share, limits[index])
    if low_zero:
        others = sum(limits[index] for index in range(1, len(shared)))
        limits[0] = min(max(0, total - others), limits[0])
    return limits


def _largest_block(
    model: nn.Module, sizes: Mapping[str, int], classes: str | Iterable[str] | None
) -> int:
    """The largest block of the classes that are not to be split; 0 where there is none.

    All of them count, not the first of each class: in a mixture of experts a dense first block is much the smallest.
    """
    names = set(flat_list(classes))
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in names]
    return max((sizes[name] for name in blocks), default=0)


def _mean_layer(sizes: Mapping[str, int]) -> int:
    """The mean size of the modules that hold tensors and no other module that does."""
    modules = {name.rpartition(".")[0] for name in sizes} - {""}
    above = {name.rpartition(".")[0] for name in modules}
    layers = [sizes[name] for name in modules - above]
    return int(sum(layers) / max(len(layers), 1))

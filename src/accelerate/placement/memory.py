# SPDX-License-Identifier: Apache-2.0
"""How many bytes each device may hold: what is free now, and shares that spread a model over the accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core import devices
from ..core.errors import ConfigurationError
from ..core.modules import require_module
from ..core.objects import flat_list
from . import logger
from .sizes import Dtype, compute_module_sizes, convert_file_size_to_int

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
            if kind == "cuda":
                # Without own memory it uses the main memory.
                shared = shared or bool(torch.cuda.get_device_properties(index).is_integrated)
        except RuntimeError as error:
            logger.warning(
                f"Device {kind}:{index} is left out, as its free memory is not known: {error}. "
                "Give max_memory to use it"
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
    """Return memory limits with which `infer_auto_device_map` spreads a model evenly over the accelerators.

    Args:
        model: the model, which may be on the meta device.
        max_memory: device -> bytes (or text such as "10GiB") that it may hold at most. Default: the free memory.
        no_split_module_classes: names of classes whose modules stay on one device.
        dtype: as in `compute_module_sizes`.
        special_dtypes: as in `compute_module_sizes`.
        low_zero: leave device 0 only what the others cannot hold.

    Returns:
        Device -> bytes. The last accelerator keeps its full limit, as the equal shares may be too small.
    """
    require_module(model, "get_balanced_memory")
    limits = get_max_memory(max_memory)
    shared = [device for device in limits if device not in ("cpu", "disk") and limits[device] > 0]
    if not shared:
        return limits
    if len(shared) == 1:
        low_zero = False
        if max_memory is None:
            limits[shared[0]] *= _SHARE_OF_ONE
            logger.info(
                f"The plan may fill {_SHARE_OF_ONE:.0%} of the memory that is free on device {shared[0]}; the rest is "
                "left for what a forward pass needs. Give `max_memory` to fill more, at your own risk."
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

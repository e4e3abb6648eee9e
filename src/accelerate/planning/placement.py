# SPDX-License-Identifier: Apache-2.0
"""Device maps that leave memory for what a forward needs: activations, the key-value cache, an offloaded layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigurationError
from ..core.modules import class_names
from ..core.objects import size_of
from ..placement.device_map import check_device_map, get_max_memory, infer_auto_device_map
from ..placement.names import device_for
from ..placement.sizes import Dtype, compute_module_sizes, get_max_layer_size, named_module_tensors
from ..torch_internals import tracing
from .ledger import ACTIVATIONS, WEIGHTS, Ledger, fake_copy
from .model import BatchShape, fake_batch


@dataclass(frozen=True)
class DeviceUse:
    """The bytes of one device.

    Fields:
        budget: what it may hold; None for the disk, which has no limit.
        weights: parameters and buffers that are kept there.
        layer: memory for what is kept elsewhere and runs here: twice the largest layer, since the next one is fetched
            ahead, and the buffers, which stay here.
        activations: of a forward.
        cache: keys and values of the blocks that run here.
    """

    budget: int | None
    weights: int = 0
    layer: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.layer + self.activations + self.cache


@dataclass(frozen=True)
class Placement:
    """A device map, and what each device then holds."""

    device_map: dict[str, Any]
    use: dict[Any, DeviceUse]


def place(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    *,
    batch: BatchShape | None = None,
    cache_tokens: int = 0,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: Dtype | None = None,
    disk: bool = True,
) -> Placement:
    """Plan a device map as `infer_auto_device_map` does, with memory for a forward, and prove that it fits.

    Args:
        model: the model, which may be on the meta device.
        max_memory: the memory to use on each device. Default: what is free.
        batch: what the model is called with (`planning.model.parse_batch("8x128")`); the activations of one forward
            without gradients are then left free on each device that computes.
        cache_tokens: tokens of a generation, for each sample of `batch`, whose keys and values are kept on the device
            of their layer. Needs a transformers config.
        no_split_module_classes: names of module classes that are not split. Default: the model's `_no_split_modules`.
        dtype: the dtype in which the weights will be stored. Default: their own.
        disk: whether weights may stay on the disk.

    Returns:
        The map, in which every parameter and buffer has one device, and the use of each device.

    Raises:
        ConfigurationError: it does not fit. The error names what is missing on each device.

    Example:
        placement = place(model, {0: "10GiB", "cpu": "30GiB"}, batch=parse_batch("8x512"), cache_tokens=512)
        model = load_checkpoint_and_dispatch(model, "checkpoint", device_map=placement.device_map)
    """
    if no_split_module_classes is None:
        no_split_module_classes = getattr(model, "_no_split_modules", None)
    unsplittable = class_names(model, "no_split_module_classes", no_split_module_classes)
    limits = get_max_memory(dict(max_memory) if max_memory is not None else None)
    computing = [device for device in limits if device not in ("cpu", "disk")] or ["cpu"]
    if batch is None:
        activations = 0
    else:
        activations = _activations(model, batch, dtype)
    if cache_tokens:
        layers = _cached_layers(model, unsplittable)
    else:
        layers = []
    if cache_tokens:
        cache = _cache_bytes(model, batch, cache_tokens, dtype)
    else:
        cache = 0
    cached = Counter[Any]()
    offloaded = 0
    # What a device has to leave free depends on the map, and the map on what is free. The free memory only shrinks.
    while True:
        free = {
            device: size - (activations if device in computing else 0) - cached[device] * cache
            for device, size in limits.items()
        }
        free[computing[0]] -= offloaded
        short = {device: -size for device, size in free.items() if size < 0}
        if short:
            raise _missing(
                model,
                dtype,
                limits,
                short,
                activations,
                cache * max(len(layers), 1) if cache else 0,
            )
        device_map = infer_auto_device_map(
            model,
            dict(free),
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            offload_buffers=True,
        )
        places = (device_for(layer, device_map) for layer in layers)
        blocks_on = Counter(place if place in computing else computing[0] for place in places)
        arriving = _arriving(model, device_map, computing, unsplittable, dtype)
        if arriving <= offloaded and all(blocks_on[device] <= cached[device] for device in limits):
            break
        cached = cached | blocks_on
        offloaded = max(offloaded, arriving)
    check_device_map(model, device_map)
    use = _use(model, device_map, limits, dtype)
    for device in computing:
        own = arriving if device == computing[0] else 0
        use[device] = replace(
            use[device], layer=own, activations=activations, cache=blocks_on[device] * cache
        )
    over = {
        device: usage.total - usage.budget
        for device, usage in use.items()
        if usage.budget is not None and usage.total > usage.budget
    }
    on_disk = use["disk"].weights if "disk" in use else 0
    if on_disk and not disk:
        over["disk"] = on_disk
    if over:
        raise _missing(
            model, dtype, limits, over, activations, sum(usage.cache for usage in use.values())
        )
    return Placement(device_map, use)


def _arriving(
    model: nn.Module,
    device_map: dict[str, Any],
    computing: list[Any],
    unsplittable: list[str],
    dtype: Dtype | None,
) -> int:
    """Bytes of what is kept elsewhere at the time when it runs."""
    sizes = compute_module_sizes(model, dtype=dtype)
    entries: dict[str, Any] = {
        **dict(model.named_modules()),
        **dict(named_module_tensors(model, recurse=True)),
    }
    elsewhere = [
        (name, entries[name])
        for name, device in device_map.items()
        if device not in computing and name in entries
    ]
    largest, _ = get_max_layer_size(elsewhere, sizes, unsplittable)
    buffers = compute_module_sizes(model, dtype=dtype, buffers_only=True)
    return 2 * largest + sum(buffers.get(name, 0) for name, _ in elsewhere)


def _use(
    model: nn.Module, device_map: dict[str, Any], limits: Mapping[Any, int], dtype: Dtype | None
) -> dict[Any, DeviceUse]:
    """Count each tensor of the model once, on its device."""
    sizes = compute_module_sizes(model, dtype=dtype)
    weights = Counter[Any]()
    for name, _ in named_module_tensors(model, recurse=True):
        weights[device_for(name, device_map)] += sizes[name]
    return {
        device: DeviceUse(limits.get(device), weights[device])
        for device in dict.fromkeys([*limits, *weights])
    }


def _missing(
    model: nn.Module,
    dtype: Dtype | None,
    limits: Mapping[Any, int],
    missing: Mapping[Any, int],
    activations: int,
    cache: int,
) -> ConfigurationError:
    total = compute_module_sizes(model, dtype=dtype)[""]
    rows = []
    for device, size in missing.items():
        if device == "disk":
            rows.append(
                f"{size_of(size)} of weights do not fit on any device and would stay on the disk"
            )
        else:
            rows.append(
                f"device {device} has {size_of(limits[device])} and needs {size_of(size)} more"
            )
    return ConfigurationError(
        f"{type(model).__name__} does not fit: {'; '.join(rows)}. It has {size_of(total)} of weights, "
        f"{size_of(activations)} of activations on each device that computes, and {size_of(cache)} of keys and values"
    )


def _activations(model: nn.Module, batch: BatchShape, dtype: Dtype | None) -> int:
    """Bytes at the peak of a forward without gradients, besides the weights."""
    ledger = Ledger(fake=True)
    with tracing.fake_mode(), ledger, torch.no_grad():
        copy = fake_copy(model).eval()
        if isinstance(dtype, torch.dtype):
            copy.to(dtype)
        ledger.label([*copy.parameters(), *copy.buffers()], WEIGHTS)
        start = ledger.mark()
        copy(**fake_batch(copy, batch))
        return ledger.peak(start)[ACTIVATIONS]


def _cached_layers(model: nn.Module, unsplittable: list[str]) -> list[str]:
    """The names of the blocks that keep keys and values."""
    blocks = [
        name for name, module in model.named_modules() if type(module).__name__ in unsplittable
    ]
    if not blocks:
        raise ConfigurationError(
            f"cache_tokens: {type(model).__name__} does not name its blocks: pass "
            "no_split_module_classes"
        )
    return blocks


def _cache_bytes(
    model: nn.Module, batch: BatchShape | None, tokens: int, dtype: Dtype | None
) -> int:
    """Bytes of the keys and values of one block."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if config is None or heads is None or batch is None:
        raise ConfigurationError(
            "cache_tokens needs a batch, and a model whose config has num_attention_heads and hidden_size"
        )
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if isinstance(dtype, torch.dtype):
        stored = dtype
    else:
        stored = next(model.parameters()).dtype
    return int(2 * batch.samples * tokens * shared * width * stored.itemsize)

# SPDX-License-Identifier: Apache-2.0
"""Models larger than a device: built without memory, spread over devices, the CPU and the disk, and run there."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .core import env
from .core.errors import PrepareError
from .core.lazy import public_names
from .core.modules import class_names
from .core.objects import flat_list
from .hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
)
from .placement.align import (
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from .placement.align import offloading_hook, restore_offloaded
from .placement.device_map import check_device_map, plan_device_map
from .placement.dispatch import check_complete, dispatch
from .placement.load import load_checkpoint_in_model
from .placement.names import Place, join
from .placement.offload import INDEX_NAME, OffloadedWeightsLoader, offload_state_dict
from .placement.tensors import check_devices, set_module_tensor_to_device

# Layers that compute in one dtype throughout, so that their weights may be stored in another.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Return a context in which modules are built on the meta device: of any size, without memory or data.

    Only parameters are on the meta device, unless `include_buffers` is true (default: the variable
    ACCELERATE_INIT_INCLUDE_BUFFERS, otherwise False).

    Example:
        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: Place, include_buffers: bool | None = None) -> Iterator[None]:
    """Return a context in which the parameters of new modules are created on `device`.

    Args:
        device: the device.
        include_buffers: also create buffers and all other new tensors there.

    Example:
        with init_on_device("cuda:0"):
            model = Model(config)
    """
    if include_buffers is None:
        include_buffers = env.get_flag("ACCELERATE_INIT_INCLUDE_BUFFERS")
    if include_buffers:
        with torch.device(device):
            with (
                _registering("register_buffer", device),
                _registering("register_parameter", device),
            ):
                yield
    else:
        with _registering("register_parameter", device):
            yield


@contextmanager
def _registering(method: str, device: Place) -> Iterator[None]:
    """Inside the block what `nn.Module.<method>` registers is moved to `device`."""
    former: Callable[..., None] = getattr(nn.Module, method)

    @functools.wraps(former)
    def register(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
        former(module, name, *args, **kwargs)
        if getattr(module, name) is not None:
            set_module_tensor_to_device(module, name, device, clear_cache=False)

    setattr(nn.Module, method, register)
    try:
        yield
    finally:
        setattr(nn.Module, method, former)


def cpu_offload(
    model: nn.Module,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep a model's weights on the CPU, and copy each module's weights to a device for its forward pass.

    Args:
        model: the model, changed in place.
        execution_device: the device on which modules compute. Default: that of the first parameter.
        offload_buffers: also offload buffers. Otherwise they stay on the execution device.
        state_dict: the weights on the CPU. Default: those of the model.
        preload_module_classes: names of classes whose weights, with those of all submodules, are loaded at the start
            of their forward. For modules that use weights of a submodule without calling it.

    Returns:
        The model.

    Example:
        model = cpu_offload(model, execution_device="cuda:0")
        outputs = model(inputs)
    """
    execution_device = _take_back(model, execution_device)
    if state_dict is None:
        state_dict = model.state_dict()
        for name, value in state_dict.items():
            if not value.is_meta:
                state_dict[name] = value.to("cpu")
    weights = OffloadedWeightsLoader(state_dict=state_dict)
    return _offload_all(model, execution_device, weights, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep a model's weights in files, and load each module's weights for its forward pass.

    Args:
        model: the model, changed in place.
        offload_dir: folder of the weights. If it already has an index of offloaded weights, these are used.
        execution_device: the device on which modules compute. Default: that of the first parameter.
        offload_buffers: also offload buffers. Otherwise they stay on the execution device.
        preload_module_classes: names of classes whose weights, with those of all submodules, are loaded at the start
            of their forward. For modules that use weights of a submodule without calling it.

    Returns:
        The model.

    Example:
        model = disk_offload(model, "offload", execution_device="cuda:0")
        outputs = model(inputs)
    """
    execution_device = _take_back(model, execution_device)
    check_devices({"": execution_device})
    if not os.path.isfile(os.path.join(offload_dir, INDEX_NAME)):
        offload_state_dict(offload_dir, model.state_dict())
    # Without weights there is no index.
    index: dict[str, Any] | None = {}
    if os.path.isfile(os.path.join(offload_dir, INDEX_NAME)):
        index = None
    weights = OffloadedWeightsLoader(save_folder=offload_dir, index=index)
    return _offload_all(model, execution_device, weights, offload_buffers, preload_module_classes)


def _take_back(model: nn.Module, device: Place | None) -> Place:
    """Restore a model that is offloaded already; returns `device`, by default the one on which it runs."""
    hooks = [hook for hook in map(offloading_hook, model.modules()) if hook is not None]
    if hooks:
        restore_offloaded(model)
        if device is None:
            device = hooks[0].execution_device
    if device is not None:
        return device
    first = next(model.parameters(), next(model.buffers(), None))
    if first is None:
        return "cpu"
    return first.device


def _offload_all(
    model: nn.Module,
    device: Place,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload: Sequence[str] | None,
) -> nn.Module:
    check_devices({"": device})
    class_names(model, "preload_module_classes", preload)
    check_complete(model, weights, offload_buffers)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload,
    )
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Place | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep `model` on the CPU until its forward pass. It then stays on `execution_device` until `offload()` is called.

    Returns the model and a handle with `offload()` and `remove()`. Models that run one after the other form a chain:
    each gets the handle of the previous model as `prev_module_hook`, and offloads that model before it runs.

    Example:
        first, first_hook = cpu_offload_with_hook(first, device)
        second, second_hook = cpu_offload_with_hook(second, device, prev_module_hook=first_hook)
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Place | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Distribute a model over devices, so that it can run.

    Args:
        model: the model, changed in place.
        device_map: name of a module -> device, "cpu" or "disk". It must cover every tensor.
        main_device: where modules on the disk run, and modules on the CPU if the map has an accelerator. Default: the
            first accelerator in the map, or the CPU.
        state_dict: the weights that stay on the CPU. Default: those of the model.
        offload_dir: folder of the weights on the disk. Weights that it does not have are written to it.
        offload_index: files with the weights on the disk, instead of a folder.
        offload_buffers: also offload buffers.
        skip_keys: names of keyword arguments of the forward that are not moved between devices.
        preload_module_classes: names of classes whose weights, with those of all submodules, are loaded at the start
            of their forward. For modules that use weights of a submodule without calling it.
        force_hooks: add hooks even for a single device. Otherwise the model is only moved there.

    Returns:
        The model.

    Raises:
        ValueError: a tensor does not have a device, or there are weights on the disk without a folder.

    Example:
        model = dispatch_model(model, infer_auto_device_map(model, max_memory={0: "10GiB", "cpu": "30GiB"}))
    """
    check_device_map(model, device_map)
    devices = {}
    if main_device is not None:
        devices["main_device"] = main_device
    devices.update(device_map)
    check_devices(devices)
    dispatch(
        model,
        device_map,
        main_device,
        state_dict,
        offload_dir,
        offload_index,
        offload_buffers,
        skip_keys,
        preload_module_classes,
        force_hooks,
    )
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: MutableMapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, which may be on the meta device, and dispatch it.

    Args:
        model: the model, changed in place.
        checkpoint: a file of weights, an index of several files, or a folder with either.
        device_map: a map, or a way to plan one: "auto", "balanced", "balanced_low_0" or "sequential". None loads the
            weights where the model is, and does not dispatch it.
        max_memory: device -> bytes (or text such as "10GiB") that a planned map may use.
        no_split_module_classes: names of classes whose modules a planned map keeps on one device.
        offload_folder: folder for the weights on the disk.
        offload_buffers: as for `dispatch_model`.
        dtype: dtype to which the weights are cast.
        offload_state_dict: keep weights for the CPU in files while others are loaded. Off by default, because one
            tensor is read at a time.
        skip_keys: as for `dispatch_model`.
        preload_module_classes: as for `dispatch_model`.
        force_hooks: as for `dispatch_model`.
        strict: raise an error if the names of the weights differ from those of the model.
        full_state_dict: as for `load_checkpoint_in_model`.
        broadcast_from_rank0: as for `load_checkpoint_in_model`.

    Returns:
        The model.

    Raises:
        ValueError: as from `load_checkpoint_in_model` and `dispatch_model`.
        CheckpointError: the checkpoint does not belong to the model.

    Example:
        with init_empty_weights():
            model = Model(config)
        model = load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto", offload_folder="offload")
    """
    if isinstance(device_map, str):
        device_map = plan_device_map(
            model,
            device_map,
            max_memory,
            no_split_module_classes,
            dtype,
            offload_buffers=offload_buffers,
            allow_disk=offload_folder is not None,
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        fill_meta=device_map is not None,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in `storage_dtype`, cast to `compute_dtype` to compute.

    What is within a module of `skip_modules_classes`, or one whose name a regular expression of
    `skip_modules_pattern` finds, is left alone. Without either, every such layer is taken.
    """
    classes = tuple(flat_list(skip_modules_classes))
    options = (storage_dtype, compute_dtype, non_blocking)
    _attach_casting("", module, flat_list(skip_modules_pattern), classes, options)


def _attach_casting(
    name: str,
    module: nn.Module,
    patterns: list[str],
    classes: tuple[type[nn.Module], ...],
    options: tuple[torch.dtype, torch.dtype, bool],
) -> None:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, LayerwiseCastingHook(*options), append=True)
        return
    for child_name, child in module.named_children():
        _attach_casting(join(name, child_name), child, patterns, classes, options)


def _refuse_recurrent_layers_under_sequence_parallelism(model: nn.Module) -> None:
    """Raise PrepareError for a model whose configuration has layers of linear attention. Packages call it.

    `prepare` does not: under `sp_size` and `cp_size` the first forward names a module that needs other ranks' rows.
    """
    config: Any = getattr(model, "config", None)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise PrepareError(
            f"{type(model).__name__} has 'linear_attention' layers, which carry a state along the "
            "sequence: under sequence parallelism each rank would restart that state. Train it "
            "without sp_size"
        )


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

# SPDX-License-Identifier: Apache-2.0
"""Weights and inputs meet for a module's forward: weights come from elsewhere and go again, inputs are moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.modules import direct_parameters
from ..core.objects import flat_list
from ..core.trees import find_device, send_to_device
from .copies import FetchRequest
from .module_hooks import (
    ModelHook,
    add_hook_to_module,
    has_forward,
    remove_hook_from_module,
)
from .names import Place, join, owner_of
from .offload import OffloadedWeightsLoader, PrefixedDataset
from .sizes import named_module_tensors
from .streaming import SavedWeights
from .subclasses import data_address, stored_bytes
from .tensors import QUANTIZED, TiedCopies, as_device, placeholder, set_module_tensor_to_device
from .tied import find_tied_parameters, retie_parameters

Weights = Mapping[str, torch.Tensor]
# Of the modules whose weights are fetched. A copy of a model keeps those of the model.
_numbers = itertools.count()


def _call_untraced(function: Callable[[nn.Module], None], module: nn.Module) -> None:
    """`function(module)`, between the graphs where the model is compiled: no graph can take new parameters."""
    if torch.compiler.is_compiling():
        torch.compiler.disable(function)(module)
    else:
        function(module)


class AlignDevicesHook(ModelHook):
    """Moves a module's weights and inputs to `execution_device` for the forward pass.

    With `offload`, the weights are there only during the forward pass: they come from `weights_map` (by default,
    their current values on the CPU) and are otherwise on the meta device. `offload_buffers` does the same for
    buffers, which otherwise stay on the device; `place_submodules` makes the hook responsible for the tensors of all
    submodules. With `io_same_device` outputs go back to the device that the inputs came from; `skip_keys` are keyword
    arguments, or keys of a dictionary, that are not moved. `tied_params_map` holds the copies of tied
    weights that are on a device, by the address of the data, so that one copy serves all.
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Weights | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedCopies | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self._streamed: dict[torch.device, FetchRequest] = {}
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map: TiedCopies | None = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        # Tensors that are not this hook's to move: placed one by one, or tied to one that stays on the device.
        self.resident: set[str] = set()
        # What the module holds on the meta device while its weights are here, to be put back afterwards.
        self._placeholders: dict[str, torch.Tensor] = {}
        self._borrowed: list[tuple[int, torch.device]] = []
        # What autograd does with fetched weights, for each forward that is running.
        self._saving: list[SavedWeights | None] = []

    @property
    def weights_map(self) -> Weights | None:
        """Where the offloaded weights are. Others may replace it, as peft does with a dictionary to merge adapters."""
        return self._weights

    @weights_map.setter
    def weights_map(self, weights: Weights | None) -> None:
        self._weights = weights
        if isinstance(weights, (PrefixedDataset, OffloadedWeightsLoader)):
            self._stream = weights.stream
        else:
            self._stream = None
        self._streamed = {}

    def __repr__(self) -> str:
        names = (
            "execution_device",
            "offload",
            "io_same_device",
            "offload_buffers",
            "place_submodules",
            "skip_keys",
        )
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!s}' for name in names)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Offload the module's weights, or move them to the execution device."""
        device = self.execution_device
        if device is not None and as_device(device).type == "meta":
            # Nothing that runs there has data to share.
            self.tied_params_map = None
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        offloaded: dict[str, torch.Tensor] = {}
        if self.offload:
            offloaded = dict(self.offloaded(module))
            self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
            if self.weights_map is None:
                self.weights_map = {name: tensor.to("cpu") for name, tensor in offloaded.items()}
        for name in offloaded:
            set_module_tensor_to_device(module, name, "meta", clear_cache=False)
            owner, leaf = owner_of(module, name)
            setattr(owner, leaf, placeholder(getattr(owner, leaf), self, name))
        if device is not None:
            for name in tensors:
                if name not in offloaded and name not in self.resident:
                    self._put(module, name, device)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load offloaded weights, and move the inputs to the execution device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.execution_device is not None:
            target = as_device(self.execution_device)
            args = send_to_device(args, target)
            kwargs = send_to_device(kwargs, target, skip_keys=self.skip_keys)
        # Last: if the inputs cannot be moved, there is nothing to take away.
        if self.offload:
            _call_untraced(self._bring_all, module)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Release offloaded weights, and move the output to the device of the inputs if `io_same_device` is set."""
        if self.offload:
            _call_untraced(self._leave, module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Release offloaded weights."""
        if self.offload:
            # Where memory ran out, the weights of the modules that were running would stay in its way.
            self._leave(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return offloaded weights to the devices that they had before."""
        if self.offload:
            for name, device in self.original_devices.items():
                if device.type != "meta" and name not in self.resident:
                    value = self._value(name)
                    set_module_tensor_to_device(
                        module, name, device, value=value, fp16_statistics=self.scales(name)
                    )
        if self._stream is not None:
            for request in self._streamed.values():
                self._stream.forget(request.module)
            self._streamed = {}
        return module

    def offloaded(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the module that this hook brings and takes away."""
        tensors = named_module_tensors(
            module, self.offload_buffers, self.place_submodules, remove_non_persistent=True
        )
        return [(name, tensor) for name, tensor in tensors if name not in self.resident]

    def _bring_all(self, module: nn.Module) -> None:
        offloaded = self.offloaded(module)
        fetched = self._fetch(offloaded)
        try:
            for name, tensor in offloaded:
                if tensor.is_meta:
                    self._placeholders[name] = tensor
                self._bring(module, name, fetched.get(name))
        except BaseException:
            self._release(module)
            raise
        self._saving.append(self._save_by_name(fetched))

    def _leave(self, module: nn.Module) -> None:
        """Release what `_bring_all` has brought."""
        if self._saving:
            saving = self._saving.pop()
            if saving is not None:
                saving.__exit__()
        self._release(module)

    def _save_by_name(self, fetched: Weights) -> SavedWeights | None:
        """Have autograd keep no copies of fetched weights for the backward, until `_leave`."""
        if self._stream is None or self.execution_device is None:
            return None
        if not fetched or not torch.is_grad_enabled():
            return None
        device = as_device(self.execution_device)
        if not self._stream.copies_to(device):
            return None
        saving = SavedWeights(self._stream, self._streamed[device], fetched)
        saving.__enter__()
        return saving

    def _fetch(self, offloaded: list[tuple[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """Return the weights that were fetched ahead for this forward, and fetch those of the next modules."""
        if self._stream is None or self.execution_device is None:
            return {}
        device = as_device(self.execution_device)
        request = self._streamed.get(device)
        if request is None:
            source: Any = self.weights_map
            tied = self.tied_params_map or {}
            sizes = {}
            for name, tensor in offloaded:
                if type(tensor).__name__ in QUANTIZED:
                    # bitsandbytes quantises weights from main memory on their way to the device.
                    continue
                if source.can_stream(name, device, tied):
                    sizes[name] = stored_bytes(tensor)
            size = sum(sizes.values())
            request = FetchRequest(next(_numbers), source, tuple(sizes), size, device)
            self._streamed[device] = request
        return self._stream.fetch(request)

    def _release(self, module: nn.Module) -> None:
        """Leave the offloaded weights, and the copies of tied ones that this hook brought."""
        for name, _ in self.offloaded(module):
            former = self._placeholders.get(name)
            if former is None:
                set_module_tensor_to_device(module, name, "meta", clear_cache=False)
            else:
                owner, leaf = owner_of(module, name)
                setattr(owner, leaf, former)
        if type(module).__name__ == "Linear8bitLt":
            # It keeps a second reference to the weights that it computed with.
            state: Any = module.state
            state.SCB = None
            state.CB = None
        tied = self.tied_params_map or {}
        for address, device in self._borrowed:
            tied.get(address, {}).pop(device, None)
        self._borrowed = []

    def _put(self, module: nn.Module, name: str, device: Place) -> None:
        set_module_tensor_to_device(
            module, name, device, tied_params_map=self.tied_params_map, clear_cache=False
        )

    def _value(self, name: str) -> torch.Tensor | None:
        if self.weights_map is None:
            return None
        return self.weights_map.get(name)

    def scales(self, name: str) -> torch.Tensor | None:
        """The row scales that go with an 8-bit weight, where the weights have any."""
        if name.endswith("weight"):
            return self._value(name[: -len("weight")] + "SCB")
        return None

    def _bring(self, module: nn.Module, name: str, value: torch.Tensor | None) -> None:
        """Put one offloaded weight, read from the weights map if no `value` is given, on the execution device."""
        assert self.weights_map is not None
        if value is None:
            value = self.weights_map[name]
        device = value.device
        if self.execution_device is not None:
            device = as_device(self.execution_device)
        tied = self.tied_params_map
        if tied:
            # A tied weight that is not there yet is this hook's to take away; one that is serves as it is.
            address = data_address(value)
            if device not in tied.get(address, (device,)):
                self._borrowed.append((address, device))
        scales = None
        if value.dtype == torch.int8:
            scales = self.scales(name)
        set_module_tensor_to_device(
            module,
            name,
            device,
            value=value,
            fp16_statistics=scales,
            tied_params_map=tied,
            clear_cache=False,
        )


def _is_preloaded(module: nn.Module, classes: Sequence[str] | None) -> bool:
    # What cannot be called brings nothing: its submodules do so themselves.
    return type(module).__name__ in flat_list(classes) and has_forward(module)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Place,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Move the inputs of every module inside `module` that holds weights and does not have a hook yet to one device.

    Below a module of `preload_module_classes` (class names) none is attached.
    """
    tensors = named_module_tensors(module, recurse=True, remove_non_persistent=True)
    if next(tensors, None) is not None and not hasattr(module, "_hf_hook"):
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook)
    if _is_preloaded(module, preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Place | None = None,
    offload: bool = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach an AlignDevicesHook to every module inside `module` that has its own weights.

    `module_name` is the name under which `weights_map` knows the module. One of `preload_module_classes` (class names)
    brings the weights of all its submodules at once, as it uses them without calling their forward.
    """
    place_all = offload and _is_preloaded(module, preload_module_classes)
    holds = place_all or next(named_module_tensors(module), None) is not None
    # A module that is in several others gets one hook.
    if holds and not (offload and offloading_hook(module) is not None):
        hook = AlignDevicesHook(
            execution_device,
            offload=offload,
            weights_map=_weights_of(module_name, weights_map),
            offload_buffers=offload_buffers,
            place_submodules=place_all,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if place_all:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            join(module_name, name),
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def _weights_of(module_name: str, weights: Weights | None) -> Weights | None:
    """The weights of one module, by their names in it."""
    if weights is None:
        return None
    return PrefixedDataset(weights, f"{module_name}." if module_name else "")


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Place | Mapping[str, Place] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach hooks by block.

    `execution_device` and `offload` map names of submodules to the device on which each runs, and to whether its
    weights are offloaded. A single value applies to all names of the other mapping, or to `module`.
    """
    names: Iterable[str] = (module_name,)
    for argument in (offload, execution_device):
        if isinstance(argument, Mapping):
            names = argument
    devices: Mapping[str, Any]
    if isinstance(execution_device, Mapping):
        devices = execution_device
    else:
        devices = dict.fromkeys(names, execution_device)
    if isinstance(offload, Mapping):
        offloads = offload
    else:
        offloads = dict.fromkeys(names, offload)
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    # A module with several names comes once, under the first.
    for name, block in module.named_modules(prefix=module_name):
        device: Any = devices.get(name)
        outermost = block is module
        if name not in devices or name not in offloads:
            hook = _hook_for_tensors(block, name, devices, offloads, weights_map, common)
            if hook is not None:
                hook.offload_buffers = offload_buffers
                hook.io_same_device = outermost
                add_hook_to_module(block, hook, append=True)
            elif outermost:
                hook = AlignDevicesHook(device, io_same_device=True, **common)
                add_hook_to_module(block, hook, append=True)
            continue
        if offloads[name]:
            attach_align_device_hook(
                block,
                device,
                offload=True,
                weights_map=weights_map,
                offload_buffers=offload_buffers,
                module_name=name,
                preload_module_classes=preload_module_classes,
                **common,
            )
            if not hasattr(block, "_hf_hook"):
                hook = AlignDevicesHook(device, io_same_device=outermost, **common)
                add_hook_to_module(block, hook)
        else:
            hook = AlignDevicesHook(
                device,
                offload_buffers=offload_buffers,
                io_same_device=outermost,
                place_submodules=True,
                **common,
            )
            add_hook_to_module(block, hook)
        attach_execution_device_hook(
            block, device, preload_module_classes=preload_module_classes, **common
        )


def _hook_for_tensors(
    module: nn.Module,
    name: str,
    devices: Mapping[str, Any],
    offloads: Mapping[str, bool],
    weights_map: Weights | None,
    common: dict[str, Any],
) -> AlignDevicesHook | None:
    """The hook of a module whose tensors are named one by one; None where none is."""
    leaves = [leaf for leaf, _ in named_module_tensors(module)]
    placed = {}
    offloaded = {}
    for leaf in leaves:
        full_name = join(name, leaf)
        if full_name not in devices or full_name not in offloads:
            continue
        if offloads[full_name]:
            offloaded[leaf] = devices[full_name]
        else:
            placed[leaf] = devices[full_name]
    if not placed and not offloaded:
        return None
    hook = AlignDevicesHook(
        next(iter([*placed.values(), *offloaded.values()])),
        offload=bool(offloaded),
        weights_map=_weights_of(name, weights_map),
        **common,
    )
    for leaf, device in placed.items():
        hook._put(module, leaf, device)
    hook.resident = set(leaves).difference(offloaded)
    return hook


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """The hook that brings the weights of `module` for its forward, where it has one."""
    hook = getattr(module, "_hf_hook", None)
    for single in getattr(hook, "hooks", (hook,)):
        if isinstance(single, AlignDevicesHook) and single.offload:
            return single
    return None


def restore_offloaded(model: nn.Module) -> None:
    """Bring all weights that hooks keep elsewhere back to the CPU, and take those hooks away; others stay.

    Weights from disk are mapped, not read: they take no memory before they are used.
    """
    tied = find_tied_parameters(model)
    for module in model.modules():
        hook = offloading_hook(module)
        if hook is None or hook.weights_map is None:
            continue
        for name, tensor in hook.offloaded(module):
            if tensor.is_meta:
                value = hook.weights_map[name]
                set_module_tensor_to_device(
                    module, name, "cpu", value=value, fp16_statistics=hook.scales(name)
                )
        hook.original_devices = {}
        hooks = getattr(module._hf_hook, "hooks", ())
        remove_hook_from_module(module)
        for other in hooks:
            if other is not hook:
                add_hook_to_module(module, other, append=True)
    retie_parameters(model, tied)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether `module`'s own weights are offloaded, so that a hook loads them for its forward pass."""
    return offloading_hook(module) is not None


def is_offloaded(model: nn.Module) -> bool:
    """Whether hooks load weights of a module of `model` for its forward pass."""
    return any(map(has_offloaded_params, model.modules()))


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Return a context in which `module`'s own weights are on `execution_device`, even if they are offloaded.

    Without a device, offloaded weights come to where the module runs and others stay. What the block writes to
    offloaded weights is lost afterwards.
    """
    hook = offloading_hook(module)
    if hook is not None:
        usual = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = usual
    elif execution_device is not None:
        usual_devices = {
            name: parameter.device for name, parameter in direct_parameters(module).items()
        }
        try:
            for name in usual_devices:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in usual_devices.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Place = "cpu",
) -> dict[str, Any]:
    """Fill in the entries of `state_dict` that belong to one module, from where its hook keeps them.

    Args:
        module: the module that has the parameter.
        module_name: the full name of one of its parameters, such as `layers.0.proj.weight`.
        state_dict: full names and values. Only names that it has are filled in; it is changed in place.
        device_to_put_offload: where the values are put if the module is offloaded; others stay where they are.

    Returns:
        `state_dict`.
    """
    prefix = module_name.rpartition(".")[0]
    device = None
    if has_offloaded_params(module):
        device = device_to_put_offload
    with align_module_device(module, device):
        for name, value in module.state_dict().items():
            full_name = join(prefix, name)
            if full_name in state_dict and not getattr(value, "is_meta", False):
                state_dict[full_name] = value
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model with all its weights on the CPU, including those that hooks keep elsewhere.

    Weights on disk are read when they are used, so that the model need not fit in memory.
    """
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        hook = offloading_hook(module)
        if hook is None or hook.weights_map is None:
            continue
        for leaf, _ in hook.offloaded(module):
            full_name = join(name, leaf)
            if full_name in state:
                state[full_name] = hook.weights_map[leaf]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.to("cpu")
    return state

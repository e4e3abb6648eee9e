# SPDX-License-Identifier: Apache-2.0
"""One parameter or buffer of a module put somewhere: on a device, in a dtype, with a new value, tied or quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.trees import leaves, map_leaves

if TYPE_CHECKING:
    from .align import AlignDevicesHook
from collections.abc import Mapping

from ..core import devices
from ..core.errors import ConfigurationError
from .names import Place, owner_of
from .sizes import as_dtype
from .subclasses import data_address

_WITHOUT_DATA = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class OffloadedParameter(nn.Parameter):
    """A parameter on the meta device. An operator that gets it reads the values from where its hook keeps them.

    The forward of a module finds its weights in place and never meets one. Others do: the forward of a parent that
    uses a weight without calling its module, such as those in an `nn.ParameterList` or the output layer of
    `nn.MultiheadAttention`. Torch computes some matrix products with a weight on the meta device from memory that
    nobody has filled, without an error.
    """

    __slots__ = ("hook", "name")
    hook: AlignDevicesHook
    name: str
    # Copied by `__reduce_ex__` as it is pickled, and not by the method of `nn.Parameter`, which loses the hook.
    __deepcopy__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with the values, on the device of its other arguments."""
        if func in _WITHOUT_DATA:
            return _on_meta(args[0])
        device = None
        operands = [args, kwargs or {}]
        for value in leaves(operands):
            if not isinstance(value, cls) and value.dim():
                device = value.device
                break
        args, kwargs = map_leaves(
            lambda value: value._read(device), operands, lambda value: isinstance(value, cls)
        )
        return func(*args, **kwargs)

    def _read(self, device: torch.device | None) -> torch.Tensor:
        assert self.hook.weights_map is not None
        return self.hook.weights_map[self.name].to(device or self.hook.execution_device, self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self.hook, self.name, self.requires_grad, dict(vars(self)))
        return _empty, (tuple(self.shape), self.stride(), self.dtype), state

    def __setstate__(self, state: Any) -> None:
        self.hook, self.name, requires_grad, attributes = state
        self.requires_grad_(requires_grad)
        vars(self).update(attributes)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> OffloadedParameter:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").as_subclass(
        OffloadedParameter
    )


def placeholder(parameter: torch.Tensor, hook: AlignDevicesHook, name: str) -> torch.Tensor:
    """What stands for `parameter`, the weight `name` of the hook; another kind of tensor stands for itself."""
    if type(parameter) not in (nn.Parameter, OffloadedParameter):
        return parameter
    empty = _empty(tuple(parameter.shape), parameter.stride(), parameter.dtype)
    empty.__setstate__((hook, name, parameter.requires_grad, vars(parameter)))
    return empty


# Parameters of bitsandbytes, which quantise their data when it first reaches a device. Known by name: the package
# is optional, and old releases of it have fewer of these classes.
QUANTIZED = frozenset({"Int8Params", "Params4bit", "FP4Params"})
# These hold two values a byte, so that their shape is not that of the weight they stand for.
PACKED = frozenset({"Params4bit", "FP4Params"})

# For each parameter that is tied, by the address of its data: the copies of it that are on a device now.
TiedCopies = dict[int, dict[torch.device, torch.Tensor]]


def as_device(device: Place) -> torch.device:
    """A torch device with its index. A number is an accelerator's.

    Raises ConfigurationError for a number on a machine without accelerators, and for what is not a device.
    """
    if isinstance(device, int):
        kind = devices.accelerator_type()
        if kind is None:
            raise ConfigurationError(
                f"device {device} is the index of an accelerator, but this machine does not have "
                "one. Use 'cpu', 'disk' or the full name of a device."
            )
        return torch.device(kind, device)
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"{device!r} is not a device: use the index of an accelerator, 'cpu', 'disk' or a "
            "name such as 'cuda:0'"
        ) from error
    if named.index is None and named.type == devices.accelerator_type():
        return torch.device(named.type, torch.accelerator.current_device_index())
    return named


def check_devices(device_map: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an entry of a device map that names a device which this machine does not have."""
    if type(torch.empty(0)) is not torch.Tensor:
        return  # tensors without data may be on any device
    kind = devices.accelerator_type()
    for name, entry in device_map.items():
        if entry == "disk":
            continue
        device = as_device(entry)
        if device.type in ("cpu", "meta"):
            continue
        count = 0
        has = f"no {device.type} device"
        if device.type == kind:
            count = devices.device_count(kind)
            has = f"{count} {kind} devices"
        if (device.index or 0) >= count:
            raise ConfigurationError(
                f"the device map puts {name or 'the entire model'} on {entry!r}, but this machine "
                f"has {has}"
            )


def main_device() -> torch.device:
    """The default device of a model: the current accelerator of this machine, else the CPU."""
    kind = devices.accelerator_type()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: Any = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedCopies | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move one tensor of `module`, by its dotted name, to `device`, with a new `value` if one is passed.

    A value takes the dtype that the tensor has, or `dtype`; integers keep their own dtype where `dtype` is given. A
    tensor on the meta device holds no data and needs a value. `fp16_statistics` are the row scales of an 8-bit weight.
    With `tied_params_map`, a tied tensor that is already on the device is used instead of a second
    copy. With `clear_cache`, unused cached memory of an accelerator is released.

    The module gets a new parameter: an optimizer that refers to the previous one does not
    see it. Raises ValueError for an unknown name, a value with a different shape, or a missing value.
    """
    owner, leaf = owner_of(module, tensor_name)
    old = getattr(owner, leaf)
    target = as_device(device)
    source = old
    if value is not None:
        source = value
    # The copies of a tied tensor by device. The forward of a module that is tied to this one may end in another thread
    # and remove a copy, so there is one look.
    copies = None
    is_tensor = isinstance(source, torch.Tensor) and source.device.type != "meta"
    if tied_params_map and is_tensor:
        copies = tied_params_map.get(data_address(source))
    present = None
    if copies is not None:
        present = copies.get(target)
    if present is not None:
        setattr(owner, leaf, present)
        return
    if value is None and old.device.type == "meta" and target.type != "meta":
        raise ValueError(
            f"{tensor_name} is on the meta device, we need a `value` to put in on {device}."
        )
    wanted = as_dtype(dtype)
    new = old
    with torch.no_grad():
        if value is not None:
            new = _with_value(
                old, tensor_name, value, target, wanted, fp16_statistics, non_blocking
            )
        elif old.device != target or wanted not in (None, old.dtype):
            new = _moved(old, target, wanted, non_blocking)
    if new is not old:
        setattr(owner, leaf, new)
    if copies is not None and target.type != "meta":
        copies[target] = new
    is_moved = value is None and new.device != old.device
    if clear_cache and is_moved and old.device.type not in ("cpu", "meta"):
        devices.empty_cache()


def _moved(
    old: torch.Tensor, target: torch.device, dtype: torch.dtype | None, non_blocking: bool
) -> torch.Tensor:
    if not old.is_floating_point():
        dtype = None
    data = old.to(device=target, dtype=dtype, non_blocking=non_blocking)
    if not isinstance(old, nn.Parameter) or type(old).__name__ in QUANTIZED:
        # A quantised parameter moves as one, with what it needs to be read.
        return data
    return _parameter_like(old, data)


def _with_value(
    old: torch.Tensor,
    name: str,
    value: Any,
    target: torch.device,
    dtype: torch.dtype | None,
    statistics: torch.Tensor | None,
    non_blocking: bool,
) -> torch.Tensor:
    kind = type(old).__name__
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if value.shape != old.shape and kind not in PACKED:
        raise ValueError(
            f'Trying to set a tensor of shape {value.shape} in "{name}" (which has shape {old.shape}), this looks '
            "incorrect."
        )
    if value.is_floating_point() or value.is_complex():
        wanted = dtype
    elif dtype is not None:
        wanted = value.dtype
    else:
        wanted = None
    if kind in QUANTIZED:
        return _quantized_parameter(old, value.to(dtype=wanted), target, statistics)
    data: torch.Tensor = value.to(target, wanted or old.dtype, non_blocking=non_blocking)
    if isinstance(old, nn.Parameter):
        return _parameter_like(old, data)
    return data


def _parameter_like(old: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter that holds `data`, of the class of `old` and with the attributes that were set on it."""
    trained = old.requires_grad and (data.is_floating_point() or data.is_complex())
    data = data.detach()
    kind = type(old)
    new: Any
    if kind in (nn.Parameter, OffloadedParameter) or not issubclass(kind, nn.Parameter):
        new = nn.Parameter(data, requires_grad=trained)
    else:
        # Without the constructor of a derived class, which may require more than the data.
        new = data.as_subclass(kind).requires_grad_(trained)
    attributes = vars(old)
    if attributes and issubclass(kind, nn.Parameter):
        # The attributes of any other tensor subclass (a sharded or quantised weight) are its data.
        vars(new).update(attributes)
    return new  # type: ignore[no-any-return]


def _quantized_parameter(
    old: torch.Tensor, value: torch.Tensor, target: torch.device, statistics: torch.Tensor | None
) -> torch.Tensor:
    """A parameter of bitsandbytes' with another value: full precision is quantised on its way to the device."""
    options = dict(vars(old))
    if type(old).__name__ == "Int8Params":
        options = {"has_fp16_weights": old.has_fp16_weights, "SCB": statistics}  # type: ignore[attr-defined]
        if value.is_floating_point() and target.type != "meta":
            # It quantises what comes from main memory only.
            value = value.to("cpu")
        if target == value.device and value.dtype == torch.int8:
            options["CB"] = value
    kind: Any = type(old)
    made: torch.Tensor = kind(
        value, requires_grad=old.requires_grad and value.is_floating_point(), **options
    )
    return made.to(target)


def quantize_8bit(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of full precision as int8 with one scale a row (LLM.int8()), both on the CPU."""
    import bitsandbytes

    values, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(
        weight.to(main_device(), torch.float16)
    )
    return values.to("cpu"), scales.to("cpu")

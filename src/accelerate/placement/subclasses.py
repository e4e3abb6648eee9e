# SPDX-License-Identifier: Apache-2.0
"""Weights that are tensor subclasses around plain tensors, such as torchao's: these tensors, and the rest as JSON."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.errors import PrepareError
from ..core.modules import is_wrapper_subclass

# An index names classes. Only those of these packages are imported for it.
_PACKAGES = ("torchao",)


def is_quantized_tensor(tensor: object) -> bool:
    """Whether `tensor` is a quantized one of torchao's: a subclass that keeps its data in plain tensors."""
    return _is_known(type(tensor)) and is_wrapper_subclass(tensor)


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a quantized tensor consists of, by attribute; any other tensor is its own, under `""`."""
    if not is_quantized_tensor(tensor):
        return {"": tensor}
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def convert_inner(
    tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`function` of a tensor; for a quantized one, the same around `function` of each plain tensor in it."""
    if not is_quantized_tensor(tensor):
        return function(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: function(getattr(tensor, name)) for name in names}
    unflatten = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    converted: torch.Tensor = unflatten(inner, context, tensor.size(), tensor.stride())
    return converted


def is_quantized_layer(module: nn.Module) -> bool:
    """Whether a layer has weights that torchao or bitsandbytes has quantized."""
    # By the class of the layer: under FSDP2 its weight is a DTensor.
    layers = sys.modules.get("bitsandbytes.nn")
    for name in ("Linear4bit", "Linear8bitLt", "Embedding4bit", "Embedding8bit"):
        if isinstance(module, getattr(layers, name, ())):
            return True
    # A layer that computes in float8 has a weight of full precision, in a wrapper.
    float8 = getattr(sys.modules.get("torchao.float8.float8_linear"), "Float8Linear", ())
    if isinstance(module, float8):
        return False
    return any(map(is_quantized_tensor, module.parameters(recurse=False)))


def refuse_lost_gradients(model: nn.Module) -> None:
    """Have layers quantized by torchao raise PrepareError in a forward whose backward would end in them.

    The kernels that quantize activations too have no backward: adapters of earlier layers would train with a part of
    their gradients only.
    """
    for name, module in model.named_modules():
        if any(map(is_quantized_tensor, module.parameters(recurse=False))):
            module.register_forward_hook(functools.partial(_check_gradient, name))


def _check_gradient(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    loses_gradient = inputs and inputs[0].requires_grad and not output.requires_grad
    if loses_gradient and torch.is_grad_enabled():
        raise PrepareError(
            f"{name}.weight is a {type(module.weight).__name__} whose kernel on {output.device} has no backward: what "
            "comes before this layer would train without its gradient. Quantize the base with a configuration for "
            "weights only, such as torchao.quantization.Int8WeightOnlyConfig"
        )


def stored_bytes(tensor: torch.Tensor) -> int:
    """The bytes that a tensor takes: those of its plain tensors where it is quantized."""
    return sum(inner.nbytes for inner in inner_tensors(tensor).values())


def data_address(tensor: torch.Tensor) -> int:
    """Where the data of a tensor is. A subclass around other tensors has no address: it is that of its first one.

    A fake tensor and one of the meta device have no data: the identity of their storage stands for its address.
    """
    inner = next(iter(inner_tensors(tensor).values()))
    storage = inner.untyped_storage()
    if storage.device.type == "meta":
        return int(StorageWeakRef(storage).cdata)
    return inner.data_ptr()


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """The class of a quantized tensor and what is in it besides plain tensors, as JSON.

    Raises TypeError where something in it has no form in JSON.
    """
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {"class": _path(type(tensor)), "context": _encode(context)}


def rebuild(
    description: Mapping[str, Any], inner: Mapping[str, torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """The tensor of a description of `describe` around plain tensors, with the shape of `like`.

    Raises TypeError for a description that names anything but a class of torchao's.
    """
    kind: Any = _find(description["class"], torch.Tensor)
    context = _decode(description["context"])
    made: torch.Tensor = kind.__tensor_unflatten__(dict(inner), context, like.shape, like.stride())
    return made


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(path: str, base: type) -> Any:
    """The subclass of `base` at `module:name` in a package that is known."""
    module, _, name = path.partition(":")
    target: Any = None
    if module.partition(".")[0] in _PACKAGES:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    if not isinstance(target, type) or not _is_known(target) or not issubclass(target, base):
        raise TypeError(
            f"{path} is not a class of {' or '.join(_PACKAGES)} derived from {base.__name__}"
        )
    return target


def _encode(value: Any) -> Any:
    """A value as JSON: numbers, text and lists as they are, everything else as `{kind: content}`."""
    kind = type(value)
    if kind in _ENCODINGS:
        return _ENCODINGS[kind](value)
    if _is_known(kind) and isinstance(value, enum.Enum):
        return {"enum": [_path(kind), value.name]}
    names = _field_names(kind)
    if names is None or not _is_known(kind):
        raise TypeError(f"{value!r} of type {kind.__name__} cannot be written to an index")
    fields = {name: _encode(getattr(value, name)) for name in names}
    return {"object": [_path(kind), fields]}


def _field_names(kind: Any) -> list[str] | None:
    """The names of what a dataclass or a named tuple holds; None for another class."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return list(kind._fields)
    return None


def _encode_items(values: Iterable[Any]) -> list[Any]:
    return [_encode(value) for value in values]


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in value):
        raise TypeError(f"{value!r} has keys that are no text and cannot be written to an index")
    return {"dict": {key: _encode(item) for key, item in value.items()}}


def _as_is(value: Any) -> Any:
    return value


_ENCODINGS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((type(None), bool, int, float, str), _as_is),
    torch.dtype: lambda dtype: {"dtype": str(dtype).removeprefix("torch.")},
    torch.device: lambda device: {"device": str(device)},
    list: _encode_items,
    tuple: lambda values: {"tuple": _encode_items(values)},
    torch.Size: lambda values: {"tuple": _encode_items(values)},
    dict: _encode_dict,
}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "dtype":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "tuple":
            return tuple(_decode(content))
        case "dict":
            return {key: _decode(item) for key, item in content.items()}
        case "enum":
            return _find(content[0], enum.Enum)[content[1]]
        case "object":
            target = _find(content[0], object)
            if _field_names(target) is None:
                raise TypeError(f"{content[0]} holds no fields")
            return target(**{name: _decode(item) for name, item in content[1].items()})
    raise TypeError(f"{kind!r} is not a kind of value in an index")

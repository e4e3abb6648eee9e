# SPDX-License-Identifier: Apache-2.0
"""Weights that are tensor subclasses around plain tensors, such as torchao's: these tensors, and the rest as JSON."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
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
    names = ("Linear4bit", "Linear8bitLt", "Embedding4bit", "Embedding8bit")
    if isinstance(module, tuple(getattr(layers, name) for name in names) if layers else ()):
        return True
    # A layer that computes in float8 has a weight of full precision, in a wrapper.
    float8 = getattr(sys.modules.get("torchao.float8.float8_linear"), "Float8Linear", ())
    return not isinstance(module, float8) and any(
        map(is_quantized_tensor, module.parameters(recurse=False))
    )


def refuse_lost_gradients(model: nn.Module) -> None:
    """Have layers quantized by torchao raise PrepareError in a forward whose backward would end in them.

    The kernels that quantize activations too have no backward: adapters of earlier layers would train with a part of
    their gradients only.
    """
    for name, module in model.named_modules():
        if any(is_quantized_tensor(parameter) for parameter in module.parameters(recurse=False)):
            module.register_forward_hook(functools.partial(_check_gradient, name))


def _check_gradient(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if torch.is_grad_enabled() and inputs and inputs[0].requires_grad and not output.requires_grad:
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
    return StorageWeakRef(storage).cdata if storage.device.type == "meta" else inner.data_ptr()


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
    kind = _find(description["class"])
    if not issubclass(kind, torch.Tensor):
        raise TypeError(f"{description['class']} is not a class of tensors")
    context = _decode(description["context"])
    made: torch.Tensor = kind.__tensor_unflatten__(dict(inner), context, like.shape, like.stride())  # type: ignore[attr-defined]
    return made


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(path: str) -> type:
    """The class at `module:name` in a package that is known."""
    module, _, name = path.partition(":")
    if module.partition(".")[0] not in _PACKAGES:
        raise TypeError(f"{path} is not a class of {' or '.join(_PACKAGES)}")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not _is_known(found):
        raise TypeError(f"{path} is not a class of {' or '.join(_PACKAGES)}")
    return found


def _encode(value: Any) -> Any:
    """A value as JSON: numbers, text and lists as they are, everything else as `{kind: content}`."""
    if isinstance(value, enum.Enum) and _is_known(type(value)):
        return {"enum": [_path(type(value)), value.name]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) is list:
        return [_encode(item) for item in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_encode(item) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    fields = _fields(value)
    if fields is None or not _is_known(type(value)):
        raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written to an index")
    return {
        "object": [_path(type(value)), {name: _encode(getattr(value, name)) for name in fields}]
    }


def _fields(value: Any) -> list[str] | None:
    """The names of what a dataclass or a named tuple holds; None for another object."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if field.init]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields)
    return None


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
            return tuple(_decode(item) for item in content)
        case "dict":
            return {key: _decode(item) for key, item in content.items()}
        case "enum":
            found: Any = _find(content[0])
            if not issubclass(found, enum.Enum):
                raise TypeError(f"{content[0]} is not an enumeration")
            return found[content[1]]
        case "object":
            made: Any = _find(content[0])
            if not (
                dataclasses.is_dataclass(made)
                or (issubclass(made, tuple) and hasattr(made, "_fields"))
            ):
                raise TypeError(f"{content[0]} holds no fields")
            return made(**{name: _decode(item) for name, item in content[1].items()})
    raise TypeError(f"{kind!r} is not a kind of value in an index")

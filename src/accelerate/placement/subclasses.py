# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: tensor subclasses around plain tensors, such as torchao's, and models marked as quantized."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.errors import PrepareError
from ..core.imports import is_available
from ..core.modules import direct_parameters, is_wrapper_subclass

# How libraries mark a model whose weights bitsandbytes has quantised.
_QUANTIZED_MARKS = ("is_loaded_in_8bit", "is_loaded_in_4bit")
# An index names classes. Only those of these packages are imported for it.
_PACKAGES = ("torchao",)


def is_quantized_tensor(tensor: object) -> bool:
    """Whether `tensor` is a quantized one of torchao's: a subclass that keeps its data in plain tensors."""
    package = type(tensor).__module__.partition(".")[0]
    return package in _PACKAGES and is_wrapper_subclass(tensor)


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
    return any(map(is_quantized_tensor, direct_parameters(module).values()))


def check_quantized(model: nn.Module, device: torch.device, training: bool) -> bool:
    """Return whether `model` has 8- or 4-bit weights, which must stay on the device where they were quantized.

    Args:
        model: any model. Libraries mark those with such weights with `is_loaded_in_8bit` or `is_loaded_in_4bit`.
        device: the device of this process.
        training: whether the model is to be trained; if not, its modules may be on any device.

    Raises:
        PrepareError: the model is to be trained, and its device map has modules on the disk or on another device.
    """
    if not any(getattr(model, mark, False) for mark in _QUANTIZED_MARKS):
        return False
    if training:
        device_map = getattr(model, "hf_device_map", None) or {}
        _check_trainable(type(model).__name__, set(device_map.values()), device)
    return True


def _check_trainable(kind: str, places: set[Any], device: torch.device) -> None:
    offloaded = places & {"cpu", "disk"}
    if device.type == "cpu" and is_available("bitsandbytes"):
        # bitsandbytes trains on the CPU too, if the entire run is there.
        offloaded.discard("cpu")
    if offloaded:
        raise PrepareError(
            f"{kind} has 8- or 4-bit weights, and its hf_device_map offloads modules to "
            f"{' and '.join(sorted(offloaded))}, so it cannot be trained. Load it with "
            f"device_map={{'': {str(device)!r}}}"
        )
    if len(places) != 1:
        return
    (loaded_on,) = places
    is_elsewhere = False
    if isinstance(loaded_on, torch.device):
        is_elsewhere = loaded_on.type != device.type
    elif isinstance(loaded_on, int) and device.type != "cpu":
        # The index of an accelerator; in a run on the CPU it has no meaning.
        is_elsewhere = loaded_on != (device.index or 0)
    if is_elsewhere:
        raise PrepareError(
            f"{kind} has 8- or 4-bit weights on device {loaded_on}, but this process trains on "
            f"{device}, and the weights cannot be moved. Load it with device_map={{'': "
            "Accelerator().local_process_index}"
        )


def is_marked_quantized(model: nn.Module) -> bool:
    """Whether the model is quantized with bitsandbytes: such weights are only moved by hooks."""
    if getattr(model, "quantization_method", "bitsandbytes") != "bitsandbytes":
        return False
    return any(getattr(model, mark, False) for mark in ("is_quantized", *_QUANTIZED_MARKS))


def refuse_lost_gradients(model: nn.Module) -> None:
    """Have layers quantized by torchao raise PrepareError in a forward whose backward would end in them.

    The kernels that quantize activations too have no backward: adapters of earlier layers would train with a part of
    their gradients only.
    """
    for name, module in model.named_modules():
        if any(map(is_quantized_tensor, direct_parameters(module).values())):
            module.register_forward_hook(functools.partial(_check_gradient, name))


def _check_gradient(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    loses_gradient = inputs and inputs[0].requires_grad and not output.requires_grad
    if loses_gradient and torch.is_grad_enabled():
        raise PrepareError(
            f"{name}.weight is a {type(module.weight).__name__} whose kernel on {output.device} "
            "does not support the backward pass: layers before this one would train without its "
            "gradient. Quantize the base with a weight-only configuration, such as "
            "torchao.quantization.Int8WeightOnlyConfig"
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

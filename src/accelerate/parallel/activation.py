# SPDX-License-Identifier: Apache-2.0
"""Activations between forward and backward: recomputed (activation checkpointing), or kept in host memory."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.device_kinds import DEVICES
from ..core.errors import PrepareError
from ..core.modules import is_wrapper_subclass
from ..state import PartialState
from ..torch_internals import checkpoint_wrapper
from ..torch_internals.tensor_memory import is_parameter_memory


def checkpoint_activations(
    model: nn.Module, modules: Sequence[nn.Module], device: torch.device, offload: bool = False
) -> list[nn.Module]:
    """Wrap each of `modules`, at every place in `model`, so that its activations are recomputed in the backward.

    The names of parameters in state dicts stay those of the plain model.

    Args:
        model: changed in place.
        modules: modules inside the model.
        device: that of the run.
        offload: keep a module's inputs in host memory (no effect on the CPU).

    Returns:
        The wrappers, in the order of `modules`.

    Raises:
        PrepareError: there is no module to wrap.
    """
    if not modules:
        raise PrepareError(
            "activation_checkpointing=True found no module to wrap: choose an auto_wrap_policy "
            "that finds the model's blocks, TRANSFORMER_BASED_WRAP (...) or SIZE_BASED_WRAP "
            "(min_num_params)"
        )
    wrappers: dict[int, nn.Module] = {}
    # The children of wrappers are not to be wrapped again.
    inside: set[int] = set()
    for module in modules:
        wrapped = checkpoint_wrapper.recomputed(module)
        inside.add(id(wrapped))
        if offload and device.type != "cpu":
            wrapped = checkpoint_wrapper.in_host_memory(wrapped)
            inside.add(id(wrapped))
        wrappers[id(module)] = wrapped
    for parent in list(model.modules()):
        if id(parent) in inside:
            continue
        for name, child in list(parent.named_children()):
            if id(child) in wrappers:
                setattr(parent, name, wrappers[id(child)])
    return [wrappers[id(module)] for module in modules]


# A smaller tensor stays on the device: starting its copies takes longer than they do.
MINIMUM = 2**20  # bytes


class ActivationOffload:
    """Moves what a forward saves for the backward to host memory, and back when the backward needs it.

    Parameters, and their views, stay where they are. Copies to the host run on a separate stream, during the
    forward. Recomputed blocks (activation checkpointing) keep only their inputs, and these are moved. On the CPU
    activations are in host memory already: the model is not changed.

    Args:
        minimum: tensors with fewer bytes stay on the device.

    Example:
        accelerator = Accelerator(transforms=["activation_offload"])
    """

    # The layout wraps the forward that saves them.
    before_layout = True
    # A stage's forward is left in its middle, and a compiled one has no hooks.
    excludes: tuple[str, ...] = ("pipeline", "compile")

    def __init__(self, minimum: int = MINIMUM) -> None:
        self.minimum = minimum
        self.device: torch.device | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Wrap the model's forward, in place.

        Raises:
            PrepareError: the device does not copy to host memory while it computes.
        """
        device = self.device = PartialState().device
        if device.type == "cpu":
            return model
        kind = DEVICES.get(device.type)
        if kind is None or not kind.pin_memory:
            raise PrepareError(
                f"activation_offload: {device.type} devices do not have pinned host memory. "
                "Remove the transform; activation checkpointing saves memory on every device"
            )
        forward = model.forward
        function = getattr(forward, "__func__", forward)
        hooks = SavedInHostMemory(device, self.minimum)

        @functools.wraps(function)
        def offloading(*args: object, **kwargs: object) -> object:
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                return function(*args, **kwargs)

        if hasattr(forward, "__func__"):
            model.forward = types.MethodType(offloading, model)
        else:
            model.forward = offloading
        return model

    def describe(self) -> str:
        """What it does in this run, for `explain`."""
        if self.device is None:
            return "not applied to a model yet"
        if self.device.type == "cpu":
            return "nothing to do: on the CPU, activations are already in host memory"
        return (
            f"tensors of at least {self.minimum} bytes are in host memory between forward and "
            "backward"
        )


class SavedInHostMemory:
    """The hooks of autograd that move saved tensors to the host and back.

    Args:
        device: of the tensors that are moved.
        minimum: smaller ones stay, in bytes.
    """

    def __init__(self, device: torch.device, minimum: int) -> None:
        self.device = device
        self.minimum = minimum
        self._copies: torch.Stream | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Wrapped | _InHostMemory:
        """Start the copy of a saved tensor to the host; the tensor itself if it stays on the device."""
        if tensor.device.type != self.device.type or tensor.nbytes < self.minimum:
            return tensor
        if is_parameter_memory(tensor):
            # The memory of a parameter, and of its views, stays on the device anyway.
            return tensor
        if is_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            # a DTensor's mesh is one of them
            pieces = {name: getattr(tensor, name) for name in names}
            pieces = {
                name: self.pack(part) if isinstance(part, torch.Tensor) else part
                for name, part in pieces.items()
            }
            return _Wrapped(type(tensor), pieces, context, tensor.size(), tensor.stride())
        return self.to_host(tensor)

    def unpack(self, packed: torch.Tensor | _Wrapped | _InHostMemory) -> torch.Tensor:
        """The saved tensor on its device, when the backward uses it."""
        if isinstance(packed, _Wrapped):
            pieces = {name: self.unpack(part) for name, part in packed.pieces.items()}
            tensor: torch.Tensor = packed.kind.__tensor_unflatten__(
                pieces, packed.context, packed.size, packed.stride
            )
            return tensor
        if isinstance(packed, _InHostMemory):
            return self.to_device(packed)
        return packed

    def to_host(self, tensor: torch.Tensor) -> _InHostMemory:
        """Start the copy of a tensor to pinned memory, on a separate stream."""
        if self._copies is None:
            self._copies = torch.Stream(device=self.device)
        copies = self._copies
        copies.wait_stream(torch.accelerator.current_stream(self.device))
        with copies:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        # The allocator must not hand out this memory before the copy is done.
        tensor.record_stream(copies)
        return _InHostMemory(host, copies.record_event(), tensor.device)

    def to_device(self, saved: _InHostMemory) -> torch.Tensor:
        """Start the copy back, on the stream of the backward."""
        torch.accelerator.current_stream(saved.device).wait_event(saved.copied)
        return saved.host.to(saved.device, non_blocking=True)


@dataclass(frozen=True)
class _InHostMemory:
    host: torch.Tensor
    copied: torch.Event  # behind the copy to the host
    device: torch.device


@dataclass(frozen=True)
class _Wrapped:
    """A tensor that consists of others, such as a DTensor."""

    kind: Any
    pieces: dict[str, Any]
    context: object
    size: torch.Size
    stride: tuple[int, ...]

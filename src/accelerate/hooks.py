# SPDX-License-Identifier: Apache-2.0
"""Hooks around a module's forward: moving a model, casting its weights, and the hooks of placement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .core import devices
from .core.lazy import public_names
from .core.trees import send_to_device
from .placement.align import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from .placement.module_hooks import (
    MOVES,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from .placement.names import Place
from .placement.tensors import as_device, main_device

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]


# The methods of a model that a model spread over devices refuses.
_accelerate_added_attributes = list(MOVES)


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its forward pass, and then on `execution_device` until it is offloaded.

    It is offloaded by the `offload` of its UserCpuOffloadHook, or when the next model of a chain runs:
    `prev_module_hook` is the hook of the previous model, which is offloaded before this one is moved. The default
    device is the accelerator in use, or the CPU.
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: Place = (
            main_device() if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module to the CPU."""
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model of the chain, and move the module and its inputs to the execution device."""
        target = as_device(self.execution_device)
        previous = self.prev_module_hook
        if previous is not None and as_device(previous.hook.execution_device) == target:
            previous.offload()
            devices.empty_cache()
        module.to(target)
        return send_to_device(args, target), send_to_device(kwargs, target)


class UserCpuOffloadHook:
    """The handle of a model with a CpuOffload hook: `offload` moves it to the CPU, `remove` removes the hook."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Stores a module's weights in one dtype (such as an 8-bit dtype) and casts them for each forward pass."""

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool
    ) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the module to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast the module back to the storage dtype."""
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Cast the module back to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

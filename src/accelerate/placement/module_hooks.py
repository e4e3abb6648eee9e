# SPDX-License-Identifier: Apache-2.0
"""Hooks around the forward of a module: what one is, and how it is attached and removed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..core.device_kinds import DEVICES
from . import logger

# Ways to move a module, by device type where torch has a method for it.
MOVES = ("to", *(kind.type for kind in DEVICES.values() if kind.moves_modules))


class ModelHook:
    """Functions that are called around the forward pass of a module, and when the hook is attached and detached.

    Those of this base class have no effect. With `no_grad` the forward itself runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called once, when the hook is attached; returns the module."""
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before each forward; returns the arguments that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after each forward; returns the output that the caller gets."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called when the forward or `post_forward` raises. The error is raised afterwards."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called once, when the hook is removed; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, called in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Call `init_hook` of each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments through `pre_forward` of each hook."""
        started: list[ModelHook] = []
        try:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                started.append(hook)
        except BaseException:
            for hook in started:
                hook.forward_failed(module)
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through `post_forward` of each hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Call `forward_failed` of each hook."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Call `detach_hook` of each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach `hook` around the forward of `module` and return the module.

    A hook that is there already is replaced, or, with `append`, runs before the new one. The forward without hooks
    stays at `module._old_forward`, the hook at `module._hf_hook`.
    """
    present = getattr(module, "_hf_hook", None)
    if append and present is not None:
        remove_hook_from_module(module)
        if type(present) is SequentialHook:
            earlier = present.hooks
        else:
            earlier = (present,)
        hook = SequentialHook(*earlier, hook)
    former: Any = getattr(module, "_old_forward", None) or module.forward
    calls = has_forward(module)
    if calls:
        module._old_forward = former
    module = hook.init_hook(module)
    vars(module)["_hf_hook"] = hook
    if not calls:
        return module
    # A partial of a function of this file, unlike a closure, can be pickled and copied with the module. `inspect`
    # finds the signature of the former one.
    wrapped = functools.update_wrapper(functools.partial(_forward_with_hook, module), former)
    module.forward = wrapped
    return module


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, unlike `nn.ModuleDict`; what torch has instead cannot be pickled."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _forward_with_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hook: Any = module._hf_hook
    forward: Any = module._old_forward
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        return hook.post_forward(module, output)
    except BaseException:
        hook.forward_failed(module)
        raise


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of `module`, with `recurse` also those of all its submodules, and return the module."""
    if hasattr(module, "_hf_hook"):
        hook: Any = module._hf_hook
        hook.detach_hook(module)
        del module._hf_hook
    if hasattr(module, "_old_forward"):
        former: Any = module._old_forward
        del module._old_forward
        if getattr(former, "__self__", None) is module and former.__func__ is getattr(
            type(module), "forward", None
        ):
            # It is the class's own: the instance needs none.
            vars(module).pop("forward", None)
        else:
            module.forward = former
    for name in MOVES:
        if getattr(vars(module).get(name), "func", None) is _guarded_move:
            delattr(module, name)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of `module` and all its submodules."""
    remove_hook_from_module(module, recurse=True)


def guard_moves(model: nn.Module) -> None:
    """While `model` has a hook, warn when it is moved, and raise RuntimeError if some of it is offloaded."""
    for name in MOVES:
        if hasattr(model, name):
            move = functools.partial(_guarded_move, model, name)
            setattr(model, name, functools.update_wrapper(move, getattr(model, name)))


def _guarded_move(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    logger.warning("You shouldn't move a model that is dispatched using accelerate hooks.")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise RuntimeError("You can't move a model that has some modules offloaded to cpu or disk.")
    return getattr(type(model), method)(model, *args, **kwargs)

# SPDX-License-Identifier: Apache-2.0
"""Optimizers of DTensors whose step needs whole tensors: it runs on unsharded copies, the same on every rank.

Between two steps parameters, gradients and state are the shards they were. In the step each rank has the optimizer's
parameters, gradients and state unsharded: the price of an Adafactor, Muon or LBFGS that equals a single process's.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_MARK = "_steps_unsharded"


def step_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer step on unsharded parameters, gradients and state from now on."""
    if _MARK in optimizer.__dict__:
        return
    kind, reference = type(optimizer), weakref.ref(optimizer)
    # What a scheduler that was made before, or the user, has put in the place of the class's own.
    given = optimizer.__dict__.get("step")
    function: Any = kind.step
    # Hooks of a step are to see the parameters that they know: they run outside of the unsharded block.
    plain = function.__wrapped__ if getattr(function, "hooked", False) else function

    def inner(_: Any, closure: Callable[[], Any] | None = None) -> Any:
        own: Any = reference()
        if given is None or hasattr(given, "_wrapped_by_lr_sched"):
            return _run(own, functools.partial(plain, own), closure)
        return _run(own, given, closure)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(inner)

    @functools.wraps(function)
    def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
        own: Any = reference()
        own._opt_called = True
        return hooked(own) if closure is None else hooked(own, closure)

    if given is not None:
        # By this mark torch's schedulers know that steps are noted (in `_opt_called`).
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # Bound to a proxy: the state of an optimizer that nobody holds any more is freed at once.
    optimizer.__dict__.update({"step": MethodType(step, weakref.proxy(optimizer)), _MARK: True})


def steps_unsharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unsharded` was applied to this optimizer."""
    return _MARK in optimizer.__dict__


def _run(optimizer: Any, call: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    tensors = _Unsharded(optimizer)
    tensors.enter()
    try:
        if closure is None:
            return call()

        def evaluate() -> Any:
            # The closure computes with the model, which holds the shards.
            tensors.leave()
            try:
                return closure()
            finally:
                tensors.enter()

        return call(evaluate)
    finally:
        tensors.leave()


class _Unsharded:
    """An optimizer's sharded parameters, and their unsharded copies that it holds in a step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.sharded = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
        ]
        # The same objects in all evaluations of one step: optimizers may keep references to parameters.
        self.whole = [
            torch.nn.Parameter(
                torch.empty(p.shape, dtype=p.dtype, device=p.device_mesh.device_type), requires_grad=p.requires_grad
            )
            for p in self.sharded
        ]

    @torch.no_grad()
    def enter(self) -> None:
        """Gather parameters, gradients and state, and have the optimizer hold the copies."""
        state = self.optimizer.state
        values: list[DTensor] = list(self.sharded)
        values += [p.grad for p in self.sharded if isinstance(p.grad, DTensor)]
        # In the order of the parameters, which is the same on each rank.
        known = [state.get(p, {}) for p in self.sharded]
        values += [value for entry in known for value in entry.values() if isinstance(value, DTensor)]
        found = dict(zip(map(id, values), _gather(values), strict=True))
        for parameter, whole, entry in zip(self.sharded, self.whole, known, strict=True):
            whole.copy_(found[id(parameter)])
            whole.grad = None if parameter.grad is None else found.get(id(parameter.grad), parameter.grad)
            if parameter in state:
                # The entry itself is kept: only its tensors are others.
                for name, value in entry.items():
                    entry[name] = found.get(id(value), value)
        self._replace(self.sharded, self.whole)

    @torch.no_grad()
    def leave(self) -> None:
        """Keep this rank's parts of what the step has made, and have the optimizer hold the shards."""
        from .materialize import local_part

        state = self.optimizer.state
        for parameter, whole in zip(self.sharded, self.whole, strict=True):
            local = parameter.to_local()
            local.copy_(local_part(whole, parameter))
            whole.grad = None
            entry = state.get(whole)
            for name, value in (entry or {}).items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
                    entry[name] = DTensor.from_local(
                        local_part(value, parameter).to(local.device, copy=True), parameter.device_mesh,
                        parameter.placements, run_check=False, shape=value.shape, stride=value.stride(),
                    )  # fmt: skip
        self._replace(self.whole, self.sharded)

    def _replace(self, former: list[Any], present: list[Any]) -> None:
        """Change groups and state from the one kind of parameters to the other, in their places and order."""
        other = {id(old): new for old, new in zip(former, present, strict=True)}
        for group in self.optimizer.param_groups:
            # The list itself is kept: LBFGS has a reference to it.
            group["params"][:] = [other.get(id(parameter), parameter) for parameter in group["params"]]
        state = self.optimizer.state
        entries = [(other.get(id(key), key), entry) for key, entry in state.items()]
        if any(map(operator.is_not, (key for key, _ in entries), state)):
            state.clear()
            state.update(entries)


def _gather(values: list[DTensor]) -> list[torch.Tensor]:
    """The unsharded values, on the device of their mesh."""
    found = []
    for value in values:
        mesh, local = value.device_mesh, value.to_local()
        if local.device.type != mesh.device_type:
            # Shards that are kept in host memory.
            value = DTensor.from_local(
                local.to(mesh.device_type), mesh, value.placements, run_check=False,
                shape=value.shape, stride=value.stride(),
            )  # fmt: skip
        # One after another: torch 2.13 frees the padded input of a message on gloo that is still under way.
        found.append(value.full_tensor())
    return found

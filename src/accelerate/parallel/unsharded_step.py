# SPDX-License-Identifier: Apache-2.0
"""Optimizers of DTensors whose step needs entire tensors: it runs on unsharded copies, the same on every rank.

Between two steps parameters, gradients and state are sharded. In the step each rank has all of the optimizer's
parameters, gradients and state: the price of an Adafactor, Muon or LBFGS that equals a single process's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..core.optimizer_step import replace_step
from .materialize import as_dtensor, local_shard

_MARK = "_steps_unsharded"


def step_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step on unsharded parameters, gradients and state from now on."""
    if _MARK in optimizer.__dict__:
        return
    function: Any = type(optimizer).step
    # The hooks of a step must see the sharded parameters: they run outside of the unsharded block.
    plain = function.__wrapped__ if getattr(function, "hooked", False) else function
    given = optimizer.__dict__.get("step")
    is_users = given is not None and not hasattr(given, "_wrapped_by_lr_sched")

    def unsharded(own: torch.optim.Optimizer, closure: Callable[[], object] | None = None) -> object:
        return _run(own, given if is_users else functools.partial(plain, own), closure)  # type: ignore[arg-type]

    hooked = torch.optim.Optimizer.profile_hook_step(unsharded)
    replace_step(optimizer, lambda own, _, closure: hooked(own) if closure is None else hooked(own, closure))
    optimizer.__dict__[_MARK] = True


def steps_unsharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unsharded` was applied to this optimizer."""
    return _MARK in optimizer.__dict__


def _run(
    optimizer: torch.optim.Optimizer, call: Callable[..., object], closure: Callable[[], object] | None
) -> object:
    tensors = _Unsharded(optimizer)
    tensors.enter()
    try:
        if closure is None:
            return call()

        def evaluate() -> object:
            # The closure computes with the model, whose parameters are sharded.
            tensors.leave()
            try:
                return closure()
            finally:
                tensors.enter()

        return call(evaluate)
    finally:
        tensors.leave()


class _Unsharded:
    """An optimizer's sharded parameters, and the unsharded copies that it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.sharded = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
        ]
        # The same objects in all evaluations of one step: optimizers may keep references to parameters.
        self.full = [
            torch.nn.Parameter(
                torch.empty(p.shape, dtype=p.dtype, device=p.device_mesh.device_type), requires_grad=p.requires_grad
            )
            for p in self.sharded
        ]

    @torch.no_grad()
    def enter(self) -> None:
        """Gather parameters, gradients and state, and give the optimizer the copies."""
        state = self.optimizer.state
        values: list[DTensor] = list(self.sharded)
        values += [p.grad for p in self.sharded if isinstance(p.grad, DTensor)]
        # In the order of the parameters, which is the same on each rank.
        known = [state.get(p, {}) for p in self.sharded]
        values += [value for entry in known for value in entry.values() if isinstance(value, DTensor)]
        found = dict(zip(map(id, values), _gather(values), strict=True))
        for parameter, full, entry in zip(self.sharded, self.full, known, strict=True):
            full.copy_(found[id(parameter)])
            full.grad = None if parameter.grad is None else found.get(id(parameter.grad), parameter.grad)
            if parameter in state:
                # The entry itself is kept: only its tensors are others.
                for name, value in entry.items():
                    entry[name] = found.get(id(value), value)
        self._replace(self.sharded, self.full)

    @torch.no_grad()
    def leave(self) -> None:
        """Keep this rank's shards of the results, and give the optimizer the sharded parameters."""
        state = self.optimizer.state
        for parameter, full in zip(self.sharded, self.full, strict=True):
            local = parameter.to_local()
            local.copy_(local_shard(full, parameter))
            full.grad = None
            entry = state.get(full, {})
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
                    entry[name] = as_dtensor(local_shard(value, parameter).to(local.device, copy=True), parameter)
        self._replace(self.full, self.sharded)

    def _replace(self, former: Sequence[torch.Tensor], present: Sequence[torch.Tensor]) -> None:
        """Replace the parameters in groups and state, in their places and order."""
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
            value = as_dtensor(local.to(mesh.device_type), value)
        # One after another: torch 2.13 frees the padded input of a message on gloo that is still under way.
        found.append(value.full_tensor())
    return found

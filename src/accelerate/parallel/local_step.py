# SPDX-License-Identifier: Apache-2.0
"""Elementwise optimizers of DTensors step on the local tensors.

DTensor would propagate the layout at each of a dozen operations on each parameter, and torch has foreach and fused
kernels for plain tensors only. Between two steps parameters and state are DTensors.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as base

from ..core.optimizer_step import replace_step
from .materialize import as_dtensor
from .optimizer_scope import is_elementwise

# State that is about a parameter, and not of its shape.
_NUMBERS = frozenset({"eta", "mu", "mu_product", "step"})

_MARK = "_steps_locally"

T = TypeVar("T")
# Of an optimizer: the state of each parameter.
State = MutableMapping[torch.Tensor, dict[str, object]]


def step_locally(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step on local tensors from now on; one that is not elementwise is left as it is."""
    if not is_elementwise(optimizer) or _MARK in optimizer.__dict__:
        return
    shards = _LocalShards()

    def step(
        own: torch.optim.Optimizer, former: Callable[..., object], closure: Callable[[], object] | None
    ) -> object:
        arguments = () if closure is None else (closure,)
        if own.defaults.get("differentiable"):
            return former(*arguments)

        def step_shards(_: object, closure: Callable[[], object] | None = None) -> object:
            loss = None
            if closure is not None:
                # All of these optimizers call it once, before anything else.
                with torch.enable_grad():
                    loss = closure()
            with shards.in_place_of(own), _without_hooks(own):
                former()
            return loss

        if _has_hooks(own):
            return torch.optim.Optimizer.profile_hook_step(step_shards)(own, *arguments)
        return step_shards(own, *arguments)

    replace_step(optimizer, step)
    optimizer.__dict__[_MARK] = True


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or base._global_optimizer_pre_hooks
        or base._global_optimizer_post_hooks
    )


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which a step calls no hook: they see the DTensors, before and after it."""
    if not _has_hooks(optimizer):
        yield
        return
    places: tuple[tuple[object, str], ...] = (
        (optimizer, "_optimizer_step_pre_hooks"),
        (optimizer, "_optimizer_step_post_hooks"),
        (base, "_global_optimizer_pre_hooks"),
        (base, "_global_optimizer_post_hooks"),
    )
    hooks = [getattr(*place) for place in places]
    try:
        for owner, name in places:
            setattr(owner, name, OrderedDict())
        yield
    finally:
        for (owner, name), former in zip(places, hooks, strict=True):
            setattr(owner, name, former)


class _LocalShards:
    """The local tensors of an optimizer's parameters: plain tensors on the same storage."""

    def __init__(self) -> None:
        self._known: dict[int, _LocalShard] = {}

    @contextmanager
    def in_place_of(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A block in which the optimizer has the local tensors, with their gradients and their state."""
        state, groups = optimizer.state, [(group, group["params"]) for group in optimizer.param_groups]
        present: dict[int, _LocalShard] = {}
        for group, parameters in groups:
            group["params"] = listed = list(parameters)
            for position, parameter in enumerate(parameters):
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    key = id(parameter)
                    shard = self._known.get(key)
                    if shard is None or shard.storage is not parameter._local_tensor:
                        shard = _LocalShard(parameter)
                    present[key] = shard
                    listed[position] = shard.leaf
        self._known = present
        try:
            for shard in present.values():
                shard.take(state)
            yield
        finally:
            for group, parameters in groups:
                group["params"] = parameters
            for shard in present.values():
                shard.give_back(state)


class _LocalShard:
    """The local tensor of one parameter. Its state consists of the local tensors of the parameter's state."""

    __slots__ = ("inner", "leaf", "outer", "parameter", "storage")

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        self.storage = parameter._local_tensor
        self.leaf = self.storage.detach()
        # The values of the parameter's state after the last step, and the local ones.
        self.outer: list[object] = []
        self.inner: dict[str, object] = {}

    def take(self, state: State) -> None:
        self.leaf.grad = self._local(self.parameter.grad)
        known = state.get(self.parameter)
        if known is None:
            return
        # Another state may have been loaded.
        if len(known) != len(self.outer) or not all(map(operator.is_, known.values(), self.outer)):
            self.inner = {name: self._local(value) for name, value in known.items()}
            self.outer = list(known.values())
        state[self.leaf] = self.inner

    def give_back(self, state: State) -> None:
        self.leaf.grad = None
        present = state.pop(self.leaf, None)
        if present is None:
            return
        known, self.inner = state[self.parameter], present
        for name, value in present.items():
            before = known.get(name)
            if before is not value and not (isinstance(before, DTensor) and before._local_tensor is value):
                known[name] = value if name in _NUMBERS else self._as_dtensor(value)
                # A view of the same values: the object by which it is recognised after the next step.
                present[name] = self._local(known[name])
        self.outer = list(known.values())

    def _local(self, value: T) -> T | torch.Tensor:
        """The local tensor, in the parameter's layout; numbers and plain tensors as they are."""
        if not isinstance(value, DTensor):
            return value
        placements = self.parameter._spec.placements
        if value._spec.placements != placements:
            return value.redistribute(placements=placements)._local_tensor
        return value._local_tensor

    def _as_dtensor(self, value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.shape != self.leaf.shape:
            return value
        return as_dtensor(value, self.parameter)

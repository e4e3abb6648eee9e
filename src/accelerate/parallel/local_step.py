# SPDX-License-Identifier: Apache-2.0
"""Elementwise optimizers of DTensors step on the local tensors.

DTensor would propagate the layout at each of a dozen operations on each parameter, and torch has foreach and fused
kernels for plain tensors only. Between two steps parameters and state are DTensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as base

from ..core.optimizer_step import replace_step
from .materialize import as_dtensor
from .optimizer_scope import is_elementwise

# State that is about a parameter, and not of its shape.
_NUMBERS = frozenset({"eta", "mu", "mu_product", "step"})

_MARK = "_steps_locally"


def step_locally(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step on local tensors from now on; one that is not elementwise is left as it is."""
    if not is_elementwise(optimizer) or _MARK in optimizer.__dict__:
        return
    shards = _LocalShards()

    def step(own: Any, former: Callable[..., Any], closure: Any) -> Any:
        if closure is not None:
            return former(closure)
        if _is_watched(own):
            return former()
        with shards.in_place_of(own):
            return former()

    replace_step(optimizer, step)
    optimizer.__dict__[_MARK] = True


def _is_watched(optimizer: Any) -> bool:
    """Whether the step has hooks, which must see the DTensors."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or base._global_optimizer_pre_hooks
        or base._global_optimizer_post_hooks
        or optimizer.defaults.get("differentiable")
    )


class _LocalShards:
    """The local tensors of an optimizer's parameters: plain tensors on the same storage."""

    def __init__(self) -> None:
        self._known: dict[int, _LocalShard] = {}

    @contextmanager
    def in_place_of(self, optimizer: Any) -> Iterator[None]:
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
        self.outer: list[Any] = []
        self.inner: dict[str, Any] = {}

    def take(self, state: Any) -> None:
        self.leaf.grad = self._local(self.parameter.grad)
        known = state.get(self.parameter)
        if known is None:
            return
        # Another state may have been loaded.
        if len(known) != len(self.outer) or not all(map(operator.is_, known.values(), self.outer)):
            self.inner = {name: self._local(value) for name, value in known.items()}
            self.outer = list(known.values())
        state[self.leaf] = self.inner

    def give_back(self, state: Any) -> None:
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

    def _local(self, value: object) -> Any:
        """The local tensor, in the parameter's layout; numbers and plain tensors as they are."""
        if not isinstance(value, DTensor):
            return value
        placements = self.parameter._spec.placements
        if value._spec.placements != placements:
            value = value.redistribute(placements=placements)
        return value._local_tensor

    def _as_dtensor(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != self.leaf.shape:
            return value
        return as_dtensor(value, self.parameter)

# SPDX-License-Identifier: Apache-2.0
"""Optimizers of DTensors: re-pointed to the parameters that a layout has made, and their step.

The step is equal to that of a single process.
Elementwise optimizers step on the local tensors. DTensor would propagate the layout at each of a dozen operations on
each parameter, and torch has foreach and fused kernels for plain tensors only. Others may need entire tensors, as
Adafactor, Muon and LBFGS do: they step on unsharded copies, the same on every rank, at the price of their memory.
Between two steps parameters, gradients and state are DTensors.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import PrepareError
from ..core.messages import warn
from ..torch_internals.dtensor import as_dtensor
from ..torch_internals.optimizer_step import replace_step_below_hooks
from .materialize import local_shard
from .optimizer_step import OPT_OUT, Scope, find_scope, is_elementwise
from .prepared import PreparedModel

# State of torch's elementwise optimizers that is about a parameter, and not of its shape.
_NUMBERS = frozenset({"eta", "mu", "mu_product", "step"})
_LOCAL, _UNSHARDED = "_steps_locally", "_steps_unsharded"

Step = Callable[..., object]
Closure = Callable[[], object]


class ParameterPlaces:
    """Which module has which parameter, recorded before a layout replaces them."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            named = module.named_parameters(recurse=False, remove_duplicate=False)
            self._places += [(module, name, parameter) for name, parameter in named]

    def replaced(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(former, present) of each parameter that was replaced."""
        now = [(former, getattr(module, name, None)) for module, name, former in self._places]
        return [
            (former, present)
            for former, present in now
            if isinstance(present, nn.Parameter) and present is not former
        ]

    def shared(self) -> list[list[tuple[nn.Module, str]]]:
        """The places of each parameter that had several."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, name, former in self._places:
            places.setdefault(id(former), []).append((module, name))
        return [found for found in places.values() if len(found) > 1]


class Replacements:
    """All replacements of a run. A former parameter is referenced weakly: only its optimizer needs its memory."""

    def __init__(self) -> None:
        self._present = WeakTensorKeyDictionary()

    def add(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Record pairs of (former, present)."""
        for former, present in pairs:
            self._present[former] = present

    def __contains__(self, former: torch.Tensor) -> bool:
        return former in self._present

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The present parameter, after any number of replacements."""
        while (found := self._present.get(parameter)) is not None:
            parameter = found
        return parameter

    def repoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer train the present parameters; its state is laid out as they are."""
        for group in optimizer.param_groups:
            for position, former in enumerate(group["params"]):
                present = self.of(former)
                if present is former:
                    continue
                group["params"][position] = present
                if former in optimizer.state:
                    optimizer.state[present] = lay_out_state(
                        optimizer.state.pop(former), former, present
                    )


def lay_out_state(
    state: dict[str, object], former: torch.Tensor, present: torch.Tensor
) -> dict[str, object]:
    """State of a parameter, each tensor of the parameter's shape in the layout of the present one."""
    if not isinstance(present, DTensor):
        return state

    def move(value: object) -> object:
        if (
            not isinstance(value, torch.Tensor)
            or value.shape != former.shape
            or isinstance(value, DTensor)
        ):
            return value
        shard = local_shard(value, present).to(present.to_local().device).clone()
        return as_dtensor(shard, present)

    return {name: move(value) for name, value in state.items()}


def repoint_all(
    optimizers: Iterable[torch.optim.Optimizer], pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]
) -> None:
    """Make optimizers train the second parameter of each pair instead of the first."""
    replacements = Replacements()
    replacements.add(pairs)
    for optimizer in optimizers:
        replacements.repoint(optimizer)


def check_trains(optimizer: torch.optim.Optimizer, known: set[int]) -> None:
    """Raise PrepareError for an optimizer without a parameter whose id is in `known`: those of prepared models."""
    stepped: set[int] = set()
    for group in optimizer.param_groups:
        stepped.update(id(parameter) for parameter in group["params"])
    if known and stepped and not stepped & known:
        raise trains_nothing(optimizer)


def trains_nothing(optimizer: torch.optim.Optimizer) -> PrepareError:
    """Return the error for an optimizer without parameters of a prepared model."""
    return PrepareError(
        f"no parameter of {type(optimizer).__name__} belongs to a prepared model: it would train nothing. Make the "
        "optimizer from the model's parameters, and prepare both together."
    )


def lay_out_step(optimizer: torch.optim.Optimizer) -> None:
    """Make the step of an optimizer of DTensors equal to that of a single process."""
    if is_elementwise(optimizer):
        step_locally(optimizer)
        return
    scope = find_scope(optimizer)
    if scope is Scope.UNKNOWN and not steps_unsharded(optimizer):
        name = type(optimizer).__name__
        warn(
            f"{name} is not known to update each element independently: its step gathers entire parameters, gradients "
            f"and states on every rank. If it supports DTensors, set {name}.{OPT_OUT} = True"
        )
    if scope is not Scope.ELEMENT:
        step_unsharded(optimizer)


def reshard_before_step(
    optimizer: torch.optim.Optimizer, prepared_models: Iterable[PreparedModel]
) -> None:
    """Before each step reshard what a forward since the backward has gathered: its values would be stale."""
    units: list[weakref.ref[FSDPModule]] = []
    for prepared in prepared_models:
        for root in prepared.units():
            units += [weakref.ref(unit) for unit in root.modules() if isinstance(unit, FSDPModule)]
    if units:
        optimizer.register_step_pre_hook(functools.partial(_reshard, units))


def _reshard(units: Sequence[weakref.ref[FSDPModule]], *_: object) -> None:
    for reference in units:
        unit = reference()
        if unit is not None:
            unit.reshard()


def step_locally(optimizer: torch.optim.Optimizer) -> None:
    """Make an elementwise optimizer step on local tensors from now on."""
    if _LOCAL in optimizer.__dict__ or optimizer.defaults.get("differentiable"):
        return

    def run(present: torch.optim.Optimizer, step: Step, closure: Closure | None) -> object:
        loss = None
        if closure is not None:
            # All of these optimizers call it once, before anything else.
            with torch.enable_grad():
                loss = closure()
        with _local_tensors(present):
            step()
        return loss

    replace_step_below_hooks(optimizer, run)
    optimizer.__dict__[_LOCAL] = True


@contextmanager
def _local_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which the optimizer has the local tensors, with their gradients and their state."""
    state = optimizer.state
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    shards: list[tuple[DTensor, torch.Tensor, dict[str, object]]] = []
    try:
        # Without gradients `to_local` returns the local tensor itself.
        with torch.no_grad():
            for group, parameters in groups:
                group["params"] = listed = list(parameters)
                for position, parameter in enumerate(parameters):
                    if not isinstance(parameter, DTensor) or parameter.grad is None:
                        continue
                    listed[position] = leaf = parameter.to_local().detach()
                    leaf.grad = _local(parameter.grad, parameter)  # type: ignore[assignment]
                    local_state: dict[str, object] = {}
                    if parameter in state:
                        local_state = {
                            name: _local(value, parameter)
                            for name, value in state[parameter].items()
                        }
                        state[leaf] = dict(local_state)
                    shards.append((parameter, leaf, local_state))
        yield
    finally:
        for group, parameters in groups:
            group["params"] = parameters
        for parameter, leaf, local_state in shards:
            leaf.grad = None
            for name, value in state.pop(leaf, {}).items():
                if name not in local_state or local_state[name] is not value:
                    # What the step did not change in place.
                    has_layout = isinstance(value, torch.Tensor) and value.shape == leaf.shape
                    if has_layout and name not in _NUMBERS:
                        state[parameter][name] = as_dtensor(value, parameter)
                    else:
                        state[parameter][name] = value


def _local(value: object, parameter: DTensor) -> object:
    """The local tensor of a DTensor, in the parameter's layout; numbers and plain tensors as they are."""
    if not isinstance(value, DTensor):
        return value
    if value.placements != parameter.placements:
        value = value.redistribute(placements=parameter.placements)
    return value.to_local()


def step_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step on unsharded parameters, gradients and state from now on."""
    if not steps_unsharded(optimizer):
        replace_step_below_hooks(optimizer, _run_unsharded)
        optimizer.__dict__[_UNSHARDED] = True


def steps_unsharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unsharded` was applied to this optimizer."""
    return _UNSHARDED in optimizer.__dict__


def _run_unsharded(optimizer: torch.optim.Optimizer, step: Step, closure: Closure | None) -> object:
    tensors = _Unsharded(optimizer)
    tensors.enter()
    try:
        if closure is None:
            return step()

        def evaluate() -> object:
            # The closure computes with the model, whose parameters are sharded.
            tensors.leave()
            try:
                return closure()
            finally:
                tensors.enter()

        return step(evaluate)
    finally:
        tensors.leave()


class _Unsharded:
    """An optimizer's sharded parameters, and the unsharded copies that it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.sharded: list[DTensor] = []
        for group in optimizer.param_groups:
            self.sharded += [p for p in group["params"] if isinstance(p, DTensor)]
        # The same objects in all evaluations of one step: optimizers may keep references to parameters.
        self.full = [
            torch.nn.Parameter(
                torch.empty(p.shape, dtype=p.dtype, device=p.device_mesh.device_type),
                requires_grad=p.requires_grad,
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
        entries = [state.get(p, {}) for p in self.sharded]
        for entry in entries:
            values += [value for value in entry.values() if isinstance(value, DTensor)]
        gathered = {id(value): _gather(value) for value in values}
        for parameter, full, entry in zip(self.sharded, self.full, entries, strict=True):
            full.copy_(gathered[id(parameter)])
            if parameter.grad is None:
                full.grad = None
            else:
                full.grad = gathered.get(id(parameter.grad), parameter.grad)
            if parameter in state:
                # The entry itself is kept: only its tensors are others.
                for name, value in entry.items():
                    entry[name] = gathered.get(id(value), value)
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
                is_tensor = isinstance(value, torch.Tensor)
                if is_tensor and value.ndim and value.shape == parameter.shape:
                    shard = local_shard(value, parameter).to(local.device, copy=True)
                    entry[name] = as_dtensor(shard, parameter)
        self._replace(self.full, self.sharded)

    def _replace(self, former: Sequence[torch.Tensor], present: Sequence[torch.Tensor]) -> None:
        """Replace the parameters in groups and state, in their places and order."""
        other = {id(old): new for old, new in zip(former, present, strict=True)}
        for group in self.optimizer.param_groups:
            # The list itself is kept: LBFGS has a reference to it.
            group["params"][:] = [other.get(id(p), p) for p in group["params"]]
        state = self.optimizer.state
        entries = [(other.get(id(key), key), entry) for key, entry in state.items()]
        if any(map(operator.is_not, (key for key, _ in entries), state)):
            state.clear()
            state.update(entries)


def _gather(value: DTensor) -> torch.Tensor:
    """The unsharded value, on the device of its mesh."""
    device_type = value.device_mesh.device_type
    local = value.to_local()
    if local.device.type != device_type:
        # A shard that is kept in host memory.
        value = as_dtensor(local.to(device_type), value)
    return value.full_tensor()

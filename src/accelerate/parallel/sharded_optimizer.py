# SPDX-License-Identifier: Apache-2.0
"""Optimizers of DTensors: re-pointed to the parameters that a layout has made, and their step.

The step is equal to that of a single process.
Elementwise optimizers step on the local tensors. DTensor would propagate the layout at each of a dozen operations on
each parameter, and torch has foreach and fused kernels for plain tensors only. The work of registered optimizers of
matrices is shared (`matrices.py`). Others may need entire tensors, as Adafactor and LBFGS do: they step on unsharded
copies, the same on every rank, at the price of their memory.
Between two steps parameters, gradients and state are DTensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import PrepareError
from ..core.messages import warn
from ..core.modules import direct_parameters
from ..optimizer import is_optimizer, parameters_of
from ..torch_internals.dtensor import as_dtensor
from ..torch_internals.optimizer_step import replace_step, replace_step_below_hooks
from .base import Bundle
from .materialize import local_shard
from .matrices import share_step
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
            for name, parameter in direct_parameters(module).items():
                self._places.append((module, name, parameter))

    def replaced(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(former, present) of each parameter that was replaced."""
        pairs = []
        for module, name, former in self._places:
            present = getattr(module, name, None)
            if isinstance(present, nn.Parameter) and present is not former:
                pairs.append((former, present))
        return pairs

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

    def __contains__(self, former: object) -> bool:
        return isinstance(former, torch.Tensor) and former in self._present

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The present parameter, after any number of replacements."""
        while parameter in self._present:
            parameter = self._present[parameter]
        return parameter

    def repoint(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make an optimizer train the present parameters; its state is laid out as they are.

        Returns whether it had parameters that were replaced.
        """
        containers = containers_of(optimizer)
        formers: list[nn.Parameter] = []
        for container in containers:
            formers += [value for value in container if value in self]
        present = {id(former): self.of(former) for former in formers}
        for mapping, name, former in _state_entries(containers, formers):
            state = lay_out_state({name: mapping[name]}, former, present[id(former)])
            mapping[name] = state[name]
        _replace_parameters(containers, present)
        return bool(formers)


def containers_of(optimizer: Any) -> list[Any]:
    """The lists and dicts that an optimizer keeps parameters and state in, also those of optimizers inside it."""
    containers: list[Any] = []
    seen: set[int] = set()
    remaining = [optimizer.param_groups, optimizer.state, optimizer]
    while remaining:
        value = remaining.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list):
            containers.append(value)
            remaining += value
        elif isinstance(value, dict):
            containers.append(value)
            remaining += value.values()
        elif is_optimizer(value):
            remaining += vars(value).values()
    return containers


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


def check_trained(
    bundle: Bundle, prepared_now: Iterable[PreparedModel], all_prepared: Iterable[PreparedModel]
) -> None:
    """Raise PrepareError for an optimizer of foreign parameters beside a model that no optimizer trains.

    Where each model has an optimizer, one of other parameters may be right.
    """
    stepped: set[int] = set()
    for optimizer in (*bundle.optimizers, *bundle.earlier):
        stepped.update(map(id, parameters_of(optimizer)))
    has_untrained = False
    for prepared in prepared_now:
        trainable = {id(p) for p in prepared.module.parameters() if p.requires_grad}
        if trainable and trainable.isdisjoint(stepped):
            has_untrained = True
    if not has_untrained:
        return
    known: set[int] = set()
    for prepared in all_prepared:
        known.update(map(id, prepared.module.parameters()))
    for optimizer in bundle.optimizers:
        parameters = parameters_of(optimizer)
        if parameters and known.isdisjoint(map(id, parameters)):
            raise trains_nothing(optimizer)


def trains_nothing(optimizer: torch.optim.Optimizer) -> PrepareError:
    """Return the error for an optimizer without parameters of a prepared model."""
    return PrepareError(
        f"no parameter of {type(optimizer).__name__} belongs to a prepared model, so it would not "
        "train anything. Create the optimizer from the model's parameters, and prepare both "
        "together."
    )


def lay_out_step(
    optimizer: torch.optim.Optimizer, replicas: dist.ProcessGroup | None = None
) -> None:
    """Make the step of an optimizer of DTensors equal to that of a single process.

    `replicas` are the ranks that have the same parameters which are not DTensors; None for this process alone.
    """
    if share_step(optimizer, replicas, local_tensors=_local_tensors):
        return
    if is_elementwise(optimizer):
        step_locally(optimizer)
        return
    scope = find_scope(optimizer)
    if scope is Scope.UNKNOWN and not steps_unsharded(optimizer):
        name = type(optimizer).__name__
        warn(
            f"{name} may not update each element independently: its step gathers entire "
            "parameters, gradients and states on every rank. If it supports DTensors, set "
            f"{name}.{OPT_OUT} = True"
        )
    if scope is not Scope.ELEMENT:
        step_unsharded(optimizer)


def reshard_before_step(optimizer: torch.optim.Optimizer, roots: Iterable[nn.Module]) -> None:
    """Before each step reshard what a forward since the backward has gathered: its values would be stale.

    `roots` are the modules that contain the FSDP2 units.
    """
    units: list[weakref.ref[FSDPModule]] = []
    for root in roots:
        units += [weakref.ref(unit) for unit in root.modules() if isinstance(unit, FSDPModule)]
    if not units:
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.register_step_pre_hook(functools.partial(_reshard, units))
        return

    def run(_: object, step: Step, closure: Closure | None) -> object:
        _reshard(units)
        if closure is None:
            return step()
        return step(closure)

    replace_step(optimizer, run)


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
                        for name, value in state[parameter].items():
                            if isinstance(value, DTensor):
                                value = _local(value, parameter)
                            local_state[name] = value
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
    if steps_unsharded(optimizer):
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        replace_step_below_hooks(optimizer, _run_unsharded)
    else:
        replace_step(optimizer, _run_unsharded)
    optimizer.__dict__[_UNSHARDED] = _UnshardedCopies()


def steps_unsharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unsharded` was applied to this optimizer."""
    return _UNSHARDED in optimizer.__dict__


def has_own_form(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's functions do not know the state of an optimizer of shards: a wrapper's may have any form."""
    if not steps_unsharded(optimizer):
        return False
    is_fixed = isinstance(getattr(type(optimizer), "param_groups", None), property)
    return is_fixed or optimizer.state_dict().keys() != {"state", "param_groups"}


@contextmanager
def unsharded(optimizer: torch.optim.Optimizer) -> Iterator[_UnshardedCopies]:
    """A block in which an optimizer that steps so has unsharded parameters, gradients and state."""
    copies: _UnshardedCopies = optimizer.__dict__[_UNSHARDED]
    copies.enter(optimizer)
    try:
        yield copies
    finally:
        copies.leave(optimizer)


def _run_unsharded(optimizer: torch.optim.Optimizer, step: Step, closure: Closure | None) -> object:
    with unsharded(optimizer) as copies:
        if closure is None:
            return step()

        def evaluate() -> object:
            # The closure computes with the model, whose parameters are sharded.
            copies.leave(optimizer)
            try:
                return closure()
            finally:
                copies.enter(optimizer)

        return step(evaluate)


class _UnshardedCopies:
    """The unsharded copies of an optimizer's sharded parameters, which it steps.

    They are the same objects in all steps, since optimizers keep references to parameters. Between steps they are
    empty.
    """

    def __init__(self) -> None:
        # By the id of the sharded parameter: (that, its copy).
        self._pairs: dict[int, tuple[DTensor, nn.Parameter]] = {}

    @torch.no_grad()
    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather parameters, gradients and state, and give the optimizer the copies."""
        sharded = [p for p in parameters_of(optimizer) if isinstance(p, DTensor)]
        for parameter in sharded:
            full = _gather(parameter)
            if id(parameter) in self._pairs:
                copy = self._pairs[id(parameter)][1]
                copy.data = full
            else:
                copy = nn.Parameter(full)
                self._pairs[id(parameter)] = (parameter, copy)
            copy.requires_grad_(parameter.requires_grad)
            copy.grad = _gather(parameter.grad)
        containers = containers_of(optimizer)
        for mapping, name, _ in _state_entries(containers, sharded):
            mapping[name] = _gather(mapping[name])
        present = {number: copy for number, (_, copy) in self._pairs.items()}
        _replace_parameters(containers, present)

    @torch.no_grad()
    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's shards of the results, and give the optimizer the sharded parameters."""
        containers = containers_of(optimizer)
        present: dict[int, DTensor] = {}
        for parameter, copy in self._pairs.values():
            present[id(copy)] = parameter
            if copy.numel() != parameter.numel():
                # It is in no group any more.
                continue
            parameter.to_local().copy_(local_shard(copy, parameter))
            gradient = parameter.grad
            if copy.grad is None:
                parameter.grad = None
            elif isinstance(gradient, DTensor) and gradient.placements == parameter.placements:
                gradient.to_local().copy_(local_shard(copy.grad, parameter))
            else:
                parameter.grad = _shard(copy.grad, parameter)
        copies = [copy for _, copy in self._pairs.values()]
        for mapping, name, copy in _state_entries(containers, copies):
            value = mapping[name]
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.ndim and value.shape == copy.shape:
                mapping[name] = _shard(value, present[id(copy)])
        _replace_parameters(containers, present)
        for copy in copies:
            copy.grad = None
            copy.data = copy.new_empty(0)


def _shard(value: torch.Tensor, parameter: DTensor) -> DTensor:
    """This rank's shard of an unsharded value, laid out as a parameter."""
    device = parameter.to_local().device
    return as_dtensor(local_shard(value, parameter).to(device, copy=True), parameter)


def _state_entries(
    containers: Iterable[Any], parameters: Sequence[torch.Tensor]
) -> list[tuple[dict[Any, Any], Any, Any]]:
    """(mapping, name, parameter) of each value of a parameter's state, in the order of the parameters.

    That is the same on all ranks, which the order of a state need not be.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    entries = []
    for container in containers:
        if not isinstance(container, dict):
            continue
        for key, value in container.items():
            if id(key) not in numbers:
                continue
            if isinstance(value, dict):
                entries += [(value, name, key) for name in value]
            else:
                entries.append((container, key, key))
    entries.sort(key=lambda entry: numbers[id(entry[2])])
    return entries


def _replace_parameters(containers: Iterable[Any], present: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters, by their ids, in lists and as keys of dicts, in their places and order."""
    for container in containers:
        if isinstance(container, list):
            # The list itself is kept: LBFGS has a reference to it.
            container[:] = [present.get(id(value), value) for value in container]
        elif any(id(key) in present for key in container):
            entries = [(present.get(id(key), key), value) for key, value in container.items()]
            container.clear()
            container.update(entries)


def _gather(value: Any) -> Any:
    """The unsharded value of a DTensor, on the device of its mesh; any other as it is."""
    if not isinstance(value, DTensor):
        return value
    device_type = value.device_mesh.device_type
    local = value.to_local()
    if local.device.type != device_type:
        # A shard that is kept in host memory.
        value = as_dtensor(local.to(device_type), value)
    return value.full_tensor()

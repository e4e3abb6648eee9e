# SPDX-License-Identifier: Apache-2.0
"""The full state of sharded models and optimizers: gathered to rank 0, and scattered from there."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictConfig
from torch.distributed.tensor import DTensor

from ...core.errors import CheckpointError
from ...core.modules import class_name
from ...core.trees import map_leaves
from ...optimizer import parameters_of
from ...torch_internals import dtensor
from ...torch_internals.fsdp1 import flat_units, ignoring
from .. import materialize
from ..matrices import laid_out
from ..sharded_optimizer import has_own_form, lay_out_state, steps_unsharded, unsharded
from ..unwrap import canonical_name, named_parameters, named_tensors


def full_options(model: nn.Module, config: StateDictConfig | None = None) -> StateDictOptions:
    """How a full state is gathered: to the host of rank 0. FSDP1 on the CPU gives every rank a copy.

    `config` may request it on all ranks, or on their devices: torch then gives each rank a copy on its device.
    """
    if not (is_rank0_only(config) and is_on_host(config)):
        return StateDictOptions(full_state_dict=True)
    parameter = next(model.parameters(), None)
    # What is on the host already is not copied there.
    is_there = parameter is not None and parameter.device.type == "cpu" and is_fsdp1(model)
    return StateDictOptions(full_state_dict=True, cpu_offload=not is_there)


def is_rank0_only(config: StateDictConfig | None) -> bool:
    """Whether only rank 0 gets the full state; True by default."""
    return bool(getattr(config, "rank0_only", True))


def is_on_host(config: StateDictConfig | None) -> bool:
    """Whether the full state is copied to host memory; True by default."""
    return config is None or config.offload_to_cpu


def is_fsdp1(model: nn.Module) -> bool:
    """Whether a module of the model is wrapped in torch's older FullyShardedDataParallel."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """By the id of a parameter, the plain names of what it contains: several for one that FSDP1 has flattened."""
    names = {id(parameter): [name] for name, parameter in named_parameters(model)}
    if is_fsdp1(model):
        for unit in flat_units(model):
            if not unit.keeps_originals:
                names[id(unit.flat)] = list(map(canonical_name, unit.names))
    return names


def full_model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full state under plain names, copied to the host of rank 0; empty on the others. Every rank calls it."""
    return detached(get_model_state_dict(model, options=full_options(model)))


def load_full_model_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device, strict: bool = True
) -> None:
    """Load a full state, which only rank 0 needs to have, one tensor at a time. Every rank calls it.

    Raises PrepareError for a tensor of the model that the state lacks (with `strict`) or has in another shape, and
    CheckpointError for one that the model lacks.
    """
    persistent = set(map(canonical_name, model.state_dict()))
    tensors: dict[int, torch.Tensor] = {}
    # A tied tensor has several names, and a state may hold it under any of them.
    name_in_state: dict[int, str] = {}
    unknown = set(state)
    for name, tensor in named_tensors(model, remove_duplicate=False):
        if name not in persistent:
            continue
        unknown.discard(name)
        tensors[id(tensor)] = tensor
        if name_in_state.setdefault(id(tensor), name) not in state and name in state:
            name_in_state[id(tensor)] = name
    if strict and unknown:
        listed = [name for name in state if name in unknown]
        raise CheckpointError(
            f"the state has {len(listed)} tensors that the model does not have: "
            f"{', '.join(listed[:5])}"
        )
    names = materialize.from_first([name_in_state[key] for key in tensors], device)
    targets = list(zip(names, tensors.values(), strict=True))
    materialize.spread(dict(state), targets, device, strict=strict)


def full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str]] | None = None,
    config: StateDictConfig | None = None,
) -> dict[str, Any]:
    """The full state in the form of a plain run's `optimizer.state_dict()`; empty on all ranks but 0.

    Copied to host memory, unless `config` requests otherwise. Every rank calls it. `groups` are the plain names in
    each of the optimizer's groups; None to read them from the model.
    """
    is_kept = dist.get_rank() == 0 or not is_rank0_only(config)
    if steps_unsharded(optimizer):
        # Its state may have any form: torch's functions expect tensors of the parameter's shape, and a step without a
        # closure. Every rank takes part in gathering, and rank 0 keeps the result.
        gathered: dict[str, Any] = map_leaves(full_on_host, optimizer.state_dict())
        if is_kept:
            return gathered
        return {}
    # torch's result aliases the optimizer's counters, which its next step would change.
    named = copy.deepcopy(optimizer_state(model, optimizer, full_options(model, config)))
    if not is_kept:
        return {}
    if is_on_host(config):
        named = map_leaves(torch.Tensor.cpu, named)
    names = chain.from_iterable(groups or _groups(model, optimizer))
    positions = {name: position for position, name in enumerate(names)}
    saved_groups = named["param_groups"]
    for group in saved_groups:
        group["params"] = sorted(positions[name] for name in group["params"])
    saved_groups.sort(key=lambda group: group["params"][:1] or [0])
    plain_groups = []
    for saved, expected in zip(saved_groups, optimizer.param_groups, strict=True):
        plain_groups.append({key: saved[key] for key in expected if key in saved})
    states = {positions[name]: entry for name, entry in named["state"].items()}
    return {"state": states, "param_groups": plain_groups}


def load_full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    groups: Sequence[Sequence[str]] | None = None,
) -> None:
    """Load the state of a plain run's optimizer, which only rank 0 needs to have. Every rank calls it."""
    # torch's function gives each rank one block, which packed shards are not.
    if steps_unsharded(optimizer) or any(map(dtensor.is_packed, model.parameters())):
        _load_unsharded_state(optimizer, state)
        return
    named: dict[str, Any] = {}
    groups = groups or _groups(model, optimizer)
    names = list(chain.from_iterable(groups))
    if dist.get_rank() == 0:
        check_groups(groups, state["param_groups"])
        named = _named_state(state, names)
    has_shards = False
    for entry in named.get("state", {}).values():
        if any(isinstance(value, torch.Tensor) and value.dim() for value in entry.values()):
            has_shards = True
    message = set(named.get("state", ())), has_shards
    device = next(model.parameters()).device
    names_with_state, has_shards = materialize.from_first(message, device)
    if not has_shards:
        # Numbers are not scattered.
        if is_fsdp1(model) and dist.get_rank() == 0:
            state = _by_parameter(model, optimizer, state, names)
        _load_unsharded_state(optimizer, state)
        return
    # Not strict: a parameter that was never used has no state, which is how a plain run's optimizer has it.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    with laid_out(optimizer):
        set_optimizer_state_dict(model, optimizer, named, options=options)
        drop_states(model, optimizer, set(names) - names_with_state)


def _named_state(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A copy of an optimizer's plain state, with the names of parameters instead of their numbers."""
    entries = {}
    for position, entry in state["state"].items():
        entries[names[position]] = copy.deepcopy(entry)
    groups = []
    for group in state["param_groups"]:
        named = [names[position] for position in group["params"]]
        groups.append({**copy.deepcopy(group), "params": named})
    return {"state": entries, "param_groups": groups}


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions
) -> dict[str, Any]:
    """An optimizer's state as torch returns it, with that of parameters which have one. Every rank calls it.

    Where there is none at all, torch makes one by a step, which the optimizer would count.
    """
    if is_fsdp1(model):
        _refuse_nested(optimizer, options)
        stepped = set(parameters_of(optimizer))
        trained: dict[str, nn.Parameter] = {}
        names_of_rank = set()
        for name, parameter in named_parameters(model):
            if parameter in stepped and parameter.requires_grad:
                trained[name] = parameter
                if optimizer.state.get(parameter):
                    names_of_rank.add(name)
        with_state = set().union(*materialize.from_all(names_of_rank))
        if with_state:
            without = [parameter for name, parameter in trained.items() if name not in with_state]
            with ignoring(without):
                return dict(get_optimizer_state_dict(model, optimizer, options=options))
    else:
        with laid_out(optimizer):
            if optimizer.state:
                return dict(get_optimizer_state_dict(model, optimizer, options=options))
    groups = named_groups(model, optimizer)
    if not options.flatten_optimizer_state_dict:
        return {"state": {}, "param_groups": groups}
    flattened = {}
    for group in groups:
        for name in group.pop("params"):
            for key, value in group.items():
                flattened[f"param_groups.{name}.{key}"] = value
    return flattened


def _refuse_nested(optimizer: torch.optim.Optimizer, options: StateDictOptions) -> None:
    """Raise CheckpointError on every rank for values in containers, of which torch's FSDP1 stores those of one rank.

    A full state without tensors of a parameter's elements is stored as it is.
    """
    dims: list[int] = []
    nested: dict[str, str] = {}
    for entry in optimizer.state.values():
        map_leaves(lambda tensor: dims.append(tensor.dim()), dict(entry))
        for key, value in entry.items():
            if isinstance(value, (dict, list, tuple)):
                nested[str(key)] = type(value).__name__
    has_elements = any(dims)
    for nested_of_rank, rank_has_elements in materialize.from_all((nested, has_elements)):
        nested.update(nested_of_rank)
        has_elements = has_elements or rank_has_elements
    if nested and (options.flatten_optimizer_state_dict or has_elements):
        key, kind = min(nested.items())
        raise CheckpointError(
            f"the state {key!r} of {type(optimizer).__name__} is a {kind}, which FSDP1 cannot save: the optimizer "
            "has to keep its tensors and numbers as separate entries of a parameter's state"
        )


def named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """An optimizer's groups, with plain names as their parameters."""
    names = _groups(model, optimizer)
    groups = zip(optimizer.param_groups, names, strict=True)
    return [{**group, "params": listed} for group, listed in groups]


def drop_states(model: nn.Module, optimizer: torch.optim.Optimizer, without: set[str]) -> None:
    """Remove the state that torch made to load into, of parameters (plain names) that had none when it was saved."""
    if not without:
        return
    names = parameter_names(model)
    for parameter in list(optimizer.state):
        if id(parameter) in names and without.issuperset(names[id(parameter)]):
            optimizer.state.pop(parameter)


def full_on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, gathered, in host memory."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True)


def broadcast_state(
    state: Mapping[str, Any], groups: Sequence[Sequence[object]], device: torch.device | None
) -> tuple[dict[str, Any], Iterator[tuple[int, dict[str, object]]]]:
    """Rank 0's optimizer state on every rank: (all but the state of parameters, that by the number of a parameter).

    The state of one parameter at a time is unsharded on every rank. `groups` has an entry for each parameter.
    """
    other_entries = dict(state)
    states: dict[int, dict[str, object]] = other_entries.pop("state", {})
    message = other_entries, sorted(states)
    other_entries, positions = materialize.from_first(message, device)
    check_groups(groups, other_entries["param_groups"])

    def entries() -> Iterator[tuple[int, dict[str, object]]]:
        for position in positions:
            yield position, materialize.from_first(states.get(position, {}), device)

    return other_entries, entries()


def check_groups(groups: Sequence[Sequence[object]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError unless an optimizer's groups are as large as those of a saved state."""
    sizes = [len(group) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise CheckpointError(
            f"the optimizer's groups have {sizes} parameters, but those of the state have "
            f"{saved_sizes}"
        )


def _load_unsharded_state(optimizer: torch.optim.Optimizer, state: Mapping[str, object]) -> None:
    groups = [group["params"] for group in optimizer.param_groups]
    parameters = list(chain.from_iterable(groups))
    device = None
    if parameters:
        device = parameters[0].device
    if has_own_form(optimizer):
        entire = materialize.from_first(dict(state), device)
        with unsharded(optimizer):
            optimizer.load_state_dict(entire)
        return
    other_entries, entries = broadcast_state(state, groups, device)
    laid_out = {}
    for position, entry in entries:
        parameter = parameters[position]
        laid_out[position] = lay_out_state(entry, parameter, parameter)
    optimizer.load_state_dict({**other_entries, "state": laid_out})


def _by_parameter(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    names: Sequence[str],
) -> dict[str, Any]:
    """A plain state without tensors of a parameter's shape, by the positions of the optimizer's own parameters.

    A flattened parameter has the state of its first member.
    """
    saved_positions = {name: position for position, name in enumerate(names)}
    members = parameter_names(model)
    states = {}
    groups = []
    count = 0
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        positions = range(count, count + len(group["params"]))
        count = positions.stop
        groups.append({**saved, "params": list(positions)})
        for position, parameter in zip(positions, group["params"], strict=True):
            saved_position = saved_positions[members[id(parameter)][0]]
            if saved_position in state["state"]:
                states[position] = state["state"][saved_position]
    return {**state, "state": states, "param_groups": groups}


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The plain names of an optimizer's parameters, by group, in its order."""
    names = parameter_names(model)
    groups = []
    try:
        for group in optimizer.param_groups:
            members = [names[id(parameter)] for parameter in group["params"]]
            groups.append(list(chain.from_iterable(members)))
    except KeyError:
        raise CheckpointError(
            f"{type(optimizer).__name__} has parameters that are not in {class_name(model)}: its "
            "state can be saved only if it trains a single model"
        ) from None
    return groups


def unwrapped(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor or DTensor, where fp8 has wrapped a weight to gather it in float8."""
    if isinstance(value, DTensor):
        inner: torch.Tensor | None = getattr(value.to_local(), "_tensor", None)
        if inner is None:
            return value
        return dtensor.as_dtensor(inner, value)
    plain: torch.Tensor = getattr(value, "_tensor", value)
    return plain


def detached(state: Mapping[str, Any], on_host: bool = False) -> dict[str, Any]:
    """A state that shares no memory with the model; names of one tied tensor share theirs with each other.

    `on_host`: it is in host memory.
    """
    copies: dict[int, torch.Tensor] = {}
    detached_state = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and id(value) not in copies:
            copies[id(value)] = unwrapped(value).detach().clone()
            if on_host:
                copies[id(value)] = copies[id(value)].cpu()
        detached_state[name] = copies.get(id(value), value)
    return detached_state

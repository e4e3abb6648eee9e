# SPDX-License-Identifier: Apache-2.0
"""The whole state of a pipelined model and its optimizers: brought together on rank 0, and dealt out from there."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...core import trees
from ...core.errors import CheckpointError
from .. import materialize
from ..remap import lay_out_state
from .p2p import P2PChannel
from .stage import Spec


def _whole(value: Any) -> Any:
    """A tensor in host memory, shards joined; its own copy."""
    full: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().to("cpu", copy=True)


def _collects(wire: P2PChannel) -> bool:
    """Whether this pipeline is the one that rank 0 is in."""
    return dist.get_global_rank(wire.group, 0) == 0


def full_model_state(model: nn.Module, wire: P2PChannel) -> dict[str, torch.Tensor]:
    """The whole state under plain names, in the host memory of rank 0; empty on the others. Every rank calls it."""
    found: dict[str, Any] = {}
    copies: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            # What is tied shares its memory in a state, too.
            if id(value) not in copies:
                copies[id(value)] = _whole(value)
            value = copies[id(value)]
        found[materialize.canonical_name(name)] = value
    if not _collects(wire):
        return {}
    if wire.rank != 0:
        for name, value in found.items():
            is_tensor = isinstance(value, torch.Tensor)
            wire.send_object((name, Spec(tuple(value.shape), value.dtype) if is_tensor else value), 0)
            if is_tensor:
                wire.send([value.to(wire.device)], 0)
                wire.settle()
        wire.send_object(None, 0)
        wire.settle()
        return {}
    for peer in range(1, wire.size):
        while (told := wire.receive_object(peer)) is not None:
            name, value = told
            if isinstance(value, Spec):
                value = wire.post([value], peer).take()[0].to("cpu")
            found.setdefault(name, value)
    return found


@torch.no_grad()
def load_full_model_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device, strict: bool = True
) -> None:
    """Take a whole state, which rank 0 alone needs to hold, one tensor at a time. Every rank calls it.

    Raises CheckpointError, on every rank, for names or shapes that do not fit (with `strict`).
    """
    own = {
        materialize.canonical_name(name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name: tuple(value.shape) for name, value in own.items()})
    shapes = {name: shape for part in held for name, shape in part.items()}
    told: list[Any] = [
        {name: (tuple(value.shape), value.dtype) for name, value in state.items()} if dist.get_rank() == 0 else None
    ]
    dist.broadcast_object_list(told, src=0, device=device)
    offered: dict[str, Any] = told[0]
    missing = [name for name in shapes if name not in offered]
    strange = [name for name in offered if name not in shapes]
    other = [name for name in offered if name in shapes and offered[name][0] != shapes[name]]
    if other or (strict and (missing or strange)):
        raise CheckpointError(
            f"the state does not fit the model: missing {missing[:5]}; unknown {strange[:5]}; of another shape "
            f"{other[:5]}"
        )
    for name, (shape, dtype) in offered.items():
        if name not in shapes:
            continue
        if dist.get_rank() == 0:
            value = _on_device(state[name], device)
        else:
            value = torch.empty(shape, dtype=dtype, device=device)
        if dist.get_world_size() > 1:
            dist.broadcast(value, src=0)
        target = own.get(name)
        if isinstance(target, DTensor):
            target.to_local().copy_(materialize.local_part(value, target))
        elif target is not None:
            target.copy_(value)


def _on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.detach().to(device).contiguous()


def _own_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): materialize.canonical_name(name) for name, parameter in model.named_parameters()}


def gathered_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, order: Sequence[str], wire: P2PChannel
) -> list[list[str]]:
    """The plain names in each group of an optimizer that was made from a prepared model, of all stages."""
    names = _own_names(model)
    mine = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    everyone: list[Any] = [None] * wire.size
    dist.all_gather_object(everyone, mine, group=wire.group)
    place = {name: position for position, name in enumerate(order)}
    return [
        sorted({name for stage in everyone for name in stage[number] if name in place}, key=lambda name: place[name])
        for number in range(len(mine))
    ]


def full_optimizer_state(
    model: nn.Module, optimizer: Any, groups: Sequence[Sequence[str]], wire: P2PChannel
) -> dict[str, Any]:
    """The whole state in the form of a plain run's `optimizer.state_dict()`; empty on all ranks but 0."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    names = _own_names(model)
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                entry = optimizer.state[parameter]
                found[names[id(parameter)]] = trees.map_leaves(_whole, dict(entry))
    if not _collects(wire):
        return {}
    if wire.rank != 0:
        for row in (*found.items(), None):
            wire.send_object(row, 0)
            wire.settle()
        return {}
    for peer in range(1, wire.size):
        while (told := wire.receive_object(peer)) is not None:
            found.setdefault(*told)
    positions = {name: position for position, name in enumerate(name for group in groups for name in group)}
    rest = [{key: copy.deepcopy(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return {
        "state": {positions[name]: found[name] for name in sorted(found, key=lambda name: positions[name])},
        "param_groups": [
            {**options, "params": [positions[name] for name in group]}
            for options, group in zip(rest, groups, strict=True)
        ],
    }


def load_full_optimizer_state(
    model: nn.Module,
    optimizer: Any,
    state: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    device: torch.device,
) -> None:
    """Take the state of a plain run's optimizer, which rank 0 alone needs to hold. Every rank calls it."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    at_source = dist.get_rank() == 0
    told: list[Any] = [None]
    if at_source:
        told = [([{**group} for group in state["param_groups"]], sorted(state["state"]))]
    dist.broadcast_object_list(told, src=0, device=device)
    saved, present = told[0]
    if [len(group["params"]) for group in saved] != [len(group) for group in groups]:
        raise CheckpointError(
            f"the optimizer's groups have {[len(group) for group in groups]} parameters, those of the state "
            f"{[len(group['params']) for group in saved]}"
        )
    name_at = {
        position: name
        for group, held in zip(saved, groups, strict=True)
        for position, name in zip(group["params"], held, strict=True)
    }
    own = {name: parameter for parameter, name in _by_parameter(model, optimizer)}
    entries: dict[str, Any] = {}
    for position in present:
        row: list[Any] = [state["state"][position] if at_source else None]
        dist.broadcast_object_list(row, src=0, device=device)
        if (parameter := own.get(name_at[position])) is not None:
            entries[name_at[position]] = lay_out_state(dict(row[0]), parameter, parameter)
    _load(optimizer, model, entries, saved)


def _by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, str]]:
    names = _own_names(model)
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"] if id(p) in names]


def _load(
    optimizer: torch.optim.Optimizer, model: nn.Module, entries: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Have the optimizer itself take what is its own: it knows what goes where."""
    names = _own_names(model)
    local_groups, local_state, number = [], {}, 0
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        numbers = []
        for parameter in group["params"]:
            if (name := names.get(id(parameter), "")) in entries:
                local_state[number] = entries[name]
            numbers.append(number)
            number += 1
        local_groups.append({**options, "params": numbers})
    optimizer.load_state_dict({"state": local_state, "param_groups": local_groups})

# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer states of the stages: kept from those of rank 0, collected there, and loaded from there."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...core import trees
from ...core.errors import CheckpointError, PrepareError
from .. import materialize
from ..fsdp.state import broadcast_state, full_on_host
from ..sharded_optimizer import lay_out_state
from .p2p import P2PChannel, TensorSpec


def _is_of_rank_0(channel: P2PChannel) -> bool:
    """Whether this pipeline is that of rank 0, which collects its state."""
    return dist.get_global_rank(channel.group, 0) == 0


def full_model_state(model: nn.Module, channel: P2PChannel) -> dict[str, torch.Tensor]:
    """The full state under plain names, in the host memory of rank 0; empty on other ranks. Every rank calls it."""
    found: dict[str, Any] = {}
    copied: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            # Tied tensors share their memory in a state, too.
            if id(value) not in copied:
                copied[id(value)] = full_on_host(value)
            value = copied[id(value)]
        found[materialize.canonical_name(name)] = value
    if not _is_of_rank_0(channel):
        return {}
    if channel.rank != 0:
        for name, value in found.items():
            is_tensor = isinstance(value, torch.Tensor)
            channel.send_object(
                (name, TensorSpec(tuple(value.shape), value.dtype) if is_tensor else value), 0
            )
            if is_tensor:
                channel.send([value.to(channel.device)], 0)
                channel.wait_for_sends()
        channel.send_object(None, 0)
        channel.wait_for_sends()
        return {}
    for peer in range(1, channel.size):
        while (message := channel.receive_object(peer)) is not None:
            name, value = message
            if isinstance(value, TensorSpec):
                value = channel.post_receive([value], peer).wait()[0].to("cpu")
            found.setdefault(name, value)
    return found


@torch.no_grad()
def load_full_model_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device, strict: bool = True
) -> None:
    """Load a full state, which only rank 0 needs to have, one tensor at a time. Every rank calls it.

    Raises:
        CheckpointError: on every rank, for shapes, or with `strict` names, that do not fit.
    """
    own = {
        materialize.canonical_name(name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    of_ranks = materialize.from_all({name: tuple(value.shape) for name, value in own.items()})
    shapes: dict[str, Any] = {}
    for shapes_of_rank in of_ranks:
        shapes.update(shapes_of_rank)
    given = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    offered = materialize.from_first(given, device)
    missing = [name for name in shapes if name not in offered]
    unknown = [name for name in offered if name not in shapes]
    other = [name for name in offered if name in shapes and offered[name][0] != shapes[name]]
    if other or (strict and (missing or unknown)):
        raise CheckpointError(
            f"the state does not fit the model: missing {missing[:5]}; unknown {unknown[:5]}; of another shape "
            f"{other[:5]}"
        )
    for name, (shape, dtype) in offered.items():
        if name not in shapes:
            continue
        value = materialize.broadcast_tensor(state.get(name), shape, dtype, device)
        target = own.get(name)
        if isinstance(target, DTensor):
            target.to_local().copy_(materialize.local_shard(value, target))
        elif target is not None:
            target.copy_(value)


def full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str]],
    channel: P2PChannel,
) -> dict[str, Any]:
    """The full state in the form of a single process's `optimizer.state_dict()`; empty on all ranks but 0."""
    names = {id(parameter): name for name, parameter in materialize.named_parameters(model)}
    found: dict[str, dict[str, object]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                entry = optimizer.state[parameter]
                found[names[id(parameter)]] = trees.map_leaves(full_on_host, dict(entry))
    if not _is_of_rank_0(channel):
        return {}
    if channel.rank != 0:
        for row in (*found.items(), None):
            channel.send_object(row, 0)
            channel.wait_for_sends()
        return {}
    for peer in range(1, channel.size):
        while (message := channel.receive_object(peer)) is not None:
            found.setdefault(*message)
    positions = {name: position for position, name in enumerate(itertools.chain(*groups))}
    rest = [
        {key: copy.deepcopy(value) for key, value in g.items() if key != "params"}
        for g in optimizer.param_groups
    ]
    return {
        "state": {
            positions[name]: found[name] for name in sorted(found, key=lambda name: positions[name])
        },
        "param_groups": [
            {**options, "params": [positions[name] for name in group]}
            for options, group in zip(rest, groups, strict=True)
        ],
    }


def load_full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    device: torch.device,
) -> None:
    """Load the optimizer state of a single process, which only rank 0 needs to have. Every rank calls it."""
    rest, present = broadcast_state(state, groups, device)
    saved = rest["param_groups"]
    name_at: dict[int, str] = {}
    for group, names in zip(saved, groups, strict=True):
        name_at.update(zip(group["params"], names, strict=True))
    own_names = {id(parameter): name for name, parameter in materialize.named_parameters(model)}
    stepped = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    own = {own_names[id(p)]: p for p in stepped if id(p) in own_names}
    entries: dict[str, object] = {}
    for position, entry in present:
        parameter = own.get(name_at[position])
        if parameter is not None:
            entries[name_at[position]] = lay_out_state(dict(entry), parameter, parameter)
    # The optimizer itself knows how its state is kept.
    local_groups, local_state, number = [], {}, 0
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        numbers = []
        for parameter in group["params"]:
            name = own_names.get(id(parameter), "")
            if name in entries:
                local_state[number] = entries[name]
            numbers.append(number)
            number += 1
        local_groups.append({**options, "params": numbers})
    optimizer.load_state_dict({"state": local_state, "param_groups": local_groups})


@torch.no_grad()
def distribute(model: nn.Module, present: Collection[int], channel: P2PChannel) -> bool:
    """Give the parameters and buffers with ids in `present` rank 0's values.

    They are moved to the channel's device; all other tensors lose their memory. Every rank calls it with a model of
    the same structure.

    Returns:
        Whether rank 0 has weights. If not (they are on meta), those of the rank's stages are yet to be initialised.
    """
    listed = list(materialize.named_tensors(model))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in listed]
    is_meta = any(tensor.is_meta for _, tensor in listed)
    first, from_meta = channel.from_first((shapes, is_meta))
    if first != shapes:
        different = next(
            (a[0] for a, b in zip(first, shapes, strict=False) if a != b), "the number of tensors"
        )
        raise PrepareError(
            f"this rank's model differs from rank 0's ({different}): build the same on all ranks"
        )
    values: dict[int, torch.Tensor] = {}
    for _, tensor in () if from_meta else listed:
        value = materialize.broadcast_tensor(tensor, tensor.shape, tensor.dtype, channel.device)
        if id(tensor) in present:
            values[id(tensor)] = value

    def replacement(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in present:
            return tensor.data.to("meta")
        value = values.pop(id(tensor), None)
        if value is None:
            return tensor
        if tensor.device.type == value.device.type:
            # The object stays: an optimizer may have it.
            tensor.data = value
            return tensor
        # Its optimizer gets the new object.
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, tensor.requires_grad)
        return value

    materialize.replace_tensors(model, replacement)
    return not from_meta

# SPDX-License-Identifier: Apache-2.0
"""Weights of the stages: each rank keeps those of its own, with rank 0's values, and drops the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import PrepareError
from .. import materialize
from .remote_tensor import Origin, RemoteTensor

# From the name of a parameter or buffer: what a remote tensor in its place stands for.
FindOrigin = Callable[[str], Origin]

# Dictionaries of nn.Module itself.
_MODULE_FIELDS = frozenset(nn.Module().__dict__)


def own_names(model: nn.Module, locations: Mapping[int, set[int]], own: Collection[int]) -> set[str]:
    """Plain names, tied ones included, of the parameters and read buffers on the stages of the units in `own`."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {materialize.canonical_name(name) for name, tensor in named if locations.get(id(tensor), set()) & set(own)}


@torch.no_grad()
def distribute(model: nn.Module, names: set[str], foreign: Sequence[nn.Module], device: torch.device) -> bool:
    """Give the tensors in `names`, and the buffers of all but the foreign modules, rank 0's values on `device`.

    All other tensors lose their memory. Every rank calls it with a model of the same structure.

    Returns:
        Whether rank 0 has weights. If not (they are on meta), those of the own stages are yet to be initialised.
    """
    listed = list(materialize.named_tensors(model))
    _check_same([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in listed], device)
    from_meta = materialize.gather_flags(any(tensor.is_meta for _, tensor in listed), device, None)[0]
    foreign_buffers = {id(buffer) for module in foreign for buffer in module.buffers()}
    kept = {
        id(tensor)
        for name, tensor in listed
        if name in names or not (isinstance(tensor, nn.Parameter) or id(tensor) in foreign_buffers)
    }
    values: dict[int, torch.Tensor] = {}
    for _, tensor in () if from_meta else listed:
        value = materialize.broadcast_tensor(tensor, tensor.shape, tensor.dtype, device)
        if id(tensor) in kept:
            values[id(tensor)] = value
    materialize.replace_tensors(
        model, lambda tensor: _replacement(tensor, id(tensor) in kept, values.pop(id(tensor), tensor.data))
    )
    return not from_meta


def _replacement(tensor: torch.Tensor, keep: bool, value: torch.Tensor) -> torch.Tensor:
    """A kept tensor with its value; of any other one on meta."""
    if keep and not tensor.is_meta:
        # The object stays: an optimizer may have it.
        tensor.data = value
        return tensor
    if keep and value.is_meta:
        return tensor
    return value if keep else value.to("meta")


def _check_same(listed: list[tuple[str, tuple[int, ...], torch.dtype]], device: torch.device) -> None:
    message: list[Any] = [listed if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0, device=device)
    first = message[0]
    if [entry[:2] for entry in first] != [entry[:2] for entry in listed]:
        different = next(
            (a[0] for a, b in zip(first, listed, strict=False) if a[:2] != b[:2]), "the number of tensors"
        )
        raise PrepareError(f"this rank's model differs from rank 0's ({different}): build the same on all ranks")


def drop_foreign(
    model: nn.Module, kept: Collection[int], foreign: Sequence[nn.Module], device: torch.device, origin: FindOrigin
) -> None:
    """Replace parameters, and buffers of the foreign modules, by remote tensors unless their ids are in `kept`."""
    without_buffers = {id(inner) for module in foreign for inner in module.modules()}
    dropped: dict[int, RemoteTensor] = {}

    def remote(tensor: torch.Tensor, name: str) -> RemoteTensor:
        if id(tensor) not in dropped:
            dropped[id(tensor)] = RemoteTensor.of(tensor.shape, tensor.dtype, device, origin(name))
        return dropped[id(tensor)]

    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in kept:
                del module._parameters[name]
                module.__dict__[name] = remote(parameter, path + name)
        for name, buffer in list(module._buffers.items()) if id(module) in without_buffers else ():
            if buffer is not None and id(buffer) not in kept:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
                module.__dict__[name] = remote(buffer, path + name)


def drop_aliases(model: nn.Module, former: Mapping[int, str], origin: FindOrigin, device: torch.device) -> None:
    """Replace parameters of other stages, by id, in plain attributes, lists and dicts of modules (an LSTM's list)."""

    def remote(value: object) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) not in former:
            return value
        return RemoteTensor.of(value.shape, value.dtype, device, origin(former[id(value)]))

    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, torch.Tensor):
                module.__dict__[name] = remote(value)
            elif type(value) is tuple and any(id(entry) in former for entry in value):
                module.__dict__[name] = tuple(map(remote, value))
            elif type(value) is list and name not in _MODULE_FIELDS:
                value[:] = map(remote, value)
            elif type(value) is dict and name not in _MODULE_FIELDS:
                value.update({key: remote(entry) for key, entry in value.items()})


def initialise(stages: Iterable[nn.Module], device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Initialise units without weights, identically on all ranks of `group`, which have the same stages."""
    for stage in stages:
        if materialize.where_meta(stage) is None:
            continue
        materialize.allocate(stage, device)
        materialize.initialise(stage, device, group)

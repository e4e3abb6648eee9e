# SPDX-License-Identifier: Apache-2.0
"""What this rank has of a run's models and optimizers, under the names of the plain models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..checkpointing.run_state import state_template
from ..core.modules import class_name
from ..core.trees import children, leaves
from ..optimizer import AcceleratedOptimizer, is_optimizer, parameters_of
from ..parallel.matrices import laid_out
from ..parallel.prepared import PreparedModel
from ..parallel.sharded import ShardedModel
from ..parallel.unwrap import canonical_name, named_parameters
from ..run.objects import RunObjects
from .joining import Tensors


def model_prefix(index: int, prepared: PreparedModel) -> str:
    """What stands before the names of a model's tensors; nothing for the first model."""
    if index == 0:
        return ""
    return f"model {index} ({class_name(prepared.inner)}) "


def optimizer_prefix(objects: RunObjects, optimizer: AcceleratedOptimizer) -> str:
    """What stands before the names of an optimizer's state and options; nothing for the first optimizer."""
    index = objects.optimizers.index(optimizer)
    if index == 0:
        return ""
    return f"optimizer {index} "


def size_of(objects: RunObjects) -> int:
    """Bytes of all models."""
    size = 0
    for prepared in objects.models:
        for tensor in leaves(state_template(prepared).state_dict()):
            size += tensor.nbytes
    return size


def gradients(objects: RunObjects, optimizer: AcceleratedOptimizer) -> Tensors:
    """The gradients of models that an optimizer trains; zeros where there is none.

    Those of engines, and of parameters that FSDP1 has flattened, are not accessible.
    """
    tensors: Tensors = {}
    for prefix, prepared in _models(objects):
        if not _is_readable(prepared) or not prepared.trains_with(optimizer.optimizer):
            continue
        prepared.reshard()
        for name, parameter in _parameters(prepared):
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            tensors[prefix + name] = gradient
    return tensors


def options(objects: RunObjects, optimizer: AcceleratedOptimizer) -> Tensors:
    """The numbers among the options of each group."""
    prefix = optimizer_prefix(objects, optimizer)
    tensors: Tensors = {}
    for index, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key != "params"}
        tensors.update(_numbers(f"{prefix}group {index}", values))
    return tensors


def parameters_and_buffers(objects: RunObjects) -> tuple[Tensors, Tensors]:
    """The state of all models: parameters, frozen ones too, and buffers."""
    parameters: Tensors = {}
    buffers: Tensors = {}
    for prefix, prepared in _models(objects):
        if _is_readable(prepared):
            state = prepared.inner.state_dict()
        else:
            state = prepared.checkpoint_state_dict()
        named_buffers = prepared.inner.named_buffers(remove_duplicate=False)
        names_of_buffers = {canonical_name(name) for name, _ in named_buffers}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            name = canonical_name(key)
            tensors = parameters
            if name in names_of_buffers:
                tensors = buffers
            tensors[prefix + name] = value
    return parameters, buffers


def optimizer_state(objects: RunObjects, optimizer: AcceleratedOptimizer) -> Tensors:
    """The tensors and numbers in the state of an optimizer."""
    prefix = optimizer_prefix(objects, optimizer)
    prepared = objects.find_trained(optimizer)
    if prepared is None or _is_readable(prepared):
        names = _names_of(objects, optimizer)
        with laid_out(optimizer.optimizer):
            return dict(_entries(optimizer.optimizer, names, prefix))
    # Its state has the positions of parameters.
    full = prepared.prepared_optimizer(optimizer)
    groups = full.group_shapes() or []
    name_at = dict(enumerate(itertools.chain.from_iterable(groups)))
    tensors: Tensors = {}
    for position, entry in full.state_dict().get("state", {}).items():
        name = name_at.get(position, f"parameter {position}")
        tensors.update(_numbers(prefix + name, entry))
    return tensors


def _names_of(objects: RunObjects, optimizer: AcceleratedOptimizer) -> dict[Any, str]:
    """{parameter: its first name} of those of all models and of an optimizer."""
    names: dict[Any, str] = {}
    for prefix, prepared in _models(objects):
        for name, parameter in _parameters(prepared):
            names.setdefault(parameter, prefix + name)
    for position, foreign in enumerate(parameters_of(optimizer)):
        names.setdefault(foreign, f"parameter {position}")
    return names


def _entries(
    optimizer: Any, names: Mapping[Any, str], prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of an optimizer's state, and of that of optimizers inside of it."""
    for key, entry in optimizer.state.items():
        name = key
        if isinstance(key, torch.Tensor):
            name = names.get(key, "parameter")
        yield from _numbers(f"{prefix}{name}", entry)
    for attribute, inner in vars(optimizer).items():
        if is_optimizer(inner) and inner.state is not optimizer.state:
            yield from _entries(inner, names, f"{prefix}{attribute} ")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of tensors and numbers in nested data, each number as a tensor."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(float(value), dtype=torch.float64)
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for key, inner in (children(value) or {}).items():
        separator = " "
        if isinstance(key, int):
            separator = "."
        yield from _numbers(f"{name}{separator}{key}", inner)


def _models(objects: RunObjects) -> Iterator[tuple[str, PreparedModel]]:
    """(prefix of names, model)."""
    for index, prepared in enumerate(objects.models):
        yield model_prefix(index, prepared), prepared


def _is_readable(prepared: PreparedModel) -> bool:
    """Whether parameters, their gradients and their state are tensors of the plain model's shapes."""
    return isinstance(prepared, ShardedModel) or not prepared.is_partial


def _parameters(prepared: PreparedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(plain name, parameter) of those that this process has, under each of their names."""
    for name, parameter in named_parameters(prepared.inner, remove_duplicate=False):
        if not parameter.is_meta:
            yield name, parameter

# SPDX-License-Identifier: Apache-2.0
"""What an FSDP1 model was before it was flattened: names, shapes, parameter groups; and its whole state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

from ...core.errors import CheckpointError, PrepareError
from .. import materialize
from ..materialize import canonical_name
from ..skeleton import complete, skeleton, without_storage
from . import state as fsdp_state


class PlainModel:
    """The names, shapes and parameters that a model had before it was sharded.

    `skeleton` is a module without storage whose `state_dict()` has the plain model's names, shapes and ties.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = model.module if isinstance(model, FullyShardedDataParallel) else model
        self.state = without_storage(model.state_dict(keep_vars=True))
        self.skeleton = skeleton(type(inner).__qualname__, self.state)
        named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
        self.shapes = {name: list(parameter.shape) for name, parameter in named.items()}
        # Held weakly: what is flattened lives on only in an optimizer that was made before.
        self._originals = {name: weakref.ref(parameter) for name, parameter in named.items()}
        self._names: dict[int, list[str]] = {}
        self._flat: list[tuple[nn.Parameter, list[str]]] = []
        self._split: list[nn.Parameter] = []

    def attach(self, sharded: nn.Module) -> None:
        """Learn which parameter of the sharded model stands for which of the plain one's."""
        self._names = {id(parameter): [canonical_name(name)] for name, parameter in sharded.named_parameters()}
        for prefix, module in sharded.named_modules():
            handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
            if handle is None:
                continue
            flat = handle.flat_param
            members: list[nn.Parameter] = flat._params if handle._use_orig_params else [flat]
            if handle.uses_sharded_strategy:
                self._split += members
            if not handle._use_orig_params:
                inner = {canonical_name(f"{prefix}.{name}" if prefix else name): None for name in flat._fqns}
                self._names[id(flat)] = [name for name in self.shapes if name in inner]
                self._flat.append((flat, self._names[id(flat)]))

    def split_parameters(self) -> list[nn.Parameter]:
        """The parameters of which each rank holds its own part."""
        return self._split

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The plain names in each of an optimizer's groups, in the plain model's order where they were flattened."""
        order = {name: position for position, name in enumerate(self.shapes)}
        found = []
        for group in optimizer.param_groups:
            names: list[str] = []
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} holds a parameter that its sharded model has not: its state can "
                        "only be taken with the one model that it trains"
                    )
                names += self._names[id(parameter)]
            flattened = any(len(self._names[id(parameter)]) > 1 for parameter in group["params"])
            found.append(sorted(names, key=order.__getitem__) if flattened else names)
        return found

    def flattened(self) -> Iterable[tuple[nn.Parameter, list[nn.Parameter | None]]]:
        """(flat parameter, those that went into it, None for one that nobody has), with use_orig_params=False."""
        for flat, names in self._flat:
            yield flat, [self._originals[name]() for name in names]

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._names


def repoint(optimizer: torch.optim.Optimizer, models: Sequence[PlainModel]) -> None:
    """Have an optimizer that was made before the models were flattened train the flat parameters.

    Where the original parameters are kept (`use_orig_params`) it holds the right ones already. Raises PrepareError for
    an optimizer whose groups a flat parameter would mix, that has stepped, or that would train nothing.
    """
    where = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    fresh: dict[int, list[nn.Parameter]] = {}
    gone: set[int] = set()
    for model in models:
        for flat, members in model.flattened():
            homes = {None if member is None else where.get(id(member)) for member in members}
            if homes == {None}:
                continue
            if len(homes) > 1:
                raise PrepareError(
                    f"use_orig_params=False makes one parameter of several that {type(optimizer).__name__} has in "
                    "different groups, or not at all. Set use_orig_params=True (FSDP_USE_ORIG_PARAMS=true), or make "
                    "the optimizer from the model that prepare returns"
                )
            fresh.setdefault(homes.pop(), []).append(flat)  # type: ignore[arg-type]
            gone |= {id(member) for member in members}
    if gone and optimizer.state:
        raise PrepareError(
            f"{type(optimizer).__name__} has stepped before its model was flattened (use_orig_params=False), and its "
            "state would be lost. Prepare it before its first step, or set use_orig_params=True"
        )
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [p for p in group["params"] if id(p) not in gone] + fresh.get(number, [])
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if models and held and not any(model.holds(parameter) for model in models for parameter in held):
        raise PrepareError(
            f"none of the {len(held)} parameters of {type(optimizer).__name__} belongs to a prepared model: "
            "it would train nothing. Make the optimizer from the model that prepare returns."
        )


def full_model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state under plain names, on the host of rank 0; empty on the others. Every rank calls it."""
    state = get_model_state_dict(model, options=fsdp_state.full_options(model))
    return fsdp_state.detached(state) if dist.get_rank() == 0 else {}


def load_full_model_state(
    model: nn.Module,
    plain: PlainModel,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    strict: bool = True,
) -> None:
    """Take a whole state, which rank 0 alone needs to hold. Every rank calls it, and has the whole for a moment.

    Raises CheckpointError for names that the model or the state has alone, unless `strict` is False.
    """
    # What is missing keeps its value.
    whole = {} if strict else full_model_state(model)
    told: list[Any] = [[], {}]
    if dist.get_rank() == 0:
        whole.update(complete(state, plain.state))
        if strict:
            told[0] = sorted(set(state) - set(plain.state) | set(plain.state) - set(whole))
        told[1] = {name: value for name, value in whole.items() if not isinstance(value, torch.Tensor)}
    dist.broadcast_object_list(told, src=0, device=device)
    if told[0]:
        raise CheckpointError(f"the state and the model differ in {len(told[0])} names: {', '.join(told[0][:5])}")
    targets = {
        id(meta): (name, torch.empty(meta.shape, dtype=meta.dtype, device=device))
        for name, meta in reversed(plain.state.items())
        if isinstance(meta, torch.Tensor)
    }
    tensors = {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}
    materialize.spread(tensors, targets.values(), device)
    full = {name: targets[id(meta)][1] for name, meta in plain.state.items() if id(meta) in targets}
    # torch's own way of spreading a state (broadcast_from_rank0) loses the second name of a tied tensor here.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            model.load_state_dict({**full, **told[1]})


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, plain: PlainModel) -> dict[str, Any]:
    """The whole state in the form of a plain run's `optimizer.state_dict()`; empty on all ranks but 0."""
    return fsdp_state.full_optimizer_state(model, optimizer, plain.groups(optimizer))


def load_full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, plain: PlainModel, state: Mapping[str, Any]
) -> None:
    """Take the state of a plain run's optimizer, which rank 0 alone needs to hold. Every rank calls it."""
    fsdp_state.load_full_optimizer_state(model, optimizer, state, plain.groups(optimizer))

# SPDX-License-Identifier: Apache-2.0
"""The names and shapes that an FSDP1 model had before it was flattened, and its full state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictConfig,
    StateDictType,
)

from ...core.errors import CheckpointError, PrepareError
from ...core.modules import direct_parameters
from ...torch_internals.fsdp1 import FlatUnit, flat_units
from .. import materialize
from ..materialize import complete, skeleton, without_storage
from . import state as fsdp_state


class PlainModel:
    """The names, shapes and parameters that a model had before it was sharded.

    `skeleton` is a module without storage whose `state_dict()` has the plain model's names, shapes and ties.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = model
        if isinstance(model, FullyShardedDataParallel):
            inner = model.module
        state = model.state_dict(keep_vars=True)
        self.state: dict[str, object] = without_storage(state)
        self.skeleton: nn.Module = skeleton(type(inner).__qualname__, self.state)
        self.shapes: dict[str, list[int]] = {}
        # Weak references: only an optimizer that was made before still needs a flattened parameter.
        self._originals: dict[str, weakref.ref[nn.Parameter]] = {}
        for name, parameter in materialize.named_parameters(model):
            self.shapes[name] = list(parameter.shape)
            self._originals[name] = weakref.ref(parameter)
        self._layers: list[nn.Module] = []
        for module in model.modules():
            if direct_parameters(module):
                self._layers.append(module)
        # Id of a parameter of the sharded model -> the plain names of its members.
        self.names: dict[int, list[str]] = {}
        self.split: list[nn.Parameter] = []  # the parameters of which each rank has a shard
        self._units: list[FlatUnit] = []

    def attach(self, sharded: nn.Module) -> None:
        """Record which parameter of the sharded model contains which of the plain model."""
        self.names = fsdp_state.parameter_names(sharded)
        self._units = list(flat_units(sharded))
        for unit in self._units:
            if unit.is_sharded:
                self.split += unit.members

    def parts(self) -> Iterator[object]:
        """The layers with parameters, and the parameters that something else still uses."""
        yield from self._layers
        for original in self._originals.values():
            parameter = original()
            if parameter is not None:
                yield parameter

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The plain names in each of an optimizer's groups, in the plain model's order where they were flattened."""
        order = {name: position for position, name in enumerate(self.shapes)}
        groups = []
        for group in optimizer.param_groups:
            names: list[str] = []
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} has a parameter that its sharded model does "
                        "not have: its state can be saved only if it trains a single model"
                    )
                names += self.names[id(parameter)]
            if len(names) > len(group["params"]):
                names.sort(key=order.__getitem__)
            groups.append(names)
        return groups

    def flattened(self) -> Iterable[tuple[nn.Parameter, list[nn.Parameter | None]]]:
        """(flat parameter, its original ones, None for one that was freed), with use_orig_params=False."""
        for unit in self._units:
            if not unit.keeps_originals:
                names = map(materialize.canonical_name, unit.names)
                yield unit.flat, [self._originals[name]() for name in names]


def repoint(optimizer: torch.optim.Optimizer, models: Sequence[PlainModel]) -> None:
    """Make an optimizer that was made before the models were flattened train the flat parameters.

    With `use_orig_params` it has the right ones already. Raises PrepareError for an optimizer whose groups a flat
    parameter would mix, or that has stepped.
    """
    group_of: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        group_of.update(dict.fromkeys(map(id, group["params"]), number))
    fresh: dict[int, list[nn.Parameter]] = {}
    gone: set[int] = set()
    sharded: set[int] = set()
    for model in models:
        sharded.update(map(id, model.split))
        for flat, members in model.flattened():
            # The number of the group, None for a member that is freed or in no group.
            homes = {group_of.get(id(member)) for member in members}
            if homes == {None}:
                continue
            if len(homes) > 1:
                raise PrepareError(
                    "use_orig_params=False combines several parameters into one, but "
                    f"{type(optimizer).__name__} has them in different groups or lacks some. Set "
                    "use_orig_params=True (FSDP_USE_ORIG_PARAMS=true), or create the optimizer "
                    "from the model that prepare returns"
                )
            fresh.setdefault(homes.pop(), []).append(flat)  # type: ignore[arg-type]
            gone.update(map(id, members))
    if not (gone | sharded).isdisjoint(map(id, optimizer.state)):
        raise PrepareError(
            f"{type(optimizer).__name__} already has state, as after a step, but FSDP1 flattened "
            "its parameters. Create it from the model that prepare returns, or set "
            "fsdp_version=2 (FSDP_VERSION=2)"
        )
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [p for p in group["params"] if id(p) not in gone]
        group["params"] += fresh.get(number, [])


def full_model_state(
    model: nn.Module, config: StateDictConfig | None = None
) -> dict[str, torch.Tensor]:
    """The full state under plain names, on the host of rank 0; empty on the others. Every rank calls it.

    `config` may request it on all ranks (`rank0_only=False`), or on their devices (`offload_to_cpu=False`).
    """
    state = get_model_state_dict(model, options=fsdp_state.full_options(model, config))
    if dist.get_rank() != 0 and fsdp_state.is_rank0_only(config):
        return {}
    return fsdp_state.detached(state, fsdp_state.is_on_host(config))


def load_full_model_state(
    model: nn.Module,
    plain: PlainModel,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    strict: bool = True,
) -> None:
    """Load a full state, which only rank 0 needs to have. Every rank calls it, and has all of it for a moment.

    Raises CheckpointError for names that only the model or only the state has, unless `strict` is False.
    """
    # What is missing keeps its value.
    values = {}
    if not strict:
        values = full_model_state(model)
    differing: list[str] = []
    if dist.get_rank() == 0:
        values.update(complete(state, plain.state))
        if strict:
            differing = sorted(set(state) - set(plain.state) | set(plain.state) - set(values))
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            others[name] = value
    differing, others = materialize.from_first((differing, others), device)
    if differing:
        raise CheckpointError(
            f"the state and the model differ in {len(differing)} names: {', '.join(differing[:5])}"
        )
    targets: dict[str, torch.Tensor] = {}
    full: dict[str, torch.Tensor] = {}
    by_meta: dict[int, torch.Tensor] = {}
    for name, meta in plain.state.items():
        if not isinstance(meta, torch.Tensor):
            continue
        # A tied tensor is sent once.
        if id(meta) not in by_meta:
            by_meta[id(meta)] = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            targets[name] = by_meta[id(meta)]
        full[name] = by_meta[id(meta)]
    materialize.spread(tensors, targets.items(), device)
    # torch's broadcast_from_rank0 loses the second name of a tied tensor here.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        ):
            model.load_state_dict({**full, **others})

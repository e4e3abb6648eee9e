# SPDX-License-Identifier: Apache-2.0
"""The names and shapes that an FSDP1 model had before it was flattened, its full state, and its window's gradients."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

from ...core.errors import CheckpointError, PrepareError
from .. import materialize
from ..materialize import complete, skeleton, without_storage
from ..remap import check_trains
from . import state as fsdp_state
from .fsdp1_unused import FlattenedUnit, ParameterUsage
from .units import FlatUnit, flat_units

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle


class PlainModel:
    """The names, shapes and parameters that a model had before it was sharded.

    `skeleton` is a module without storage whose `state_dict()` has the plain model's names, shapes and ties.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = model.module if isinstance(model, FullyShardedDataParallel) else model
        self.state: dict[str, object] = without_storage(model.state_dict(keep_vars=True))
        self.skeleton: nn.Module = skeleton(type(inner).__qualname__, self.state)
        named = dict(materialize.named_parameters(model))
        self.shapes: dict[str, list[int]] = {name: list(parameter.shape) for name, parameter in named.items()}
        # Weak references: only an optimizer that was made before still needs a flattened parameter.
        self._originals = {name: weakref.ref(parameter) for name, parameter in named.items()}
        # Id of a parameter of the sharded model -> the plain names of its members.
        self.names: dict[int, list[str]] = {}
        self.split: list[nn.Parameter] = []  # the parameters of which each rank has a shard
        self._units: list[FlatUnit] = []

    def attach(self, sharded: nn.Module) -> None:
        """Record which parameter of the sharded model contains which of the plain model."""
        self.names = fsdp_state.parameter_names(sharded)
        self._units = list(flat_units(sharded))
        for _, handle, _ in self._units:
            if handle.uses_sharded_strategy:
                self.split += _parameters(handle)

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The plain names in each of an optimizer's groups, in the plain model's order where they were flattened."""
        order = {name: position for position, name in enumerate(self.shapes)}
        found = []
        for group in optimizer.param_groups:
            names: list[str] = []
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} has a parameter that its sharded model lacks: its state can "
                        "only be saved with the one model that it trains"
                    )
                names += self.names[id(parameter)]
            flattened = any(len(self.names[id(parameter)]) > 1 for parameter in group["params"])
            found.append(sorted(names, key=order.__getitem__) if flattened else names)
        return found

    def flattened(self) -> Iterable[tuple[nn.Parameter, list[nn.Parameter | None]]]:
        """(flat parameter, its original ones, None for one that was freed), with use_orig_params=False."""
        for _, handle, names in self._units:
            if not handle._use_orig_params:
                yield handle.flat_param, [self._originals[name]() for name in names]

    def lay_out_states(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Shard the state that an optimizer had of unsharded parameters.

        Returns the ids of the former parameters whose state was merged into that of a flattened one.
        """
        merged: set[int] = set()
        for _, handle, names in self._units:
            flat, infos = handle.flat_param, handle.flat_param._shard_param_infos
            if handle._use_orig_params:
                if not handle.uses_sharded_strategy:
                    continue
                for parameter, info, name in zip(_parameters(handle), infos, names, strict=True):
                    if parameter not in optimizer.state:
                        continue
                    entry = optimizer.state.pop(parameter)
                    if info.in_shard:
                        optimizer.state[parameter] = {
                            key: _part(value, self.shapes[name], info) for key, value in entry.items()
                        }
                continue
            members = [self._originals[name]() for name in names]
            entries = [{} if member is None else optimizer.state.get(member, {}) for member in members]
            if entry := _merged(entries, [self.shapes[name] for name in names], infos, flat):
                optimizer.state[flat] = entry
                merged |= {id(member) for member in members}
                for member in members:
                    optimizer.state.pop(member, None)  # type: ignore[arg-type]
        return merged


def _parameters(handle: FlatParamHandle) -> Sequence[nn.Parameter]:
    """The parameters of a unit as an optimizer has them."""
    return handle.flat_param._params or () if handle._use_orig_params else [handle.flat_param]


def _part(value: object, shape: list[int], info: Any) -> Any:
    if not isinstance(value, torch.Tensor) or list(value.shape) != shape:
        return value
    return value.reshape(-1)[info.intra_param_start_idx : info.intra_param_end_idx + 1].clone()


def _merged(
    entries: list[dict[str, Any]], shapes: list[list[int]], infos: Sequence[Any], flat: torch.Tensor
) -> dict[str, Any]:
    """One state for a flattened parameter from those of its members; empty where they do not make one."""
    first = entries[0]
    if not first or any(entry.keys() != first.keys() for entry in entries):
        return {}
    found: dict[str, Any] = {}
    for key, example in first.items():
        values = [entry[key] for entry in entries]
        if isinstance(example, torch.Tensor) and list(example.shape) == shapes[0]:
            # A tensor of one element may be a counter: a value of another shape does not belong to the elements.
            if any(list(value.shape) != shape for value, shape in zip(values, shapes, strict=True)):
                return {}
            found[key] = torch.zeros_like(flat, dtype=example.dtype)
            for value, shape, info in zip(values, shapes, infos, strict=True):
                if info.in_shard:
                    found[key][info.offset_in_shard : info.offset_in_shard + info.numel_in_shard] = _part(
                        value, shape, info
                    )
        elif all(bool(value == example) for value in values):
            found[key] = copy.deepcopy(example)
        else:
            return {}
    return found


def repoint(optimizer: torch.optim.Optimizer, models: Sequence[PlainModel]) -> None:
    """Make an optimizer that was made before the models were flattened train the flat parameters.

    With `use_orig_params` it has the right ones already. Raises PrepareError for an optimizer whose groups a flat
    parameter would mix, that has stepped, or that would train nothing.
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
    replaced = set(gone)
    if optimizer.state:
        for model in models:
            gone -= model.lay_out_states(optimizer)
    if any(id(parameter) in gone for parameter in optimizer.state):
        raise PrepareError(
            f"{type(optimizer).__name__} has stepped before its model was flattened (use_orig_params=False), and its "
            "state would be lost. Prepare it before its first step, or set use_orig_params=True"
        )
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [p for p in group["params"] if id(p) not in replaced] + fresh.get(number, [])
    check_trains(optimizer, {key for model in models for key in model.names})


def full_model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full state under plain names, on the host of rank 0; empty on the others. Every rank calls it."""
    state = get_model_state_dict(model, options=fsdp_state.full_options(model))
    return fsdp_state.detached(state) if dist.get_rank() == 0 else {}


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
    known = {} if strict else full_model_state(model)
    differing: list[str] = []
    if dist.get_rank() == 0:
        known.update(complete(state, plain.state))
        if strict:
            differing = sorted(set(state) - set(plain.state) | set(plain.state) - set(known))
    others = {name: value for name, value in known.items() if not isinstance(value, torch.Tensor)}
    differing, others = materialize.from_first((differing, others), device)
    if differing:
        raise CheckpointError(f"the state and the model differ in {len(differing)} names: {', '.join(differing[:5])}")
    targets = {
        id(meta): (name, torch.empty(meta.shape, dtype=meta.dtype, device=device))
        for name, meta in reversed(plain.state.items())
        if isinstance(meta, torch.Tensor)
    }
    tensors = {name: value for name, value in known.items() if isinstance(value, torch.Tensor)}
    materialize.spread(tensors, targets.values(), device)
    full = {name: targets[id(meta)][1] for name, meta in plain.state.items() if id(meta) in targets}
    # torch's broadcast_from_rank0 loses the second name of a tied tensor here.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            model.load_state_dict({**full, **others})


class FlatGradients:
    """The gradients on this rank: of flattened units, unsharded where none was reduced yet, and of other parameters.

    Args:
        model: the module, sharded or not.
        usage: which parameters of the units have received a gradient; None if the module has no units.
    """

    def __init__(self, model: nn.Module, usage: ParameterUsage | None) -> None:
        self.usage = usage
        self._units = [] if usage is None else usage.units
        inside = {id(p) for unit in self._units for p in (unit.flat, *unit.originals)}
        self._plain = {name: p for name, p in materialize.named_parameters(model) if id(p) not in inside}

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients by the position of their unit, or by the name of a parameter outside of the units."""
        found: dict[str, Any] = {name: p.grad for name, p in self._plain.items() if p.grad is not None}
        for number, unit in enumerate(self._units):
            if unit.flat.grad is not None:
                found[f"unit {number}"] = {
                    "gradient": unit.flat.grad,
                    "fresh": unit.fresh,
                    "present": unit.present,
                    "unreduced": unit.unreduced,
                }
        return found

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where a gradient has another size than its unit or parameter."""
        for name, parameter in self._plain.items():
            saved = state.get(name)
            if saved is not None and saved.shape != parameter.shape:
                raise _mismatch(name, list(saved.shape), list(parameter.shape))
        for number, unit in enumerate(self._units):
            saved = state.get(f"unit {number}")
            # Before the first forward it is the shard itself.
            shard = getattr(unit.flat, "_local_shard", unit.flat)
            sizes = (unit.flat._unpadded_unsharded_size.numel(), shard.numel())
            if saved is not None and saved["gradient"].numel() not in sizes:
                raise _mismatch(", ".join(unit.names[:3]), saved["gradient"].numel(), " or ".join(map(str, sizes)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all gradients by those of `state_dict`. Raises what `check_state_dict` raises."""
        self.check_state_dict(state)
        for name, parameter in self._plain.items():
            saved = state.get(name)
            parameter.grad = None if saved is None else saved.to(parameter.device, parameter.dtype)
        for number, unit in enumerate(self._units):
            _restore(unit, state.get(f"unit {number}"))


def _restore(unit: FlattenedUnit, saved: Mapping[str, Any] | None) -> None:
    flat, count = unit.flat, len(unit.fresh)
    unit.fresh = [False] * count if saved is None else list(saved["fresh"])
    unit.present = [False] * count if saved is None else list(saved["present"])
    flat.grad = None
    unit.unreduced = False
    if saved is None:
        for parameter in unit.originals:
            parameter.grad = None
        return
    unit.unreduced = saved.get("unreduced", True)
    gradient = saved["gradient"].to(flat.device)
    # An unsharded gradient has another size than the shard: torch's FSDP1 sets it in this way too.
    flat.grad = torch.empty_like(flat)
    flat.grad.data = gradient
    if not unit.keeps_originals:
        return
    handle = unit.handle
    if handle.uses_sharded_strategy and gradient.shape == flat._local_shard.shape:
        handle._use_sharded_grad_views()
    else:
        handle._use_unsharded_grad_views()


def _mismatch(name: str, saved: object, expected: object) -> CheckpointError:
    return CheckpointError(f"the saved gradient of {name} has size {saved}, here it is {expected}")

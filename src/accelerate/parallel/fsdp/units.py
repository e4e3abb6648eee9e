# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are sharded as one: the units of FSDP, chosen by a wrap policy; the parameters of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ...core.errors import PrepareError
from ...core.modules import move_module
from ..materialize import canonical_name

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

Policy = Callable[..., bool]


def select_units(
    model: nn.Module,
    policy: Policy | None,
    ignored: set[nn.Parameter],
    undivided: tuple[type[nn.Module], ...] = (),
) -> list[nn.Module]:
    """The modules that are units of their own, children before parents, without the model itself.

    `policy(module=, recurse=, nonwrapped_numel=)` is called as torch's `auto_wrap_policy`. A unit with a parameter
    that is tied to one outside is dropped: both ends of a tie must be gathered together. A container that computes
    nothing (nn.ParameterDict) is never a unit: its parameters are gathered by what encloses it. There are no units
    inside of modules of the `undivided` classes.
    """
    if policy is None:
        return []
    ignored_ids = {id(parameter) for parameter in ignored}
    units, _ = _descend(model, policy, ignored_ids, True, set(), undivided)
    return _keep_ties_together(model, units, ignored_ids)


def _descend(
    module: nn.Module,
    policy: Policy,
    ignored: set[int],
    is_root: bool,
    seen: set[int],
    undivided: tuple[type[nn.Module], ...],
) -> tuple[list[nn.Module], int]:
    """(units below and at `module`, parameters in them)."""
    numel = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in ignored)
    if id(module) in seen or not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return [], 0
    seen.add(id(module))
    units: list[nn.Module] = []
    wrapped = 0
    for child in () if isinstance(module, undivided) else module.children():
        below, count = _descend(child, policy, ignored, False, seen, undivided)
        units += below
        wrapped += count
    rest = numel - wrapped
    # A unit's parameters are gathered when it is called.
    can_be_called = getattr(module.forward, "__func__", None) is not nn.Module.forward
    is_unit = not is_root and rest > 0 and can_be_called
    if is_unit and policy(module=module, recurse=False, nonwrapped_numel=rest):
        return [*units, module], numel
    return units, wrapped


def _keep_ties_together(model: nn.Module, units: list[nn.Module], ignored: set[int]) -> list[nn.Module]:
    """The units, except the ones that would gather only one end of a tied parameter."""
    while True:
        owners = owning_units(model, units)
        split = next((found for key, found in owners.items() if key not in ignored and len(found) > 1), None)
        if split is None:
            return units
        # The parameter then belongs to what encloses both ends.
        units = [unit for unit in units if id(unit) not in split]


def units_of_rare_dtypes(model: nn.Module, units: list[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Modules that have to be units too, since they train parameters of another dtype than most in their unit.

    FSDP2 reduces the gradients of a unit in one dtype.

    Raises:
        PrepareError: such a module has parameters of several dtypes itself, or has modules inside.
    """
    ignored_ids = {id(parameter) for parameter in ignored}
    owners = owning_units(model, units)
    sizes: dict[int, dict[torch.dtype, int]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in ignored_ids:
            of_unit = sizes.setdefault(min(owners[id(parameter)]), {})
            of_unit[parameter.dtype] = of_unit.get(parameter.dtype, 0) + parameter.numel()
    if all(len(found) == 1 for found in sizes.values()):
        return []
    usual = {unit: max(found, key=found.__getitem__) for unit, found in sizes.items()}
    rare = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in ignored_ids]
        if all(parameter.dtype == usual[min(owners[id(parameter)])] for parameter in own):
            continue
        dtypes = {parameter.dtype for parameter in own}
        trained = dtypes | {usual[min(owners[id(parameter)])] for parameter in own}
        if len(dtypes) > 1 or module is model or next(module.children(), None) is not None:
            raise PrepareError(
                f"FSDP2 shards {name or 'the model'} ({type(module).__name__}) as one unit, which trains parameters "
                f"of several dtypes ({', '.join(sorted(map(str, trained)))}). Give them one dtype, use "
                "mixed_precision, or put the module into ignored_modules"
            )
        rare.append(module)
    kept = {id(unit) for unit in _keep_ties_together(model, [*rare, *units], ignored_ids)}
    return [module for module in rare if id(module) in kept]


def owning_units(model: nn.Module, units: list[nn.Module]) -> dict[int, set[int]]:
    """Parameter id -> ids of the innermost units that hold it (that of the model for the rest)."""
    chosen = {id(unit) for unit in units}
    owners: dict[int, set[int]] = {}

    def visit(module: nn.Module, unit: int) -> None:
        unit = id(module) if id(module) in chosen else unit
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, id(model))
    return owners


def find_modules(model: nn.Module, modules: Iterable[nn.Module] | str | None) -> list[nn.Module]:
    """Modules given directly, or by a regular expression that matches their full names.

    Raises PrepareError where the expression matches none, or a given module is not in the model.
    """
    if modules is None:
        return []
    if isinstance(modules, str):
        pattern = re.compile(modules)
        found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not found:
            raise PrepareError(f"ignored_modules={modules!r} matches the name of no module of {type(model).__name__}")
        return found
    listed = list(modules)
    inside = {id(module) for module in model.modules()}
    for module in listed:
        if id(module) not in inside:
            raise PrepareError(
                f"ignored_modules holds a {type(module).__name__} that is not in {type(model).__name__}"
            )
    return listed


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """The parameters of modules (given as such or by a regular expression over names), moved to `device`."""
    parameters: set[nn.Parameter] = set()
    for module in find_modules(model, modules):
        if not any(parameter.is_meta for parameter in module.parameters()):
            move_module(module, device)
        parameters |= set(module.parameters())
    return parameters


# -- the parameters of units


class FlatUnit(NamedTuple):
    """A unit of FSDP1 with parameters: the handle of its flattened parameter, and the plain names of its members."""

    module: FullyShardedDataParallel
    handle: FlatParamHandle
    names: list[str]


def flat_units(model: nn.Module) -> Iterator[FlatUnit]:
    """The units of FSDP1 in a model that have parameters."""
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and (handle := module._handle) is not None:
            names = [f"{prefix}.{name}" if prefix else name for name in handle.flat_param._fqns]
            yield FlatUnit(module, handle, [canonical_name(name) for name in names])


def groups(state: FSDPState) -> list[FSDPParamGroup]:
    """The groups of parameters that a unit of FSDP2 gathers and reduces at once, from what torch keeps of the unit."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # Before torch 2.12: one group, or None if the unit has no parameters.
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def shard_groups(model: nn.Module) -> Iterator[tuple[FSDPModule, FSDPParamGroup, bool]]:
    """(module, its group of parameters, whether that is resharded between forward and backward) of each FSDP2 unit."""
    root = None
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        root = module if root is None else root
        state = module._get_fsdp_state()
        # torch decides at the first forward that the outermost unit, which the backward needs first, is kept.
        kept = module is root and state._auto_reshard_after_forward
        for group in groups(state):
            yield module, group, bool(group._reshard_after_forward) and not kept


def shards_of(modules: Iterable[nn.Module]) -> list[FSDPParam]:
    """FSDP2's object for each parameter of the units in these modules."""
    return [shard for module in modules for _, group, _ in shard_groups(module) for shard in group.fsdp_params]


def reshard(modules: Iterable[nn.Module]) -> None:
    """Reshard every FSDP2 unit inside of these modules."""
    for module in modules:
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

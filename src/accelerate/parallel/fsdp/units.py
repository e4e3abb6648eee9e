# SPDX-License-Identifier: Apache-2.0
"""What both versions of FSDP read from a plugin and a model: the mixed precision, and the modules sharded as one.

These are the units, chosen by a wrap policy.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...core.errors import PrepareError
from ...core.modules import direct_parameters, move_module, replace_data
from ...core.objects import flat_list
from ...precision.base import Precision
from ..activation import checkpoint_activations
from ..unwrap import named_parameters

Policy = Callable[..., bool]


def fill_policy(plugin: FullyShardedDataParallelPlugin, precision: Precision) -> None:
    """Set the run's mixed-precision policy on a plugin without one."""
    if precision.native_amp and plugin.mixed_precision_policy is None:
        plugin.set_mixed_precision(precision.name)
        plugin.policy_is_filled = True


def keep_unpacked(model: torch.nn.Module) -> None:
    """Have 4-bit layers of bitsandbytes leave their weights as they are.

    On processors with AVX512 a forward without gradients rearranges them in place. Under FSDP it would do so in the
    gathered weights, of which only the note in the layer stays: from the second forward on, outputs would be wrong.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def upcast(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """Under mixed precision convert parameters to fp32: FSDP casts them for the computation."""
    policy = plugin.mixed_precision_policy
    if policy is None or getattr(policy, "param_dtype", None) in (None, torch.float32):
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            replace_data(parameter, parameter.detach().to(torch.float32))


@dataclass
class Units:
    """What FSDP2 gathers as one in a model, children before parents. The outermost unit is the model itself.

    Fields:
        model: the model.
        modules: those that the plugin's policy chooses, and `added`.
        rare: modules with trainable parameters of another dtype than most around them.
        added: modules that compute in a dtype of their own, and that the policy does not choose.
        dtypes: module id -> the dtype of its own that it computes in.
        ignored: the names of the tensors that stay unsharded.
    """

    model: nn.Module
    modules: list[nn.Module]
    rare: list[nn.Module]
    added: list[nn.Module]
    dtypes: dict[int, torch.dtype]
    ignored: set[str]

    def __post_init__(self) -> None:
        """Record the names of the modules."""
        self._names = {id(module): name for name, module in self.model.named_modules()}

    def find_again(self) -> None:
        """Find the units by their names, after tensor parallelism has replaced layers."""
        present = dict(self.model.named_modules())
        for units in (self.modules, self.rare):
            units[:] = [present[self._names[id(module)]] for module in units]

    def recompute(self, device: torch.device, offload: bool) -> None:
        """Recompute the activations of the policy's units in the backward."""
        blocks = [module for module in self.modules if module not in self.added]
        wrapped = checkpoint_activations(self.model, blocks, device, offload)
        for block, wrapper in zip(blocks, wrapped, strict=True):
            self.modules[self.modules.index(block)] = wrapper
            if id(block) in self.dtypes:
                self.dtypes[id(wrapper)] = self.dtypes[id(block)]


def plan_units(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    unsharded: Iterable[nn.Parameter] = (),
    regions: Mapping[nn.Module, torch.dtype] | None = None,
) -> Units:
    """The units of a model by the plugin's policy. Parameters are prepared for `fully_shard`: upcast and contiguous.

    Args:
        model: the model.
        plugin: the policy, modules to ignore, mixed precision.
        unsharded: parameters that stay unsharded, in addition to those of `plugin.ignored_modules`.
        regions: modules that compute in a dtype of their own. They are units too.
    """
    options = copy.copy(plugin)
    options.set_auto_wrap_policy(model)
    ignored = set(unsharded)
    for module in find_modules(model, plugin.ignored_modules):
        ignored.update(module.parameters())
    # `fully_shard` refuses the former, and its reduction of gradients the latter. They stay replicas.
    for parameter in model.parameters():
        if parameter.ndim == 0 or parameter.numel() == 0:
            ignored.add(parameter)
    modules = select_units(model, options.auto_wrap_policy, ignored)  # type: ignore[arg-type]
    modules, added = with_regions(model, modules, ignored, regions or {})
    dtypes = {}
    for region, dtype in (regions or {}).items():
        dtypes.update(dict.fromkeys(map(id, region.modules()), dtype))
    upcast(model, plugin)
    names = set()
    for name, parameter in named_parameters(model):
        if parameter in ignored:
            names.add(name)
        elif not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            # `fully_shard` refuses another layout in memory, as of a transposed weight.
            replace_data(parameter, parameter.detach().contiguous())
    rare = units_of_rare_dtypes(model, modules, ignored)
    return Units(model, modules, rare, added, dtypes, names)


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
    inside modules of the `undivided` classes.
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
    numel = 0
    for parameter in module.parameters():
        if id(parameter) not in ignored:
            numel += parameter.numel()
    if id(module) in seen or not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return [], 0
    seen.add(id(module))
    units: list[nn.Module] = []
    unwrapped = numel
    if not isinstance(module, undivided):
        for child in module.children():
            units_below, wrapped = _descend(child, policy, ignored, False, seen, undivided)
            units += units_below
            unwrapped -= wrapped
    # A unit's parameters are gathered when it is called.
    can_be_called = getattr(module.forward, "__func__", None) is not nn.Module.forward
    is_unit = not is_root and unwrapped > 0 and can_be_called
    if is_unit and policy(module=module, recurse=False, nonwrapped_numel=unwrapped):
        return [*units, module], numel
    return units, numel - unwrapped


def _keep_ties_together(
    model: nn.Module, units: list[nn.Module], ignored: set[int]
) -> list[nn.Module]:
    """The units, except the ones that would gather only one end of a tied parameter."""
    for key, unit_ids in owning_units(model, units).items():
        if key not in ignored and len(unit_ids) > 1:
            # The parameter then belongs to what encloses both ends.
            enclosing = [unit for unit in units if id(unit) not in unit_ids]
            return _keep_ties_together(model, enclosing, ignored)
    return units


def with_regions(
    model: nn.Module,
    units: list[nn.Module],
    ignored: set[nn.Parameter],
    regions: Iterable[nn.Module],
) -> tuple[list[nn.Module], list[nn.Module]]:
    """(the units and the modules that compute in a dtype of their own, children first; those that were not units).

    Raises PrepareError for such a module that shares a parameter with one outside: both are gathered together.
    """
    added = [m for m in regions if m not in units and not ignored.issuperset(m.parameters())]
    if not added:
        return units, []
    chosen = set(_keep_ties_together(model, [*units, *added], set(map(id, ignored))))
    for name, module in model.named_modules():
        if name and module in added and module not in chosen:
            raise PrepareError(
                f"precision_policy: {name} shares a parameter with a module outside it, and FSDP2 "
                "gathers both in one dtype. Remove it from the policy, or untie the parameter"
            )
    # Among modules in the order of the model, children come after their parents.
    return [module for module in reversed(list(model.modules())) if module in chosen], added


def units_of_rare_dtypes(
    model: nn.Module, units: list[nn.Module], ignored: set[nn.Parameter]
) -> list[nn.Module]:
    """Modules that have to be units too, since they train parameters of another dtype than most in their unit.

    FSDP2 reduces the gradients of a unit in one dtype. A module that has parameters of several dtypes itself, or has
    modules inside, cannot be one: torch raises an error in the forward.
    """
    owners = owning_units(model, units)
    sizes: dict[int, Counter[torch.dtype]] = {}
    unit_of: dict[nn.Parameter, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in ignored:
            unit_of[parameter] = min(owners[id(parameter)])
            sizes_of_unit = sizes.setdefault(unit_of[parameter], Counter())
            sizes_of_unit[parameter.dtype] += parameter.numel()
    if all(len(dtypes) == 1 for dtypes in sizes.values()):
        return []
    rare = []
    for module in model.modules():
        dtypes = set()
        usual = set()
        for parameter in direct_parameters(module).values():
            if parameter in unit_of:
                dtypes.add(parameter.dtype)
                [(most, _)] = sizes[unit_of[parameter]].most_common(1)
                usual.add(most)
        if dtypes <= usual:
            continue
        if len(dtypes) == 1 and module is not model and not any(True for _ in module.children()):
            rare.append(module)
    chosen = set(_keep_ties_together(model, [*rare, *units], set(map(id, ignored))))
    return [module for module in rare if module in chosen]


def owning_units(model: nn.Module, units: list[nn.Module]) -> dict[int, set[int]]:
    """Parameter id -> ids of the innermost units that hold it (that of the model for the rest)."""
    chosen = {id(unit) for unit in units}
    owners: dict[int, set[int]] = {}
    # (module, the id of its unit)
    remaining = [(model, id(model))]
    while remaining:
        module, unit = remaining.pop()
        if id(module) in chosen:
            unit = id(module)
        for parameter in direct_parameters(module).values():
            units_of_parameter = owners.setdefault(id(parameter), set())
            units_of_parameter.add(unit)
        remaining += [(child, unit) for child in module.children()]
    return owners


def find_modules(model: nn.Module, modules: Iterable[nn.Module] | str | None) -> list[nn.Module]:
    """Those modules of the model that are given, or that a regular expression matches by their full names."""
    selected: list[nn.Module] = []
    if not modules:
        return selected
    for item in flat_list(modules):
        for name, module in model.named_modules():
            if module is item or (isinstance(item, str) and re.fullmatch(item, name)):
                selected.append(module)
    return selected


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """The parameters of modules (passed as modules or as a regular expression over names), moved to `device`."""
    parameters: set[nn.Parameter] = set()
    for module in find_modules(model, modules):
        if not any(parameter.is_meta for parameter in module.parameters()):
            move_module(module, device)
        parameters |= set(module.parameters())
    return parameters

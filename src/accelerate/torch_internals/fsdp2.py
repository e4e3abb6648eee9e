# SPDX-License-Identifier: Apache-2.0
"""The units of FSDP2: their parameters, sharded and unsharded, and the gradients that wait for a reduction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule

from . import Internal

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

UNITS = Internal(
    name="fsdp2_units",
    what="FSDPModule._get_fsdp_state, and the FSDPParamGroup and FSDPParam objects that it leads to",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="save_state within an accumulation window; master weights; Accelerator.explain; models that are sharded "
    "before prepare",
    without="units count as plain modules: what was accumulated before save_state is lost, master weights do not "
    "reach the units, and explain reports no messages",
    test="tests/torch_internals/test_fsdp.py::test_parameters_of_units",
)


def shard_groups(model: nn.Module) -> Iterator[tuple[FSDPModule, FSDPParamGroup, bool]]:
    """(module, its group of parameters, whether that is resharded between forward and backward) of each FSDP2 unit.

    The parameters of a group are gathered and reduced at once.
    """
    root = None
    for module in model.modules() if UNITS.is_on else ():
        if not isinstance(module, FSDPModule):
            continue
        root = module if root is None else root
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            groups = list(state._fsdp_param_groups)
        else:
            # Before torch 2.12: one group, or None if the unit has no parameters.
            if state._fsdp_param_group:
                groups = [state._fsdp_param_group]
            else:
                groups = []
        # torch decides at the first forward that the outermost unit, which the backward needs first, is kept.
        is_kept = module is root and state._auto_reshard_after_forward
        for group in groups:
            yield module, group, bool(group._reshard_after_forward) and not is_kept


def shards_of(modules: Iterable[nn.Module]) -> list[FSDPParam]:
    """FSDP2's object for each parameter of the units in these modules."""
    shards: list[FSDPParam] = []
    for module in modules:
        for _, group, _ in shard_groups(module):
            shards += group.fsdp_params
    return shards


def group_parameters(group: FSDPParamGroup) -> list[FSDPParam]:
    """FSDP2's object for each parameter that is gathered with the others of a group."""
    return group.fsdp_params


def reduces_gradients(model: nn.Module) -> bool:
    """Whether backwards reduce the gradients of all units: not after `set_requires_gradient_sync(False)`."""
    return all(group.reduce_grads for _, group, _ in shard_groups(model))


def sharded_parameter(shard: FSDPParam) -> nn.Parameter:
    """The DTensor that an optimizer steps, also while the module has an unsharded parameter."""
    return shard.sharded_param


def read_again(shard: FSDPParam) -> None:
    """Make FSDP2 use the parameter that the module has now."""
    shard.reset_sharded_param()


def module_parameter(shard: FSDPParam) -> nn.Parameter:
    """The parameter in the module: FSDP2 notices only at the first forward that it was replaced."""
    parameter: nn.Parameter = getattr(shard._module_info.module, shard._module_info.param_name)
    return parameter


def unsharded_parameter(shard: FSDPParam) -> nn.Parameter | None:
    """The parameter that the module has while it computes; None before it was gathered for the first time."""
    return getattr(shard, "_unsharded_param", None)


def waiting_gradients(shard: FSDPParam) -> list[tuple[object, str]]:
    """Where gradients wait for a reduction: the unsharded parameter, and their sum in another dtype.

    Returns:
        (object, its attribute), which may be None.
    """
    unsharded = unsharded_parameter(shard)
    if unsharded is None:
        return []
    return [(unsharded, "grad"), (shard, "unsharded_accumulated_grad")]


@contextlib.contextmanager
def replaceable(shards: Iterable[FSDPParam]) -> Iterator[None]:
    """A block in which FSDP2 does not notice that parameters are replaced.

    torch 2.13 reads the modules' parameters again after each `load_state_dict`, and at the first all-gather.
    """
    listed = list(shards)
    for shard in listed:
        vars(shard)["reset_sharded_param"] = lambda: None
    try:
        yield
    finally:
        for shard in listed:
            del vars(shard)["reset_sharded_param"]

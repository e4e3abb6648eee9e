# SPDX-License-Identifier: Apache-2.0
"""The flattened parameters of torch's older FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from . import Internal

FLAT_PARAMETERS = Internal(
    name="fsdp1_flat_parameters",
    what="FullyShardedDataParallel._handle, and the names and members of its flattened parameter",
    versions="2.11 to 2.14",
    upstream="not reported; torch deprecates FSDP1",
    needed_by="saving, loading, clipping and track_average with fsdp_version=1, the API's default",
    without="an optimizer of a model with use_orig_params=False would not train anything, and "
    "its state cannot be saved",
    test="tests/torch_internals/test_fsdp.py::test_names_of_a_flattened_parameter",
)
MISSING_STATE = Internal(
    name="fsdp1_missing_state",
    what="FSDP1 expects the optimizer to have a state of every trained parameter of a unit when it is saved",
    versions="2.11 to 2.14",
    upstream="not reported; torch deprecates FSDP1",
    needed_by="save_state with fsdp_version=1, where some parameters have no gradients yet, as unused ones",
    without="RuntimeError: ... is not in the optimizer state, in save_state",
    test="tests/torch_internals/test_fsdp.py::test_parameters_without_a_state",
)


class FlatUnit(NamedTuple):
    """A unit of FSDP1 with parameters.

    Fields:
        module: the unit.
        flat: its flattened parameter.
        names: the names of the members of the flattened parameter, as the wrapped model has them.
        members: the parameters as an optimizer has them: the original ones, or the flattened one.
        keeps_originals: whether these are the original ones (`use_orig_params`).
        is_sharded: whether each rank has a shard.
        handle: torch's object that gathers and reshards it.
    """

    module: FullyShardedDataParallel
    flat: nn.Parameter
    names: list[str]
    members: list[nn.Parameter]
    keeps_originals: bool
    is_sharded: bool
    handle: Any


def flat_units(model: nn.Module) -> Iterator[FlatUnit]:
    """The units of FSDP1 in a model that have parameters."""
    for prefix, module in model.named_modules() if FLAT_PARAMETERS.is_on else ():
        if isinstance(module, FullyShardedDataParallel) and (handle := module._handle) is not None:
            flat, keeps = handle.flat_param, bool(handle._use_orig_params)
            names = [f"{prefix}.{name}" if prefix else name for name in flat._fqns]
            members: list[nn.Parameter] = list(flat._params or ()) if keeps else [flat]
            yield FlatUnit(
                module, flat, names, members, keeps, bool(handle.uses_sharded_strategy), handle
            )


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward has left gathered: it would hide what is written to the shards."""
    if isinstance(model, FullyShardedDataParallel):
        # Before the first forward it makes the handles complete.
        model.check_is_root()
    for unit in flat_units(model):
        if unit.is_sharded and not unit.handle.needs_unshard():
            unit.handle.reshard(True)


@contextlib.contextmanager
def ignoring(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which FSDP1 expects no state of these trained parameters."""
    ignored = list(parameters) if MISSING_STATE.is_on else []
    for parameter in ignored:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in ignored:
            parameter.requires_grad_(True)

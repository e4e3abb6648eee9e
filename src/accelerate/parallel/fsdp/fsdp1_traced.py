# SPDX-License-Identifier: Apache-2.0
"""A copy of an FSDP1 model on fake tensors, to trace what its step needs: sharded in the same way, or with changes.

It is made at any moment of a step, from the names and shapes that the handles of flat parameters have. The model
itself stays as it is, and no rank sends anything.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from ..prepared import Change
from ..report.ledger import fake_tensors

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

# Strategies that keep units unsharded after their forward -> the ones that reshard them.
_RESHARDING: dict[ShardingStrategy, ShardingStrategy] = {
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy.FULL_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.HYBRID_SHARD,
}


def changes(model: nn.Module, on_host: bool) -> dict[Change, str]:
    """The changes of units that a trace can try, with what they are called; `on_host`: shards are there anyway."""
    found: dict[Change, str] = {}
    if any(unit.sharding_strategy in _RESHARDING for unit in _units(model)):
        found[Change(reshard=True)] = "sharding_strategy FULL_SHARD (of replicas HYBRID_SHARD)"
    found[Change(reduce=True)] = "GradientAccumulationPlugin(sync_each_batch=True)"
    if not on_host and not offloads(model):
        found[Change(offload=True)] = "keep the shards in host memory (fsdp_offload_params)"
    return found


def offloads(model: nn.Module) -> bool:
    """Whether shards are on the host between their uses."""
    return any(unit.cpu_offload.offload_params for unit in _units(model))


def fake_sharded_copy(model: nn.Module, change: Change) -> nn.Module:
    """The copy, with the change. Call it in a fake mode."""
    memo: dict[int, Any] = {}
    units = _units(model)
    places = {id(unit): _places(unit._handle, memo) for unit in units if unit._handle is not None}
    fake_tensors(model, memo)
    wrapped = model
    # Children first, as the model was sharded.
    for unit in reversed(units):
        module = copy.deepcopy(unit._fsdp_wrapped_module, memo)
        for own, name, full in places.get(id(unit), ()):
            copied = memo[id(own)]
            vars(copied).pop(name, None)
            copied._parameters.pop("_flat_param", None)
            copied._parameters[name] = full
        if change.checkpointing and unit is not model:
            module = checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        wrapped = memo[id(unit)] = _shard(unit, module, change, memo)
    return wrapped


@contextlib.contextmanager
def storage_addresses() -> Iterator[None]:
    """A block in which storages without memory have different addresses, as torch's FSDP1 compares them."""

    def of_storage(storage: torch.UntypedStorage) -> int:
        return storage._cdata if storage.nbytes() else 0

    def of_tensor(tensor: torch.Tensor) -> int:
        return of_storage(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    storages = mock.patch.object(torch.UntypedStorage, "data_ptr", of_storage)
    with storages, mock.patch.object(FakeTensor, "data_ptr", of_tensor):
        yield


def _shard(unit: Any, module: nn.Module, change: Change, memo: dict[int, Any]) -> FullyShardedDataParallel:
    strategy: ShardingStrategy = unit.sharding_strategy
    groups = unit.process_group
    if strategy.name.lstrip("_").startswith("HYBRID_SHARD"):
        groups = (groups, unit._inter_node_pg)
    ignored = [memo[id(parameter)] for parameter in unit._ignored_params if id(parameter) in memo]
    return FullyShardedDataParallel(
        module,
        process_group=groups,
        sharding_strategy=_RESHARDING.get(strategy, strategy) if change.reshard else strategy,
        backward_prefetch=unit.backward_prefetch,
        mixed_precision=unit.mixed_precision,
        ignored_states=ignored,
        device_id=torch.device("cpu"),
        forward_prefetch=unit.forward_prefetch,
        limit_all_gathers=unit.limit_all_gathers,
        use_orig_params=unit._use_orig_params,
    )


def _units(model: nn.Module) -> list[Any]:
    """The units, the outermost first."""
    return list(FullyShardedDataParallel.fsdp_modules(model))


def _places(handle: FlatParamHandle, memo: dict[int, Any]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name, full parameter of the copy) of each parameter in a flat one.

    `memo` has the parameter for each tensor that a module may have instead of it now.
    """
    flat = handle.flat_param
    memo[id(flat)] = None
    fulls: dict[tuple[int, str], nn.Parameter] = {}
    found = []
    for number, info in enumerate(flat._param_infos):
        trains = flat._params[number].requires_grad if flat._params is not None else flat.requires_grad
        value = torch.empty(flat._shapes[number], dtype=handle._orig_param_dtype, device="cpu")
        fulls[id(info.module), info.param_name] = nn.Parameter(value, requires_grad=trains)
        found.append((info.module, info.param_name, fulls[id(info.module), info.param_name]))
    for shared in flat._shared_param_infos:
        found.append((shared.module, shared.param_name, fulls[id(shared.prim_module), shared.prim_param_name]))
    for module, name, full in found:
        memo[id(getattr(module, name, full))] = full
    for present in [*(flat._params or ()), *(flat._shared_params or ())]:
        memo.setdefault(id(present), None)
    return found

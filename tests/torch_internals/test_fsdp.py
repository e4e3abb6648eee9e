# SPDX-License-Identifier: Apache-2.0
"""Parameters of FSDP's units, and DTensors, on one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from accelerate.torch_internals import dtensor, fsdp1, fsdp2
from accelerate.torch_internals.module_copies import unsharded_copy


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    mesh = init_device_mesh("cpu", (1,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    return model


def test_parameters_of_units() -> None:
    model = sharded()
    groups = [(module, len(group.fsdp_params)) for module, group, _ in fsdp2.shard_groups(model)]
    assert sorted(count for _, count in groups) == [1, 2]
    shards = fsdp2.shards_of([model])
    assert {id(fsdp2.module_parameter(shard)) for shard in shards} == {
        id(p) for p in model.parameters()
    }
    assert all(fsdp2.unsharded_parameter(shard) is None for shard in shards)
    model(torch.ones(1, 2))
    assert all(not isinstance(fsdp2.unsharded_parameter(shard), DTensor | None) for shard in shards)
    with fsdp2.replaceable(shards):
        model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("keeps", [False, True])
def test_names_of_a_flattened_parameter(keeps: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            nn.Linear(2, 3), use_orig_params=keeps, device_id=torch.device("cpu")
        )
    (unit,) = fsdp1.flat_units(model)
    assert unit.keeps_originals is keeps and unit.names == ["weight", "bias"]
    assert set(map(id, unit.members)) == set(map(id, model.parameters()))


def test_parameters_without_a_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        first, *others = model.parameters()
        optimizer = torch.optim.Adam([first, *others])
        first.grad = torch.ones_like(first)
        optimizer.step()
        options = StateDictOptions(full_state_dict=True)
        with fsdp1.ignoring(others):
            state = get_optimizer_state_dict(model, optimizer, options=options)
    assert list(state["state"]) == ["0.weight"] and others[0].requires_grad


def test_a_shard_stays_where_it_is() -> None:
    mesh = init_device_mesh("meta", (1,))
    like = DTensor.from_local(torch.empty(4, 2, device="meta"), mesh, [Shard(0)], run_check=False)
    assert dtensor.as_dtensor(torch.ones(4, 2), like).to_local().device.type == "cpu"


def test_packed_shards() -> None:
    mesh = init_device_mesh("cpu", (1,))
    block, pieces = (
        DTensor.from_local(torch.ones(4, 2), mesh, [placement], run_check=False)
        for placement in (Shard(0), _StridedShard(0, split_factor=2))
    )
    assert not dtensor.is_packed(block) and dtensor.is_packed(pieces)


def test_a_copy_has_its_own_tensors() -> None:
    model = sharded()
    copied = unsharded_copy(model, torch.device("cpu"))
    assert type(copied) is nn.Sequential and type(copied[0]) is nn.Linear and copied[1].bias is None
    assert torch.equal(copied[0].weight, model[0].weight.full_tensor())
    copied[0].reset_parameters()
    assert not torch.equal(copied[0].weight, model[0].weight.full_tensor())

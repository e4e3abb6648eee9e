# SPDX-License-Identifier: Apache-2.0
"""Optimizers of DTensors that step on unsharded copies: plain torch's values, and DTensors for whoever looks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accelerate.parallel.unsharded_step import step_unsharded

SHAPES = [(6, 4), (3, 5)]
KINDS = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.05, foreach=True),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """Split ones, and a plain one beside them."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [*SHAPES, (2, 2)]]
    if mesh is not None:
        values[:2] = [DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for value in values[:2]]
    return [nn.Parameter(value) for value in values]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def closure_of(optimizer: Any, parameters: list[nn.Parameter], number: int) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        # What the loss is taken of must be what the model has.
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
        loss = sum((whole(p) - 0.1 * (number + 1)).pow(4).sum() for p in parameters)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_plain_torch(name: str, mesh: DeviceMesh) -> None:
    both = [(KINDS[name](parameters), parameters) for parameters in (make(mesh), make(None))]
    own, plain = both[0][0], both[1][0]
    before = torch.optim.lr_scheduler.StepLR(own, 2)
    step_unsharded(own)
    step_unsharded(own)
    after = torch.optim.lr_scheduler.StepLR(own, 3)
    for number in range(4):
        for optimizer, parameters in both:
            closure = closure_of(optimizer, parameters, number)
            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    for mine, theirs in zip(both[0][1], both[1][1], strict=True):
        assert torch.equal(whole(mine), theirs)
        assert own.state[mine].keys() == plain.state[theirs].keys()
        for key, value in own.state[mine].items():
            if isinstance(value, torch.Tensor):
                assert isinstance(value, DTensor) is (isinstance(mine, DTensor) and value.shape == mine.shape), key
                assert torch.equal(whole(value), plain.state[theirs][key]), key
    assert len(own.state) == len(plain.state)
    before.step()
    after.step()


def test_hooks_see_the_parameters_and_an_error_leaves_them_in_place(mesh: DeviceMesh) -> None:
    parameters = make(mesh)
    own = torch.optim.Muon(parameters)
    step_unsharded(own)
    seen: list[list[int]] = []
    own.register_step_pre_hook(lambda one, *_: seen.append(list(map(id, one.param_groups[0]["params"]))))
    own.register_step_post_hook(lambda one, *_: seen.append(list(map(id, one.param_groups[0]["params"]))))
    closure_of(own, parameters, 0)()
    own.step()
    assert seen == [[id(parameter) for parameter in parameters]] * 2
    own.param_groups[0]["momentum"] = None
    with pytest.raises(TypeError):
        own.step()
    assert all(a is b for a, b in zip(own.param_groups[0]["params"], parameters, strict=True))
    assert {id(key) for key in own.state} == {id(parameter) for parameter in parameters}
    assert all(isinstance(own.state[parameter]["momentum_buffer"], DTensor) for parameter in parameters[:2])


def test_nothing_is_kept(mesh: DeviceMesh) -> None:
    optimizer = torch.optim.Adafactor(make(mesh))
    step_unsharded(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None

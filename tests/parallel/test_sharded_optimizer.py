# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers of DTensors, on local and unsharded tensors: the values of plain torch, DTensors outside."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from accelerate.parallel.optimizer_step import ELEMENTWISE
from accelerate.parallel.sharded_optimizer import lay_out_step, step_locally, step_unsharded

SHAPES = [(6, 4), (5,), ()]
KINDS = sorted(ELEMENTWISE, key=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """A split one, a whole one, a number; and a plain one beside them."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    plain = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
    if mesh is None:
        return [*(nn.Parameter(value) for value in values), plain]
    places = [(Shard(0),), (Replicate(),), (Replicate(),)]
    laid_out = (
        DTensor.from_local(v, mesh, place, run_check=False)
        for v, place in zip(values, places, strict=True)
    )
    return [*(nn.Parameter(tensor) for tensor in laid_out), plain]


def give_gradients(parameters: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if isinstance(parameter, DTensor):
            value = DTensor.from_local(
                value, parameter.device_mesh, parameter.placements, run_check=False
            )
        parameter.grad = value


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(own: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(
        own.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(whole(mine), theirs, rtol=0, atol=0)
        assert own.state[mine].keys() == plain.state[theirs].keys()
        for name, value in own.state[mine].items():
            if isinstance(value, torch.Tensor):
                is_number = name in ("step", "mu", "eta", "mu_product")
                assert isinstance(value, DTensor) is (
                    isinstance(mine, DTensor) and not is_number
                ), name
                torch.testing.assert_close(whole(value), plain.state[theirs][name], rtol=0, atol=0)
    assert len(own.state) == len(plain.state)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_values_are_those_of_plain_torch(kind: type, mesh: DeviceMesh) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    own, plain = (kind(make(where), lr=0.01, **options) for where in (mesh, None))
    before = torch.optim.lr_scheduler.StepLR(own, 2)
    step_locally(own)
    step_locally(own)
    after = torch.optim.lr_scheduler.StepLR(own, 3)
    for number in range(5):
        for optimizer in (own, plain):
            give_gradients(optimizer.param_groups[0]["params"], number)
            optimizer.step()
        assert_same(own, plain)
        if number == 2:
            # A state that is loaded takes the place of the one before.
            for optimizer in (own, plain):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before.step(), after.step()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_values_with_hooks_and_closures_are_those_of_plain_torch(
    kind: type, mesh: DeviceMesh
) -> None:
    own, plain = (kind(make(where), lr=0.01, foreach=True) for where in (mesh, None))
    step_locally(own)
    calls = []
    own.register_step_pre_hook(lambda *_: calls.append("before"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("after"))
    for number in range(3):
        for optimizer in (own, plain):

            def closure(optimizer: torch.optim.Optimizer = optimizer, number: int = number) -> int:
                assert torch.is_grad_enabled()
                give_gradients(optimizer.param_groups[0]["params"], number)
                return number

            assert optimizer.step(closure) == number
        assert_same(own, plain)
    everywhere.remove()
    assert calls == ["before", "after", "after"] * 3


def test_hooks_and_closures_see_the_parameters_that_they_know(mesh: DeviceMesh) -> None:
    own = torch.optim.AdamW(make(mesh))
    step_locally(own)
    parameters, seen = own.param_groups[0]["params"], []
    give_gradients(parameters, 0)

    def closure() -> float:
        seen.append([id(parameter) for parameter in own.param_groups[0]["params"]])
        return 2.0

    assert own.step(closure) == 2.0
    hook = own.register_step_pre_hook(lambda *_: closure() and None)
    own.step()
    hook.remove()
    own.step()
    assert seen == [[id(parameter) for parameter in parameters]] * 2


def test_a_step_that_raises_leaves_everything_in_its_place(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.optim.AdamW(make(mesh))
    step_locally(own)
    parameters = list(own.param_groups[0]["params"])
    give_gradients(parameters, 0)
    own.step()
    held = [list(map(id, own.state[parameter].values())) for parameter in parameters]
    own.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        own.step()
    assert all(a is b for a, b in zip(own.param_groups[0]["params"], parameters, strict=True))
    assert len(own.state) == len(parameters)
    assert [list(map(id, own.state[parameter].values())) for parameter in parameters] == held


WHOLE = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.05, foreach=True),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
}


def matrices(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """Split ones, and a plain one beside them."""
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [(6, 4), (3, 5), (2, 2)]
    ]
    if mesh is not None:
        values[:2] = [
            DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for value in values[:2]
        ]
    return [nn.Parameter(value) for value in values]


def closure_of(optimizer: Any, parameters: list[nn.Parameter], number: int) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        # What the loss is taken of must be what the model has.
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
        loss = sum((whole(p) - 0.1 * (number + 1)).pow(4).sum() for p in parameters)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("name", WHOLE)
def test_values_of_unsharded_steps_are_those_of_plain_torch(name: str, mesh: DeviceMesh) -> None:
    both = [
        (WHOLE[name](parameters), parameters) for parameters in (matrices(mesh), matrices(None))
    ]
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
                assert isinstance(value, DTensor) is (
                    isinstance(mine, DTensor) and value.shape == mine.shape
                ), key
                assert torch.equal(whole(value), plain.state[theirs][key]), key
    assert len(own.state) == len(plain.state)
    before.step()
    after.step()


def test_hooks_see_the_parameters_and_an_error_leaves_them_in_place(mesh: DeviceMesh) -> None:
    parameters = matrices(mesh)
    own = torch.optim.Muon(parameters)
    step_unsharded(own)
    seen: list[list[int]] = []
    own.register_step_pre_hook(
        lambda one, *_: seen.append(list(map(id, one.param_groups[0]["params"])))
    )
    own.register_step_post_hook(
        lambda one, *_: seen.append(list(map(id, one.param_groups[0]["params"])))
    )
    closure_of(own, parameters, 0)()
    own.step()
    assert seen == [[id(parameter) for parameter in parameters]] * 2
    own.param_groups[0]["momentum"] = None
    with pytest.raises(TypeError):
        own.step()
    assert all(a is b for a, b in zip(own.param_groups[0]["params"], parameters, strict=True))
    assert {id(key) for key in own.state} == {id(parameter) for parameter in parameters}
    assert all(
        isinstance(own.state[parameter]["momentum_buffer"], DTensor) for parameter in parameters[:2]
    )


def test_only_unknown_optimizers_warn_and_nothing_is_kept(mesh: DeviceMesh) -> None:
    class Unknown(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    for kind, warned in (
        (torch.optim.AdamW, False),
        (torch.optim.Adafactor, False),
        (Unknown, True),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = kind(make(mesh))
            lay_out_step(optimizer)
        assert any("gathers entire parameters" in str(item.message) for item in caught) is warned
        assert "step" in optimizer.__dict__
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None

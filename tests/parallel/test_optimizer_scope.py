# SPDX-License-Identifier: Apache-2.0
"""What an optimizer's step looks at, found by a trial that leaves the optimizer and the random state alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.parallel.optimizer_scope import Scope, find_scope, refuse_flat_shards, refuse_model_scope


class Own(torch.optim.Optimizer):
    """A user's own, without knowledge of its parameters beyond `change`."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.01, **options})
        self.count = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count[0] += 1
        listed = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, listed), alpha=group["lr"])

    def change(self, p: torch.Tensor, listed: list[Any]) -> torch.Tensor:
        state = self.state[p]
        state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        return torch.sign(state["mean"])


class ByNorm(Own):
    def change(self, p: torch.Tensor, listed: list[Any]) -> torch.Tensor:
        return p.grad * p.norm()


class ByShape(Own):
    def change(self, p: torch.Tensor, listed: list[Any]) -> torch.Tensor:
        return p.grad / p.shape[0] if p.ndim == 2 else p.grad


class ByRows(Own):
    def change(self, p: torch.Tensor, listed: list[Any]) -> torch.Tensor:
        return p.grad - p.grad.mean(dim=1, keepdim=True)


class ByAll(Own):
    def change(self, p: torch.Tensor, listed: list[Any]) -> torch.Tensor:
        return p.grad * sum((q.grad * q).sum() for q in listed)


class OfDevices(Own):
    def change(self, p: torch.Tensor, listed: list[Any]) -> torch.Tensor:
        raise NotImplementedError("needs a device that is not here")


class Renamed(torch.optim.AdamW):
    pass


class RenamedMuon(torch.optim.Muon):
    pass


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3, 4))]


@pytest.mark.parametrize(
    ("kind", "scope"),
    [
        (torch.optim.SGD, Scope.ELEMENT),
        (Renamed, Scope.ELEMENT),
        (Own, Scope.ELEMENT),
        (torch.optim.Adafactor, Scope.PARAMETER),
        (torch.optim.Muon, Scope.PARAMETER),
        (RenamedMuon, Scope.PARAMETER),
        (ByNorm, Scope.PARAMETER),
        (ByShape, Scope.PARAMETER),
        (ByRows, Scope.PARAMETER),
        (torch.optim.LBFGS, Scope.MODEL),
        (ByAll, Scope.MODEL),
        (OfDevices, Scope.UNKNOWN),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_scope(kind: Any, scope: Scope) -> None:
    torch.manual_seed(0)
    parameters = matrices()
    optimizer = kind(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before, random = [p.detach().clone() for p in parameters], torch.get_rng_state()
    held = {name: value for name, value in vars(optimizer).items() if name != "state"}
    assert find_scope(optimizer) is scope
    assert all(torch.equal(p, value) and p.grad is None for p, value in zip(parameters, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state and not calls and getattr(optimizer, "count", [0]) == [0]
    assert all(vars(optimizer)[name] is value for name, value in held.items())


def test_refusals_name_the_optimizer_and_the_remedy() -> None:
    with pytest.raises(PrepareError, match=r"ByNorm needs entire tensors.*FSDP1.*Set fsdp_version=2, or"):
        refuse_flat_shards(ByNorm(matrices()), "FSDP1", "set fsdp_version=2")
    with pytest.raises(PrepareError, match=r"ByAll combines values of all its parameters.*pp_size.*use another"):
        refuse_model_scope(ByAll(matrices()), "pp_size", "use another")
    refuse_model_scope(ByNorm(matrices()), "pp_size", "use another")
    with pytest.warns(UserWarning, match="OfDevices: a trial step did not show"):
        refuse_flat_shards(OfDevices(matrices()), "FSDP1", "set fsdp_version=2")
    informed = ByNorm(matrices())
    informed.supports_sharded_parameters = True  # type: ignore[attr-defined]
    refuse_flat_shards(informed, "FSDP1", "set fsdp_version=2")

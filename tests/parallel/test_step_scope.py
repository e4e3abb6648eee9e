# SPDX-License-Identifier: Apache-2.0
"""Optimizers that combine values of several parameters, on ranks that have only some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.parallel.step_scope import watch_first_step


class Sharpness(torch.optim.SGD):
    """As SAM: by a closure, or by two methods."""

    @torch.no_grad()
    def first_step(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)

    def second_step(self) -> None:
        super().step()

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        self.first_step()
        self.second_step()


class Distance(torch.optim.SGD):
    """As Prodigy: numbers of its groups are sums over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["distance"] = sum(p.grad.abs().sum().item() for p in group["params"])
        super().step()


class LayerWise(torch.optim.SGD):
    """As LAMB: norms of single parameters, computed together; its closure combines parameters, as a model does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        parameters = self.param_groups[0]["params"]
        gradients = [p.grad for p in parameters]
        ratios = torch.stack(torch._foreach_norm(parameters)).clamp(max=10).sqrt()
        torch._foreach_mul_(gradients, list(ratios.unbind()))
        for parameter, ratio in zip(parameters, ratios.split(1), strict=True):
            parameter.sub_(parameter.grad * ratio)


def first_step(kind: Any, call: Callable[[Any, Callable[[], object]], object]) -> list[Any]:
    """The first steps on two ranks; what is exchanged."""
    messages: list[Any] = []

    def exchange(message: object) -> list[Any]:
        messages.append(message)
        return list(messages)

    for seed in range(2):
        torch.manual_seed(seed)
        parameters = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))]
        optimizer = kind(parameters, lr=0.1)
        watch_first_step(optimizer, "pp_size", exchange)

        def closure(parameters: Any = parameters) -> None:
            (parameters[0] @ parameters[1]).sum().backward()

        closure()
        call(optimizer, closure)
        call(optimizer, closure)
    return messages


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Sharpness, lambda optimizer, closure: optimizer.step(closure)),
        (Sharpness, lambda optimizer, closure: optimizer.first_step()),
        (Distance, lambda optimizer, closure: optimizer.step()),
    ],
)
def test_combined_parameters_are_an_error_of_the_first_step(kind: Any, call: Any) -> None:
    with pytest.raises(PrepareError, match=rf"{kind.__name__}.*pp_size.*supports_sharded_param"):
        first_step(kind, call)


def test_each_parameter_by_itself() -> None:
    messages = first_step(LayerWise, lambda optimizer, closure: optimizer.step(closure))
    # Of two steps the first.
    assert len(messages) == 2

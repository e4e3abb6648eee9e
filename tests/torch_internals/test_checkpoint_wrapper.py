# SPDX-License-Identifier: Apache-2.0
"""Modules whose activations are recomputed."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.parallel.activation import checkpoint_activations


class Block(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x).tanh()


def test_activations_are_recomputed_under_the_same_names() -> None:
    model = nn.Sequential(Block(2, 2), nn.Linear(2, 1))
    names, block = list(model.state_dict()), model[0]
    checkpoint_activations(model, [block], torch.device("cpu"))
    assert list(model.state_dict()) == names
    model(torch.randn(3, 2)).sum().backward()
    assert block.calls == 2 and block.weight.grad is not None

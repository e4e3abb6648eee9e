# SPDX-License-Identifier: Apache-2.0
"""What an optimizer's step looks at, by its class or by its own word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.parallel.optimizer_step import (
    Scope,
    check_flat_shards,
    find_scope,
    refuse_model_scope,
)


class Renamed(torch.optim.AdamW):
    pass


class RenamedMuon(torch.optim.Muon):
    pass


class Own(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


class Declared(Own):
    supports_sharded_parameters = True


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3, 4))]


@pytest.mark.parametrize(
    ("kind", "scope"),
    [
        (torch.optim.SGD, Scope.ELEMENT),
        (Renamed, Scope.ELEMENT),
        (Declared, Scope.ELEMENT),
        (torch.optim.Adafactor, Scope.PARAMETER),
        (RenamedMuon, Scope.PARAMETER),
        (torch.optim.LBFGS, Scope.MODEL),
        (Own, Scope.UNKNOWN),
    ],
)
def test_scope(kind: Any, scope: Scope) -> None:
    optimizer = kind(matrices())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert find_scope(optimizer) is scope


def test_refusals_name_the_optimizer_and_the_remedy() -> None:
    for check in (check_flat_shards, refuse_model_scope):
        with pytest.raises(PrepareError, match=r"LBFGS .*pp_size.*use another"):
            check(torch.optim.LBFGS(matrices()), "pp_size", "use another")
    for optimizer in (torch.optim.Muon(matrices()), torch.optim.Adafactor(matrices())):
        with pytest.warns(UserWarning, match=f"{type(optimizer).__name__} .*FSDP1.*fsdp_version=2"):
            check_flat_shards(optimizer, "FSDP1", "set fsdp_version=2")
    refuse_model_scope(torch.optim.Muon(matrices()), "pp_size", "use another")
    with pytest.warns(UserWarning, match=r"Own.*supports_sharded_parameters"):
        check_flat_shards(Own(matrices()), "FSDP1", "set fsdp_version=2")

# SPDX-License-Identifier: Apache-2.0
"""Gathered parameters: DeepSpeed's own context for parameters that it shards, nothing for any others."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.parallel.deepspeed.state import GatheredParameters


def test_plain_parameters_are_whole_already() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with (
        GatheredParameters(parameter, modifier_rank=0),
        GatheredParameters([parameter]),
        GatheredParameters([]),
    ):
        parameter.data.fill_(3)
    assert parameter.tolist() == [3, 3]


def test_sharded_parameters_go_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @contextlib.contextmanager
    def gathered(params: list[torch.Tensor], modifier_rank: int | None, fwd_module: Any) -> Any:
        calls.append((params, modifier_rank, fwd_module))
        yield

    package = ModuleType("deepspeed")
    package.zero = SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    sharded, plain = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    sharded.ds_id = 7
    with GatheredParameters((sharded, plain), modifier_rank=0):
        pass
    with GatheredParameters([sharded], enabled=False):
        pass
    assert len(calls) == 1 and calls[0][0] == [sharded, plain] and calls[0][1:] == (0, None)

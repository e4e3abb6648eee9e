# SPDX-License-Identifier: Apache-2.0
"""Memory of parameters, and writes to it."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.torch_internals.tensor_memory import is_parameter_memory, version_of


def test_views_of_parameters() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    assert is_parameter_memory(parameter)
    assert not is_parameter_memory(parameter * 2)
    assert is_parameter_memory(parameter.t())


def test_writes_in_place_are_counted() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) > before

# SPDX-License-Identifier: Apache-2.0
"""Buffers that a state dict does not have."""

from torch import nn, ones

from accelerate.torch_internals.buffers import non_persistent


def test_buffers_outside_of_the_state_dict() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("mask", ones(2), persistent=False)
    assert non_persistent(module) == {"mask"} and "mask" not in module.state_dict()

# SPDX-License-Identifier: Apache-2.0
"""Tensors without values, and the operations on them."""

import torch
from torch import nn

from accelerate.torch_internals import tracing


class Operations(tracing.OperationMode):
    def __init__(self):
        super().__init__(fake=True)
        self.flops = []

    def ran(self, operation, args, kwargs, out, inputs, outputs):
        if (count := tracing.flops(operation, args, kwargs, out)) is not None:
            self.flops.append(count)


def test_a_step_on_tensors_without_values():
    values, mode = torch.ones(3), Operations()
    with tracing.fake_mode(), mode:
        query, key = (torch.empty(2, heads, 8, 16, requires_grad=True) for heads in (4, 2))
        out = nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        assert tracing.is_fake(out) and out.shape == query.shape
        out.sum().backward()
        # A tensor that was there before keeps its values.
        assert values.sum().tolist() == 3
    # Two products in the forward, five in the backward.
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert mode.flops == [2 * product, 5 * product]

# SPDX-License-Identifier: Apache-2.0
"""A function in the place of torch's attention, wherever it is looked up."""

import sys
import types

import torch
import torch.nn.functional as F

from accelerate.torch_internals.attention import (
    PUBLIC_NAME,
    names_of_attention,
    plain_attention,
    public_attention,
    replaced_attention,
)


def own_attention(*args, **kwargs):
    return "own"


def test_names_of_a_models_sources_are_replaced_too(monkeypatch):
    source = types.ModuleType("a_users_model")
    exec(
        "from torch import nn\nfrom torch.nn.functional import scaled_dot_product_attention as attend\n"
        "class Model(nn.Module):\n    def forward(self, x):\n        return attend(x, x, x)\n",
        source.__dict__,
    )
    monkeypatch.setitem(sys.modules, "a_users_model", source)
    model, x = source.Model(), torch.randn(1, 1, 2, 4)
    names = {PUBLIC_NAME, *names_of_attention(model)}
    assert names == {
        ("torch.nn.functional", "scaled_dot_product_attention"),
        ("a_users_model", "attend"),
    }
    with replaced_attention(own_attention, names):
        assert model(x) == "own" == F.scaled_dot_product_attention(x, x, x)
        with public_attention():
            assert F.scaled_dot_product_attention is plain_attention
        assert F.scaled_dot_product_attention is own_attention
    assert F.scaled_dot_product_attention is plain_attention and torch.is_tensor(model(x))

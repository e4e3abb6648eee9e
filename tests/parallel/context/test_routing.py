# SPDX-License-Identifier: Apache-2.0
"""A function in the place of torch's attention: wherever it is looked up, as long as somebody wants it."""

import sys
import types

import torch
import torch.nn.functional as F

from accelerate.parallel.context.attention import AttentionPatch, aliases, plain_attention


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
    route = AttentionPatch(own_attention)
    route.places |= aliases(model)
    assert route.places == {
        ("torch.nn.functional", "scaled_dot_product_attention"),
        ("a_users_model", "attend"),
    }
    route.open()
    route.open()
    route.close()
    assert model(x) == "own" == F.scaled_dot_product_attention(x, x, x)
    route.close()
    assert F.scaled_dot_product_attention is plain_attention and torch.is_tensor(model(x))


def test_other_functions_give_way_where_they_are():
    route = AttentionPatch(own_attention)
    route.others = {
        ("json", "dumps"): lambda former: lambda value: former([value]),
        ("no_such_module", "name"): None,
    }
    import json

    former = json.dumps
    route.open()
    assert json.dumps(1) == "[1]"
    route.close()
    assert json.dumps is former

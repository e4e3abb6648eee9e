# SPDX-License-Identifier: Apache-2.0
"""Device maps with room for a forward: every tensor once, every budget kept, and errors that say what is missing."""

from __future__ import annotations

import itertools
import random
import types

import pytest
import torch
from torch import nn

from accelerate import init_empty_weights
from accelerate.core.errors import ConfigurationError
from accelerate.placement.names import device_for
from accelerate.planning.model import parse_batch
from accelerate.planning.placement import place

MB = 10**6


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, width=128, depth=6):
        super().__init__()
        self.config = types.SimpleNamespace(
            num_attention_heads=4, num_key_value_heads=2, hidden_size=width
        )
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def on_meta():
    with init_empty_weights(include_buffers=True):
        model = Model()
    model.head.weight = model.embed.weight
    return model


@pytest.fixture
def two_accelerators(monkeypatch):
    monkeypatch.setattr("accelerate.core.devices.device_count", lambda *_: 2)


def test_every_tensor_has_one_device_and_every_budget_is_kept(two_accelerators):
    model, dice = on_meta(), random.Random(0)
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    block = sum(tensor.nbytes for tensor in [*model.blocks[0].parameters(), model.blocks[0].scale])
    total, fitting = sum(tensor.nbytes for tensor in tensors.values()), 0
    for _ in range(60):
        limits = {
            device: dice.randrange(1, 6 * MB)
            for device in dice.sample([0, 1, "cpu"], dice.randrange(1, 4))
        }
        batch, tokens = dice.choice([None, parse_batch("2x64")]), dice.choice([0, 64])
        try:
            found = place(model, limits, batch=batch, cache_tokens=tokens if batch else 0)
        except ConfigurationError as error:
            assert "does not fit: device" in str(error) and "more" in str(error)
            continue
        fitting += 1
        assert sum(use.weights for use in found.use.values()) == total
        places = {name: device_for(name, found.device_map) for name in tensors}
        for device, use in found.use.items():
            assert use.weights == sum(
                tensors[name].nbytes for name, place in places.items() if place == device
            )
            assert device == "disk" or use.total <= limits[device] == use.budget
        # Keys and values of each block are counted once: 2 samples, 2 of 4 heads of width 32.
        caches = sum(use.cache for use in found.use.values())
        assert caches == (6 * 2 * 2 * 64 * 2 * 32 * 4 if batch and tokens else 0)
        computing = [device for device in (0, 1) if device in limits] or ["cpu"]
        if any(
            name.startswith("blocks") and place not in computing for name, place in places.items()
        ):
            assert found.use[computing[0]].layer >= 2 * block
    assert fitting > 20


def test_activations_are_those_of_a_forward_without_gradients():
    found = place(on_meta(), {"cpu": 50 * MB}, batch=parse_batch("8x32"))
    # The widest point: the input, the wide product and its ReLU; or the scores over 1000 ids and their input.
    wide = 8 * 32 * (128 + 2 * 512) * 4
    assert wide <= found.use["cpu"].activations <= 1.3 * wide
    assert found.device_map == {"": "cpu"}


def test_what_is_missing_is_named():
    model = on_meta()
    with pytest.raises(
        ConfigurationError,
        match=r"cpu has 1000 B and needs .* MiB more",
    ):
        place(model, {"cpu": 1000}, batch=parse_batch("8x32"))
    with pytest.raises(
        ConfigurationError,
        match=r"Model does not fit: .* of weights",
    ):
        place(model, {"cpu": 2 * MB}, disk=False)
    with pytest.raises(ConfigurationError, match="cache_tokens needs a batch"):
        place(model, {"cpu": 2 * MB}, cache_tokens=8)

# SPDX-License-Identifier: Apache-2.0
"""A model split over two processes gives the outputs of the whole one, in its own containers."""

from __future__ import annotations

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from accelerate import PartialState
from accelerate.inference import prepare_pippy

PRELOADED = ("transformers.models.bart.modeling_bart",)
pytestmark = pytest.mark.usefixtures("float64")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.head = nn.Linear(8, 2)

    def forward(self, x, scale=None, want_hidden=False):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        out = self.head(hidden) * scale
        return {"out": out, "past": None, "pair": (out + 1, out * 2)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def make(kind):
    torch.manual_seed(0)
    return kind()


def inputs():
    torch.manual_seed(1)
    return {"x": torch.randn(7, 4), "scale": torch.rand(7, 1)}


def check(found, rows=7):
    expected = make(Model)(**inputs())
    assert (
        list(found) == ["out", "past", "pair"]
        and found["past"] is None
        and type(found["pair"]) is tuple
    )
    for ours, plain in zip(
        [found["out"], *found["pair"]], [expected["out"], *expected["pair"]], strict=True
    ):
        torch.testing.assert_close(ours, plain[:rows], rtol=0, atol=1e-12)


@on_ranks(2)
def test_batches_of_any_size():
    """Seven samples in two and in three parts: padded on the way, cut at the end."""
    state = PartialState(cpu=True)
    x, scale = inputs().values()
    model = prepare_pippy(
        make(Model), example_args=(x,), example_kwargs={"scale": scale}, gather_output=True
    )
    assert model.hf_split_points == ["blocks.2"], model.hf_split_points
    check(model(x, scale=scale))
    # Of other sizes than the example's, and smaller than the number of parts.
    for rows in (2, 1, 5):
        check(model(x[:rows], scale=scale[:rows]), rows)

    split = prepare_pippy(
        make(Model), split_points=["blocks.4"], example_kwargs=inputs(), num_chunks=3
    )
    found = split(x, scale=scale)
    if state.is_last_process:
        check(found)
    else:
        assert found is None


@on_ranks(2)
def test_in_the_middle_of_a_block_over_a_skip_connection():
    PartialState(cpu=True)
    x = inputs()["x"]

    def blocks():
        return nn.Sequential(make(Block), make(Block))

    model = prepare_pippy(
        blocks(), split_points=["1.second"], example_args=(x,), gather_output=True
    )
    torch.testing.assert_close(model(x), blocks()(x), rtol=0, atol=1e-12)


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=32, d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
        )
    ).eval()  # fmt: skip


@on_ranks(2)
def test_encoder_and_decoder():
    """The order in which they compute is not the one in which they are registered."""
    PartialState(cpu=True)
    torch.manual_seed(1)
    tokens = torch.randint(3, 32, (4, 6))
    given = {
        "input_ids": tokens,
        "decoder_input_ids": tokens[:, :5],
        "attention_mask": torch.ones_like(tokens),
    }
    given["attention_mask"][1, 4:] = 0
    expected = bart()(**given, use_cache=False)
    for points in ("auto", ["model.encoder.layers.1"], ["model.decoder"]):
        model = prepare_pippy(bart(), split_points=points, example_kwargs=given, gather_output=True)
        found = model(**given)
        assert type(found) is type(expected)
        for name in ("logits", "encoder_last_hidden_state"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)

# SPDX-License-Identifier: Apache-2.0
"""A model cut over two processes gives the outputs of the whole one, in its own containers."""

from __future__ import annotations

from ranks import run_ranks

WORKER = """
import torch
from torch import nn

from accelerate import PartialState
from accelerate.inference import prepare_pippy

state = PartialState(cpu=True)


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


def make():
    torch.manual_seed(0)
    return Model().double()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def make_block():
    torch.manual_seed(2)
    return Block().double()


torch.manual_seed(1)
x, scale = torch.randn(7, 4).double(), torch.rand(7, 1).double()
wanted = make()(x, scale=scale)


def check(found):
    assert list(found) == ["out", "past", "pair"] and found["past"] is None and type(found["pair"]) is tuple
    for ours, plain in zip([found["out"], *found["pair"]], [wanted["out"], *wanted["pair"]]):
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


# Seven samples in two and in three parts: padded on the way, cut at the end.
model = prepare_pippy(make(), example_args=(x,), example_kwargs={"scale": scale}, gather_output=True)
assert model.hf_split_points == ["blocks.2"], model.hf_split_points
check(model(x, scale=scale))

inputs = {"x": x, "scale": scale}
split = prepare_pippy(make(), split_points=["blocks.4"], example_kwargs=inputs, num_chunks=3)
found = split(x, scale=scale)
check(found) if state.is_last_process else None
assert state.is_last_process or found is None

# Batches of other sizes than the example's, smaller than the number of parts too.
for rows in (2, 1, 5):
    found = model(x[:rows], scale=scale[:rows])
    torch.testing.assert_close(found["out"], wanted["out"][:rows], rtol=0, atol=1e-12)

# In the middle of a block, over a skip connection.
middle = prepare_pippy(
    nn.Sequential(make_block(), make_block()), split_points=["1.second"], example_args=(x,), gather_output=True
)
torch.testing.assert_close(middle(x), nn.Sequential(make_block(), make_block())(x), rtol=0, atol=1e-12)


# Encoder and decoder, whose order of computing is not the one in which they are registered.
def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=32, d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
        )
    ).double().eval()  # fmt: skip


tokens = torch.randint(3, 32, (4, 6))
given = {"input_ids": tokens, "decoder_input_ids": tokens[:, :5], "attention_mask": torch.ones_like(tokens)}
given["attention_mask"][1, 4:] = 0
expected = bart()(**given, use_cache=False)
for points in ("auto", ["model.encoder.layers.1"], ["model.decoder"]):
    model = prepare_pippy(bart(), split_points=points, example_kwargs=given, gather_output=True)
    found = model(**given)
    assert type(found) is type(expected)
    for name in ("logits", "encoder_last_hidden_state"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
    assert len(model.state_dict()) == len(bart().state_dict())
print("done")
"""


def test_outputs_of_two_stages_equal_the_whole_model() -> None:
    for result in run_ranks(WORKER, 2, timeout=120):
        assert "done" in result.stdout

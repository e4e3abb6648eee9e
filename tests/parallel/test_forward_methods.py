# SPDX-License-Identifier: Apache-2.0
"""Methods other than `forward`: the values of one process in each layout, and what is said of those not registered."""

import pytest
import torch
from cases import cases
from layouts import compare_state, sharded, sized
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import PrepareError

PRELOADED = ("transformers.models.llama.modeling_llama", "transformers.generation.utils")
pytestmark = pytest.mark.usefixtures("float64")


class Net(nn.Module):
    """`encode` computes with its own layers, with a parameter, and by calls of the model."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.head(self.body(x)) * self.scale

    def encode(self, x, times=1):
        for _ in range(times):
            x = self(x) * self.scale + self.body(x)
        return {"code": self.head(x)}

    def decode(self, x):
        return self.head(x) @ self.body[2].weight

    def describe(self):
        return f"{len(list(self.parameters()))} parameters"


LAYOUTS = {
    "ddp": dict,
    "fsdp2": lambda: sharded(2),
    "fsdp1": lambda: sharded(1, use_orig_params=True),
    "fsdp1, flat": lambda: sharded(1, use_orig_params=False),
    "tp": lambda: sized({"body.0": "colwise", "body.2": "rowwise"}, tp_size=2),
    "hsdp": lambda: sharded(2) | sized(dp_replicate_size=2, dp_shard_size=2),
}
everywhere = pytest.mark.parametrize(
    "name", cases(["ddp", "fsdp2", "fsdp1", "fsdp1, flat", "tp"], ["fsdp1, flat"])
)


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def check_training(name):
    """Steps that train by a method and by the forward, and a method without gradients between them."""
    run = Accelerator(cpu=True, **LAYOUTS[name]())
    model, optimizer = run.prepare(*make(), forward_methods=["encode"])
    index, shards = run.strategy.data_shard
    expected, plain = make()
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        parts = [torch.randn(4, 4, generator=generator) for _ in range(shards)]
        with torch.no_grad():
            found = model.encode(parts[index], times=2)["code"]
            torch.testing.assert_close(
                found, expected.encode(parts[index], times=2)["code"], rtol=0, atol=1e-8
            )
        if step % 2:
            run.backward(model.encode(parts[index])["code"].square().mean())
        else:
            run.backward(model(parts[index]).square().mean())
        for part in parts:
            output = expected.encode(part)["code"] if step % 2 else expected(part)
            (output.square().mean() / shards).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    compare_state(run, model, expected.state_dict())


@on_ranks(2)
@everywhere
def test_trains_and_computes_as_one_process(name):
    check_training(name)


@pytest.mark.thorough
@on_ranks(4)
@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_trains_on_four_ranks(name):
    check_training(name)


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def check_generate(name):
    options = LAYOUTS[name]()
    if name == "tp":
        options["parallelism_config"].tp_handler.plan = None
    if "fsdp_plugin" in options:
        options["fsdp_plugin"].transformer_cls_names_to_wrap = ["LlamaDecoderLayer"]
    run = Accelerator(cpu=True, **options)
    prompt = torch.arange(1, 9).view(2, 4)
    expected = make_llama().generate(prompt, max_new_tokens=6, do_sample=False)
    model = run.prepare(make_llama(), forward_methods=["generate"] if name in ("ddp", "tp") else ())
    for _ in range(2):
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    # The first data shard's text ends after two tokens.
    index, _ = run.strategy.data_shard
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": int(expected[0, 5])}
    row = prompt[min(index, 1)][None]
    assert torch.equal(model.generate(row, **options), make_llama().generate(row, **options))


@on_ranks(2)
@everywhere
def test_generates_the_tokens_of_one_process(name):
    check_generate(name)


@pytest.mark.thorough
@on_ranks(4)
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1"])
def test_generates_on_four_ranks(name):
    check_generate(name)


@on_ranks(2)
def test_what_is_not_registered_and_what_is_not_there():
    run = Accelerator(cpu=True, **LAYOUTS["fsdp2"]())
    with pytest.raises(PrepareError, match=r"forward_methods has 'encod', but Net .*encode"):
        run.prepare(make()[0], forward_methods=["encod"])
    with pytest.raises(PrepareError, match="forward_methods has 'head'"):
        run.prepare(make()[0], forward_methods=["head"])
    with pytest.raises(PrepareError, match=r"Net\.decode .* an inner module"):
        run.prepare(make()[0], forward_methods=["decode"]).decode(torch.ones(2, 4))
    with pytest.raises(PrepareError, match=r"forward_methods .*without a model"):
        run.prepare(make()[1], forward_methods=["encode"])
    model, _ = run.prepare(*make())
    assert model.describe() == "7 parameters"
    with (
        torch.no_grad(),
        pytest.raises(PrepareError, match=r"Net\.encode .*forward_methods=\['encode'\]"),
    ):
        model.encode(torch.ones(2, 4))
    # As before.
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_one_process_computes_a_method_in_the_precision_of_the_run():
    run = Accelerator(cpu=True, mixed_precision="bf16")
    model = run.prepare(Net().float(), forward_methods=["encode"])
    x = torch.ones(2, 4, dtype=torch.float32)
    found = model.encode(x)["code"]
    assert found.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        expected = Net.encode(run.unwrap_model(model), x)["code"]
    assert torch.equal(found, expected.float())

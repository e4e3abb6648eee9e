# SPDX-License-Identifier: Apache-2.0
"""Parameters between layers that are split by columns and by rows, whatever the plan says, against the plain loop."""

import copy

import pytest
import torch
from layouts import compare_state
from packages import package
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.core.errors import PrepareError
from accelerate.parallelism_config import ParallelismConfig

transformers = package("transformers")
pytestmark = pytest.mark.usefixtures("float64")

PRELOADED = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("apertus", "phi", "cohere", "falcon", "t5", "deberta_v2")
)
SIZES = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), act, nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Gated(Block):
    """The gate reads the stream beside the layer that is split."""

    def __init__(self, act):
        super().__init__(act)
        self.gate = nn.Linear(4, 1)

    def forward(self, x):
        return self.down(self.act(self.up(x.tanh())) * self.gate(x))


class Net(nn.Module):
    def __init__(self, block=Block, shared=False):
        super().__init__()
        act = nn.PReLU()
        self.blocks = nn.ModuleList([block(act if shared else nn.PReLU()) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def language_model(family, **options):
    config = getattr(transformers, f"{family}Config")(**SIZES, pad_token_id=0, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def deberta(**options):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.DebertaV2Model(transformers.DebertaV2Config(**SIZES, **dropout, **options))


def t5():
    config = transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return transformers.T5EncoderModel(config)


def rows(prefix, columns, row):
    return {f"{prefix}.{name}": "colwise" for name in columns} | {row: "rowwise"}


T5_PLAN = rows(
    "encoder.block.*.layer.0.SelfAttention", "qkv", "encoder.block.*.layer.0.SelfAttention.o"
)
DEBERTA_PLAN = rows(
    "encoder.layer.*.attention.self",
    ("query_proj", "key_proj", "value_proj"),
    "encoder.layer.*.attention.output.dense",
)
FALCON_PLAN = rows("transformer.h.*.mlp", ("dense_h_to_4h",), "transformer.h.*.mlp.dense_4h_to_h")
RIGHT = {
    "PReLU": (Net, PLAN, {}),
    "one PReLU for all": (lambda: Net(shared=True), PLAN, {}),
    "compiled": (Net, PLAN, {"dynamo_backend": "aot_eager"}),
    "Apertus": (lambda: language_model("Apertus", max_position_embeddings=16), None, {}),
    "Phi": (lambda: language_model("Phi", qk_layernorm=True), None, {}),
    # Its linear layers are a subclass, and the result is changed in place.
    "Falcon": (lambda: language_model("Falcon"), FALCON_PLAN, {}),
    # The number of heads is that of a module beside the one with the rowwise layer.
    "DeBERTa": (deberta, DEBERTA_PLAN, {}),
}


def build(make):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Net) or isinstance(getattr(model, "_orig_mod", None), Net):
        return model(torch.randn(6, 4, generator=generator)).square().mean()
    output = model(input_ids=torch.randint(1, 16, (2, 8), generator=generator))[0]
    return (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).mean()


def start(plan, sizes=None, **options):
    handler = TorchTensorParallelConfig(plan=plan)
    layout = ParallelismConfig(**(sizes or {"tp_size": 2}), tp_handler=handler)
    return Accelerator(cpu=True, parallelism_config=layout, **options)


def train(accelerator, make, unfreezes=()):
    plain = build(make)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(found.parameters(), lr=0.1) for found in (plain, model)]
    model, optimizers[1] = accelerator.prepare(model, optimizers[1])
    both = (plain, model)
    for step in range(3):
        for found in both:
            for name, parameter in found.named_parameters():
                if name.endswith(unfreezes or ("nothing",)):
                    parameter.requires_grad_(step > 0)
        loss_of(plain, step).backward()
        accelerator.backward(loss_of(model, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare_state(accelerator, model, plain.state_dict(), 1e-10)


@on_ranks(2)
@pytest.mark.parametrize("what", RIGHT)
def test_gradients_are_those_of_all_features(what):
    make, plan, options = RIGHT[what]
    train(start(plan, **options), make)


@on_ranks(2)
def test_parameters_that_train_later():
    train(start(PLAN), Net, unfreezes=("act.weight",))


@on_ranks(4)
def test_sharded_too():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    train(start(PLAN, {"dp_shard_size": 2, "tp_size": 2}, fsdp_plugin=plugin), Net)


@on_ranks(2)
def test_a_path_beside_the_split_layers_is_refused():
    accelerator = start(PLAN)
    model = accelerator.prepare(Net(Gated))
    with pytest.raises(PrepareError, match=r"blocks\.1\.down .*blocks\.1 "):
        loss_of(model, 0)


@pytest.mark.parametrize(
    "change",
    [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm],
    ids=["parametrization", "hook"],
)
@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_computed_is_refused(change):
    model = Net()
    change(model.blocks[1].up)
    with pytest.raises(PrepareError, match=r"blocks\.1\.up.*weight is computed"):
        start(PLAN).prepare(model)


SIZED = {
    "Cohere": (
        lambda: language_model("Cohere", use_qk_norm=True),
        None,
        ("model.layers.0.self_attn", "q_norm.weight"),
    ),
    "T5": (t5, T5_PLAN, ("layer.0.SelfAttention", "relative_attention_bias.weight")),
    "DeBERTa": (
        lambda: deberta(relative_attention=True, pos_att_type=["c2p"]),
        DEBERTA_PLAN,
        ("encoder.layer.0.attention", "pos_key_proj.weight"),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", SIZED)
def test_what_needs_all_features_is_named(what):
    make, plan, names = SIZED[what]
    model = start(plan).prepare(build(make))
    with pytest.raises(RuntimeError) as caught:
        loss_of(model, 0)
    (note,) = caught.value.__notes__
    assert all(name in note for name in (*names, "tp_size=2"))


@on_ranks(2)
def test_soft_prompts():
    """The base of peft's model is split by its own plan."""
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)

    def make():
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), prompts)

    train(start(None), make)

# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, alone and under FSDP2, against the plain loop in float64, to 1e-8."""

import pytest
import torch
import torch.distributed as dist
from layouts import compare
from rank_pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from windows import ACCUMULATION, token_batches, train, train_by_hand

from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.core.errors import PrepareError
from accelerate.parallel.base import Bundle
from accelerate.parallel.fsdp.strategy import FullyShardedDataParallel
from accelerate.parallel.tensor.strategy import TensorParallel
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.base import Precision
from accelerate.state import PartialState

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 11, 6
STEPS = 10
BATCHES = token_batches(STEPS * ACCUMULATION, 8, LENGTH, VOCABULARY)
CPU = torch.device("cpu")
PRELOADED = ("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3")
pytestmark = pytest.mark.usefixtures("float64")


class Attention(nn.Module):
    """Counts its heads explicitly, as models written by hand do."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def heads(y):
            return y.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def own(seed):
    torch.manual_seed(seed)
    return Model()


def of_transformers(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=12, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float64)


def of_qwen(seed):
    """Its attention has norms of each head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=12, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(torch.float64)


def loaded_in_parts(folder):
    """As `from_pretrained` gives a model that it has split itself."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        of_transformers(0).save_pretrained(folder)
    dist.barrier()
    return lambda seed: LlamaForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        distributed_config=DistributedConfig(tp_size=2),
        attn_implementation="sdpa",
    )


def check_run(make, strategy, steps=4, build=None):
    plain = make(0)
    batches = BATCHES[: steps * ACCUMULATION]
    expected, norms = train_by_hand(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), batches)
    model = (build or make)(PartialState().process_index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared = strategy.prepare(Bundle([model], [optimizer], [True]))[0]
    model = prepared.module
    split = sum(
        isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ())
        for p in model.parameters()
    )
    assert split >= 14, f"only {split} parameters are split"
    train(strategy, prepared, optimizer, batches, norms)
    compare(prepared.state_dict(), expected[-1])


def sharded(efficient=False, **sizes):
    plugin = Plugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        cpu_ram_efficient_loading=efficient,
    )
    return FullyShardedDataParallel(CPU, Precision(), plugin, ParallelismConfig(**sizes))


def on_rank_0(seed):
    with torch.device("cpu" if PartialState().process_index == 0 else "meta"):
        return own(0)


def options(**given):
    return TensorParallel(
        CPU,
        Precision(),
        ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(**given)),
    )


def split(model, **given):
    return options(**given).prepare_model(model).module


@on_ranks(4, thorough=[2])
def test_alone(nproc):
    PartialState(cpu=True)
    check_run(own, TensorParallel(CPU, Precision(), ParallelismConfig(tp_size=nproc)), STEPS)


@on_ranks(thorough=[2])
@pytest.mark.parametrize(
    ("plan", "named"),
    [({"layers.*.attention.?_proj": "colwise"}, r"\?_proj"), ({"head": "sideways"}, "sideways")],
)
def test_a_plan_that_does_not_fit_is_refused(plan, named):
    PartialState(cpu=True)
    with pytest.raises(PrepareError, match=named):
        split(own(0), plan=plan)
    with pytest.raises(PrepareError, match="Linear"):
        split(nn.Linear(2, 2))


# As Glm: the layer that reads an MLP's outputs splits them itself.
GATHERED = {f"layers.*.mlp.{key}_proj": "colwise_gather_output" for key in ("gate", "up")}
GATHERED |= {f"layers.*.attention.{key}_proj": "colwise" for key in "qkv"} | {
    "layers.*.attention.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise_split_input"
}  # fmt: skip
TWO = {
    "gathered outputs, sequence": (own, {"plan": GATHERED, "sequence_parallel": True}, None),
    "transformers' plan": (
        of_transformers,
        {"loss_parallel": True, "sequence_parallel": True},
        None,
    ),
    "norms of heads": (of_qwen, {}, None),
    "norms of heads, sequence": (of_qwen, {"sequence_parallel": True}, None),
    "without storage": (own, {}, on_rank_0),
}


@on_ranks(thorough=[2])
@pytest.mark.parametrize("what", TWO)
def test_models(what):
    PartialState(cpu=True)
    make, given, build = TWO[what]
    check_run(make, options(**given), build=build)


@on_ranks(thorough=[2])
def test_a_model_that_transformers_has_split(tmp_path):
    PartialState(cpu=True)
    check_run(of_transformers, options(), build=loaded_in_parts(tmp_path))


FOUR = {
    "fsdp x tp": (own, {"dp_shard_size": 2}, {"steps": STEPS}),
    "dp x tp": (own, {"dp_replicate_size": 2}, {}),
    "from rank 0": (own, {"dp_shard_size": 2, "efficient": True}, {"build": on_rank_0}),
    "transformers' plan": (of_transformers, {"dp_shard_size": 2}, {}),
}


@on_ranks(4)
@pytest.mark.parametrize("what", FOUR)
def test_composed(what):
    PartialState(cpu=True)
    make, layout, others = FOUR[what]
    check_run(make, sharded(tp_size=2, **layout), **others)

# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel plans: the words, what they match, what is inferred, and what is refused before a split."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.parallel.tensor import plan as tensor_plan
from accelerate.parallel.tensor import requirements
from accelerate.parallel.tensor import styles as kinds
from accelerate.parallelism_config import ParallelismConfig

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "parallel"))
from llama import Llama, LlamaConfig


def small(**sizes):
    with torch.device("meta"):
        return Llama(
            LlamaConfig(**{"vocabulary": 32, "width": 16, "hidden": 24, "layers": 2, **sizes})
        )


def styles(model, plan, strict=True, size=2):
    found = tensor_plan.match_plan(model, plan, strict)
    split = requirements.Split(dict(model.named_modules()), found, size)
    requirements.check(split)
    return found, [(name, key, count) for name, _, key, count in split.heads()]


def test_a_plan_is_inferred_for_blocks_and_for_the_vocabulary():
    model = small()
    plan = tensor_plan.infer_plan(model, 2)
    assert (
        plan["layers.1.attention.k_proj"] == "colwise"
        and plan["layers.0.mlp.down_proj"] == "rowwise"
    )
    assert plan["embedding"] == "embedding_rowwise" and plan["head"] == "colwise_gather_output"
    assert len(plan) == 2 * 7 + 2
    # A vocabulary that does not divide stays whole.
    assert "head" not in tensor_plan.infer_plan(small(vocabulary=33), 2)
    found, heads = styles(model, plan)
    assert heads == [
        (f"layers.{i}.attention", key, 4) for i in range(2) for key in ("num_heads", "num_kv_heads")
    ]
    attention = [found[f"layers.0.attention.{key}_proj"] for key in "qkv"]
    assert len({id(style.shared) for style in attention}) == 1, "siblings do not share their input"
    assert attention[0].shared is not found["layers.1.attention.q_proj"].shared


def test_norms_of_heads_are_told_from_norms_over_all_heads():
    model = small()
    model.layers[0].attention.q_norm = nn.RMSNorm(4)
    assert (
        tensor_plan.infer_plan(model, 2)["layers.0.attention.q_norm"]
        == "replicated_with_grad_allreduce"
    )
    model.layers[0].attention.q_norm = nn.RMSNorm(16)
    with pytest.raises(
        PrepareError, match=r"q_norm takes part.*plan={'layers\.\*\.attention\.k_proj': 'colwise'"
    ):
        tensor_plan.infer_plan(model, 2)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"layers.*.attention.wq": "colwise"}, "does not have: layers.*.attention.wq"),
        ({"head": "sideways"}, "'sideways' at head"),
        (
            {"layers.*.mlp": "moe_tp_experts"},
            "'moe_tp_experts' at layers.*.mlp, but layers of experts cannot be split",
        ),
        ({"norm": "colwise"}, "norm, a RMSNorm"),
        ({"norm.weight": "colwise"}, "does not have: norm.weight"),
        ({"layers.0.mlp.up_proj": ColwiseParallel()}, "tp_size=5 does not divide out_features=24"),
        ({"layers.*.attention.?_proj": "colwise"}, "?_proj"),
    ],
)
def test_what_does_not_fit_is_named(plan, words):
    with pytest.raises(PrepareError) as caught:
        styles(small(), plan, size=5)
    assert words in str(caught.value)


def test_a_head_is_never_split():
    model = small(kv_heads=2)
    with pytest.raises(
        PrepareError, match=r"tp_size=4 does not divide num_kv_heads=2 of layers\.0\.attention"
    ):
        styles(model, tensor_plan.infer_plan(model, 4), size=4)
    for layer in model.layers:
        # As the models of transformers: the size of a head, but no count.
        del layer.attention.num_heads, layer.attention.num_kv_heads
    with pytest.raises(PrepareError, match=r"the 2 heads of layers\.0\.attention\.k_proj"):
        styles(model, tensor_plan.infer_plan(model, 4), size=4)


def test_one_matrix_for_queries_keys_and_values_needs_a_plan():
    model = small()
    model.layers[1].attention.c_attn = nn.Linear(16, 48)
    with pytest.raises(PrepareError, match=r"layers\.1\.attention: c_attn "):
        tensor_plan.infer_plan(model, 2)
    with pytest.raises(PrepareError, match="in_proj_weight"):
        tensor_plan.infer_plan(nn.TransformerEncoderLayer(8, 2), 2)
    with pytest.raises(PrepareError, match="none of its modules"):
        tensor_plan.infer_plan(nn.Linear(2, 2), 2)


def test_rules_of_a_family_that_this_model_lacks_are_left_out():
    found, _ = styles(
        small(),
        {"layers.*.experts": "moe_tp_experts", "layers.*.mlp.up_proj": "colwise_rep"},
        strict=False,
    )
    assert list(found) == ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]


def test_every_word_of_dense_models_in_transformers_is_known():
    dense = "colwise rowwise colwise_gather_output embedding_rowwise embedding_colwise rowwise_split_input"
    assert {
        *dense.split(),
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
    } <= set(tensor_plan.STYLES)


def test_the_stream_between_split_layers_along_the_sequence():
    model = small()
    found = tensor_plan.along_sequence(model, styles(model, tensor_plan.infer_plan(model, 2))[0])
    assert isinstance(found["layers.0"], kinds.SequenceEntry) and "layers.1" not in found
    norms = {name for name, style in found.items() if isinstance(style, kinds.SequenceNorm)}
    assert norms == {
        "norm",
        *(f"layers.{i}.{part}_norm" for i in range(2) for part in ("attention", "mlp")),
    }
    assert "Shard(dim=1)" in str(found["layers.1.mlp.down_proj"])
    # Without a norm after them, the stream is whole again after the last block; which may be the first.
    model.layers = nn.ModuleList(model.layers[:1])
    model.norm = nn.Identity()
    found = tensor_plan.along_sequence(model, styles(model, tensor_plan.infer_plan(model, 2))[0])
    assert isinstance(found["layers.0"], kinds.SequenceEntry) and found["layers.0"].gather
    model.layers[0].extra = nn.Linear(16, 16)
    with pytest.raises(PrepareError, match=r"layers\.0\.extra \(Linear\) is neither split"):
        tensor_plan.along_sequence(model, styles(model, tensor_plan.infer_plan(model, 2))[0])
    block = model.layers[0]
    with pytest.raises(PrepareError, match="no list of blocks"):
        tensor_plan.along_sequence(block, styles(block, tensor_plan.infer_plan(block, 2))[0])


def test_the_output_layer_stays_split_for_the_loss():
    model = small(tied=True)
    found, _ = styles(
        model, {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    )
    loss = tensor_plan.split_loss(model, found)
    assert found["head"].loss is loss
    # The other end of a tie is split alike.
    assert isinstance(found["embedding"], kinds.Rowwise)
    with pytest.raises(PrepareError, match="loss_parallel=True: which layer of Block"):
        tensor_plan.split_loss(model.layers[0], {})


def test_options_are_checked():
    assert TorchTensorParallelConfig().plan is None
    for wrong in ("auto", {}):
        with pytest.raises(ConfigurationError, match="module names to words"):
            TorchTensorParallelConfig(plan=wrong)
    with pytest.raises(
        ConfigurationError, match="tp_handler takes a TorchTensorParallelConfig, not <class 'dict'>"
    ):
        ParallelismConfig(tp_size=2, tp_handler={"plan": {}})

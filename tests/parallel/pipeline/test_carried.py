# SPDX-License-Identifier: Apache-2.0
"""Pipelines of four ranks: models of which more than the next block uses an output, to 1e-8 in float64."""

import pytest
import torch
from layouts import units_of
from pipelines import VOCABULARY, bart, batches, check_run, refused, runs_in_schedule
from rank_pool import on_ranks
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.core.imports import is_torch_version
from accelerate.state import PartialState

LAYERS = 3
TOKENS, LABELS = next(iter(batches(1, False)))
LOSS = {"inside": True, "steps": 4}
PRELOADED = ("transformers.models.t5.modeling_t5", "transformers.models.bart.modeling_bart")
pytestmark = pytest.mark.usefixtures("float64")


def t5(seed=0):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=LAYERS, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).to(torch.float64)


def counts(input_ids, labels):
    return (labels != -100).sum()


class Skipping(nn.Module):
    """Every block uses the embedding, and so does the end."""

    def __init__(self, seed=0, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        first = x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = torch.tanh(block(x)) + first / 2
        return self.head(x + first)


@on_ranks(4)
def test_an_encoder_and_a_decoder_over_four_stages():
    PartialState(cpu=True)
    check_run(t5, Options(num_microbatches=4), pp_size=4, padded=True, **LOSS)


@pytest.mark.thorough
@on_ranks(4)
def test_blocks_in_the_order_seen():
    PartialState(cpu=True)
    example = {"input_ids": TOKENS, "labels": LABELS}
    early = Options(schedule="1f1b", num_microbatches=4, num_items=counts, example_inputs=example)
    run, model, *_ = check_run(bart, early, pp_size=4, padded=True, **LOSS)
    runs_in_schedule(run, model, Schedule1F1B)
    units = run.prepared_model(model).stages.runner.cut.units
    assert units.index("model.decoder.layernorm_embedding") < units.index("model.decoder.layers.0")


@on_ranks(4)
def test_an_encoder_and_a_decoder_with_fsdp():
    PartialState(cpu=True)
    early = Options(schedule="1f1b", num_microbatches=2, loss_reduction="mean")
    check_run(t5, early, plugin=units_of("T5Block"), pp_size=2, dp_shard_size=2, **LOSS)


@pytest.mark.thorough
@on_ranks(4)
def test_two_stages_a_rank():
    PartialState(cpu=True)
    turns = Options(schedule="interleaved", num_microbatches=2, loss_reduction="mean")
    run, model, *_ = check_run(t5, turns, pp_size=2, dp_replicate_size=2, **LOSS)
    runs_in_schedule(run, model)


SEEN = Options(num_microbatches=2, example_inputs={"tokens": TOKENS})


@on_ranks(4)
@pytest.mark.parametrize("seen", [False, True], ids=["named", "seen"])
def test_a_skip_connection(seen):
    PartialState(cpu=True)
    if seen:
        check_run(Skipping, SEEN, steps=4, pp_size=2, dp_replicate_size=2)
    else:
        check_run(Skipping, Options(num_microbatches=4, carried=["embed"]), steps=4, pp_size=4)


def prefix_tuning(projection):
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    prefix = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=3,
        prefix_projection=projection,
        encoder_hidden_size=8,
    )

    def make(seed=0):
        torch.manual_seed(seed)
        return peft.get_peft_model(LlamaForCausalLM(config), prefix).to(torch.float64)

    return make


@on_ranks(2)
@pytest.mark.parametrize(
    "projection",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["plain", "projected"],
)
def test_prefixes_in_a_cache(projection):
    """All blocks find the output of the prompt encoder in the cache that they are given."""
    PartialState(cpu=True)
    check_run(prefix_tuning(projection), Options(num_microbatches=2), steps=4, pp_size=2)


REFUSED = {
    "an unknown module": (Skipping, Options(carried=["embedding"]), "carried names embedding"),
    "apart": (
        t5,
        Options(schedule="zero_bubble", loss_reduction="mean"),
        # Before 2.13 torch's schedule is refused for any model.
        "schedule='zero_bubble' "
        + ("needs" if is_torch_version("<", "2.13") else "computes the gradients of inputs"),
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    PartialState(cpu=True)
    refused(*REFUSED[what])

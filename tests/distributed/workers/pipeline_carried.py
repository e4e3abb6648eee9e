# SPDX-License-Identifier: Apache-2.0
"""Each of four ranks: models of which more than the next block uses an output, in a pipeline, to 1e-8 in float64."""

import torch
from pipeline_parity import VOCABULARY, Options, Plugin, batches, check_run, refused, runs_in_schedule
from torch import nn

from accelerate.parallel.pipeline.early import EarlyReceive1F1B
from accelerate.state import PartialState

LAYERS = 3


def t5(seed=0):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=LAYERS, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).to(torch.float64)


def bart(seed=0):
    """Its norms behind the embeddings are registered behind the blocks."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return BartForConditionalGeneration(config).to(torch.float64)


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


def main():
    PartialState(cpu=True)
    torch.set_default_dtype(torch.float64)
    tokens, labels = next(iter(batches(1, False)))
    example = {"input_ids": tokens, "labels": labels}
    loss = {"inside": True, "steps": 4}

    parts = Options(num_microbatches=4)
    check_run("an encoder and a decoder over four stages", t5, parts, pp_size=4, padded=True, **loss)
    early = Options(schedule="1f1b", num_microbatches=4, example_inputs=example)
    _, model, *_ = check_run("in the order seen", bart, early, pp_size=4, padded=True, **loss)
    runs_in_schedule(model, EarlyReceive1F1B)
    units = model._pipelined.runner.cut.units
    assert units.index("model.decoder.layernorm_embedding") < units.index("model.decoder.layers.0")
    plugin = Plugin(
        fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["T5Block"]
    )
    early = Options(schedule="1f1b", num_microbatches=2)
    check_run("pp x fsdp", t5, early, plugin=plugin, pp_size=2, dp_shard_size=2, **loss)
    turns = Options(schedule="interleaved", num_microbatches=2)
    _, model, *_ = check_run("two stages a rank", t5, turns, pp_size=2, dp_replicate_size=2, **loss)
    runs_in_schedule(model)

    skipping = Options(num_microbatches=4, carried=["embed"])
    check_run("a skip connection", Skipping, skipping, steps=4, pp_size=4)
    seen = Options(num_microbatches=2, example_inputs={"tokens": tokens})
    check_run("a skip connection, seen", Skipping, seen, steps=4, pp_size=2, dp_replicate_size=2)

    def dropping():
        return Skipping(dropout=0.1)

    refused("an unknown module", Skipping, Options(carried=["embedding"]), "carried names embedding")
    refused("apart", t5, Options(schedule="zero_bubble"), "schedule='zero_bubble' computes the gradients of inputs")
    refused("random numbers", dropping, seen, "of the output of embed with random numbers")
    print("all equal")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""An unchanged loop over a pipelined model, to be held against the plain loop in float64."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import compare
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.parallelism_config import ParallelismConfig

sys.path.append(str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

VOCABULARY, LENGTH, GLOBAL_BATCH, ACCUMULATION, CLIP = 32, 8, 8, 2, 0.1
SIZES = {
    "vocabulary": VOCABULARY,
    "width": 16,
    "hidden": 32,
    "layers": 4,
    "heads": 2,
    "kv_heads": 2,
}


def own(seed=0, **sizes):
    torch.manual_seed(seed)
    return Llama(LlamaConfig(**(SIZES | sizes)))


def tied(seed=0):
    return own(seed, tied=True)


def of_transformers(seed=0):
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    config = Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float64)


def bart(seed=0):
    """Its norms behind the embeddings are registered behind the blocks."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return BartForConditionalGeneration(config).to(torch.float64)


def batches(steps, padded):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps * ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if padded:
            # Unequal numbers of tokens count in the micro-batches.
            ends = torch.randint(2, LENGTH + 1, (GLOBAL_BATCH,), generator=generator)
            labels[torch.arange(LENGTH) >= ends[:, None]] = -100
        yield tokens[:, :-1], labels


def counted(tokens, labels):
    """The items of a loss that is a mean over all labels but -100."""
    return (labels != -100).sum()


def loss_of(model, tokens, labels, inside):
    if inside:
        output = model(tokens, labels=labels)
        return output[0] if isinstance(output, tuple) else output.loss
    logits = model(tokens)
    return nn.functional.cross_entropy(
        getattr(logits, "logits", logits).flatten(0, 1), labels.flatten()
    )


def train(model, optimizer, accelerator, steps, inside, padded):
    norms, losses = [], []
    index, count = (0, 1) if accelerator is None else accelerator.strategy.data_shard
    for number, (tokens, labels) in enumerate(batches(steps, padded)):
        part = slice(index * GLOBAL_BATCH // count, (index + 1) * GLOBAL_BATCH // count)
        tokens, labels = tokens[part], labels[part]
        if accelerator is None:
            loss = loss_of(model, tokens, labels, inside)
            (loss / ACCUMULATION).backward()
            if number % ACCUMULATION == ACCUMULATION - 1:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        else:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens, labels, inside)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.detach().item())
    return norms, losses


def accelerator(options=None, plugin=None, precision=None, **sizes):
    reset_states()
    layout = ParallelismConfig(**sizes, pp_handler=options)
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        parallelism_config=layout,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
    )


def check_run(
    make, options, steps=20, inside=False, padded=False, plugin=None, tolerance=1e-8, **sizes
):
    plain = make()
    expected = train(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.01), None, steps, inside, padded
    )
    run = accelerator(options, plugin, **sizes)
    # Every rank but the first builds another model: the weights are rank 0's.
    model = make(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    held = sum(parameter.numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in plain.parameters())
    assert held < 0.8 * whole, f"this rank holds {held} of {whole}"
    found = train(model, optimizer, run, steps, inside, padded)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert abs(mine - theirs) < tolerance, f"norm {mine} is not {theirs}"
    if sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1) == 1:
        for mine, theirs in zip(found[1], expected[1], strict=True):
            assert abs(mine - theirs) < tolerance, f"loss {mine} is not {theirs}"
    compare(run.prepared_model(model).state_dict(), plain.state_dict(), tolerance)
    return run, model, optimizer, plain


def refused(make, options, named, call=None, *objects):
    """Preparing the model, or calling it then, ends in an error that has `named` in it."""
    run = accelerator(options, pp_size=2, dp_replicate_size=dist.get_world_size() // 2)
    with pytest.raises(PrepareError, match=re.escape(named)):
        model, *_ = run.prepare(make(), torch.zeros(1), *objects)
        if call is not None:
            call(model)


def runs_in_schedule(run, model, kind=None):
    built = list(run.prepared_model(model).stages.runner._built.values())
    assert built, "every batch went in GPipe's order"
    assert kind is None or {type(schedule) for schedule in built} == {kind}, built

# SPDX-License-Identifier: Apache-2.0
"""Models of transformers split by their own plans, behind an Accelerator, against the plain loop."""

import functools

import pytest
import torch
from layouts import compare_state
from packages import package
from rank_pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from windows import ACCUMULATION, train_on_items, train_on_items_by_hand

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.core.errors import PrepareError
from accelerate.parallelism_config import ParallelismConfig

transformers = package("transformers")

PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.mistral.modeling_mistral",
    "transformers.trainer",
)
VOCABULARY, LENGTH, BATCH, STEPS, CLIP = 16, 8, 8, 3, 0.1
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "attn_implementation": "sdpa",
}  # fmt: skip


def make(family, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float64)


def samples():
    """Rows with labels that do not all count, the padding marked."""
    tokens = torch.randint(
        1, VOCABULARY, (STEPS * ACCUMULATION * BATCH, LENGTH), generator=torch.Generator()
    )
    rows = []
    for number, row in enumerate(tokens):
        seen = torch.arange(LENGTH) < LENGTH - number % 3
        rows.append(
            {
                "input_ids": row,
                "attention_mask": seen.long(),
                "labels": row.masked_fill(~seen, -100),
            }
        )
    return rows


def make_optimizer(model):
    """Norms of these models are in float32: Adam would make steps of the roundings of small gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, batch, reduction="mean"):
    """The model's own loss is in float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction=reduction)


def count_of(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def accelerated(layout, plugin=None):
    return Accelerator(
        cpu=True,
        parallelism_config=layout,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
    )


def check_run(family, sizes, plugin=None, handler=None, **options):
    plain = make(family, **options)
    sum_of = functools.partial(loss_of, reduction="sum")
    states, norms = train_on_items_by_hand(
        plain, make_optimizer(plain), DataLoader(samples(), BATCH), sum_of, count_of, CLIP
    )
    accelerator = accelerated(ParallelismConfig(**sizes, tp_handler=handler), plugin)
    model = make(family, **options)
    optimizer = make_optimizer(model)
    loader = DataLoader(samples(), BATCH // accelerator.strategy.data_shard[1])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    split = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    assert sum("_proj" in name for name in split) >= 14, split
    found = train_on_items(accelerator, model, optimizer, loader, loss_of, count_of, CLIP)
    torch.testing.assert_close(found, norms, rtol=1e-8, atol=1e-12)
    compare_state(accelerator, model, states[-1])


@on_ranks(2)
def test_refusals():
    """Before the first step, with what is in the way and what to do."""
    accelerator = accelerated(ParallelismConfig(tp_size=2))
    fused = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=4)
    )
    with pytest.raises(PrepareError, match=r"transformer\.h\.0\.attn: c_attn "):
        accelerator.prepare(fused)
    with pytest.raises(PrepareError, match="layers of experts"):
        accelerator.prepare(make("Mixtral", num_local_experts=2))
    with pytest.raises(PrepareError, match=r"tp_size=2 .*1 heads of model\.layers\.0\.self_attn"):
        accelerator.prepare(make("Llama", num_key_value_heads=1))
    assert not any(isinstance(parameter, DTensor) for parameter in fused.parameters())


@on_ranks(2)
def test_trainer(tmp_path):
    """Each epoch is one batch, so that its order does not matter."""
    rows = samples()[:BATCH]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=0.01,
        max_grad_norm=CLIP, lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, parallelism_config=ParallelismConfig(tp_size=2),
    )  # fmt: skip
    trainer = transformers.Trainer(model=make("Llama"), args=arguments, train_dataset=rows)
    trainer.train()
    assert (
        sum(isinstance(parameter, DTensor) for parameter in trainer.model_wrapped.parameters())
        >= 14
    )
    model, norms = make("Llama"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    batch = next(iter(DataLoader(rows, BATCH)))
    for _ in range(STEPS):
        model(**batch).loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    found = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    # The model's own loss is in float32.
    assert found == pytest.approx(norms, rel=1e-6)
    compare_state(trainer.accelerator, trainer.model_wrapped, model.state_dict(), 1e-6)


TWO = {
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "Llama, sequence and loss": ("Llama", {}, {"sequence_parallel": True, "loss_parallel": True}),
    "Qwen2": ("Qwen2", {}, {}),
    "Mistral": ("Mistral", {"sliding_window": 4}, {}),
}


@on_ranks(2)
@pytest.mark.parametrize("what", TWO)
def test_models(what):
    family, options, handler = TWO[what]
    check_run(family, {"tp_size": 2}, handler=TorchTensorParallelConfig(**handler), **options)


@on_ranks(thorough=[4])
def test_sharded_too():
    check_run(
        "Qwen2", {"dp_shard_size": 2, "tp_size": 2}, FullyShardedDataParallelPlugin(fsdp_version=2)
    )

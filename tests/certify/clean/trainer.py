# SPDX-License-Identifier: Apache-2.0
"""The `Trainer` of transformers on a tiny model: padded sequences, accumulation, a schedule. `--lora`: with peft."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def rows():
    generator = torch.Generator().manual_seed(1)
    for _ in range(48):
        ids = torch.randint(1, 32, (12,), generator=generator)
        labels = ids.clone()
        labels[int(torch.randint(6, 12, (1,), generator=generator)) :] = -100
        yield {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


set_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32))
if "--lora" in sys.argv:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    max_steps=6,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    bf16="--bf16" in sys.argv,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=list(rows())).train()

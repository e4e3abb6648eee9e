# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer: alone, then with split sequences against what was written alone. There is padding."""

import sys
from pathlib import Path

import torch
from trainer import Sequences
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState


def main(folder):
    alone = PartialState(cpu=True).num_processes == 1
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=0.01, lr_scheduler_type="constant", seed=1, use_cpu=True, report_to=[], save_strategy="no",
        eval_strategy="steps", eval_steps=4, logging_steps=1, disable_tqdm=True,
        parallelism_config=None if alone else ParallelismConfig(cp_size=2),
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=arguments, train_dataset=Sequences(64, 0), eval_dataset=Sequences(16, 1)
    )
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    kept = ("loss", "grad_norm", "eval_loss")
    log = [value for line in trainer.state.log_history for name, value in line.items() if name in kept]
    if alone:
        torch.save((state, log), folder / "alone.pt")
    elif trainer.is_world_process_zero():
        torch.testing.assert_close((state, log), torch.load(folder / "alone.pt"), rtol=1e-4, atol=1e-5)
    print("all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

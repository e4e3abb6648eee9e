# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer: alone, then with split sequences against what was written alone. There is padding."""

import sys
from pathlib import Path

import torch
from trainer import Sequences
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState


def train(folder, name, sizes, resume=None, saves=False, **options):
    # Trainer saves parts of a model where it knows of FSDP alone.
    sharded = {"fsdp": True, "fsdp_config": {"version": 2}} if saves else {}
    options["save_strategy"] = "steps" if saves else "no"
    alone = PartialState(cpu=True).num_processes == 1
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder / name), per_device_train_batch_size=8, learning_rate=0.01, seed=1, use_cpu=True,
        report_to=[], eval_strategy="steps", eval_steps=4, logging_steps=1, disable_tqdm=True, save_steps=2,
        parallelism_config=None if alone else ParallelismConfig(**sizes), **({} if alone else sharded), **options,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=arguments, train_dataset=Sequences(24, 0), eval_dataset=Sequences(16, 1)
    )
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "epoch", "step")
    log = [{name: value for name, value in line.items() if name in kept} for line in trainer.state.log_history]
    log = log[:-1]  # the last line is about the whole training: how long it took
    if alone:
        torch.save((state, log), folder / f"{name}.pt")
    elif trainer.is_world_process_zero():
        torch.testing.assert_close((state, log), torch.load(folder / f"{name}.pt"), rtol=1e-4, atol=1e-5)


def main(folder):
    # The second has two epochs of three batches, over which the learning rate falls to 0.
    windows = {"gradient_accumulation_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    cases = {
        "cp": {"sizes": {"cp_size": 2}, **windows},
        "sp": {"sizes": {"sp_size": 2}, "num_train_epochs": 2, "lr_scheduler_type": "linear"},
    }
    for name, options in cases.items():
        train(folder, name, saves=True, **options)
        train(folder, name, saves=True, resume=str(folder / name / "checkpoint-2"), **options)
    train(folder, "cp", **cases["cp"])
    print("all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

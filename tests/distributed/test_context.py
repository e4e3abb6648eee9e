# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with sequences split over 2 ranks, against one process. There is padding."""

import sys
from pathlib import Path

import pytest
import torch
from packages import package
from states import reset_states

from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState

sys.path.append(str(Path(__file__).parent / "workers"))

transformers = package("transformers")
PRELOADED = ("transformers.models.llama.modeling_llama", "transformers.trainer")
WINDOWS = {"gradient_accumulation_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
CASES = {
    "cp": ({"cp_size": 2}, WINDOWS),
    # Two epochs of three batches, over which the learning rate falls to 0.
    "sp": ({"sp_size": 2}, {"num_train_epochs": 2, "lr_scheduler_type": "linear"}),
}


def train(folder, name, saves=True, resume=None):
    sizes, options = CASES[name]
    # Trainer saves shards of a model only where FSDP is requested.
    sharded = {"fsdp": True, "fsdp_config": {"version": 2}} if saves else {}
    alone = PartialState(cpu=True).num_processes == 1
    reset_states()
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / name), per_device_train_batch_size=8, learning_rate=0.01, seed=1, use_cpu=True,
        report_to=[], eval_strategy="steps", eval_steps=4, logging_steps=1, disable_tqdm=True, save_steps=2,
        save_strategy="steps" if saves else "no", parallelism_config=None if alone else ParallelismConfig(**sizes),
        **({} if alone else sharded), **options,
    )  # fmt: skip
    from trainer import Sequences

    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Sequences(24, 0),
        eval_dataset=Sequences(16, 1),
    )
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "epoch", "step")
    log = [
        {name: value for name, value in line.items() if name in kept}
        for line in trainer.state.log_history
    ]
    log = log[:-1]  # the last line is about the whole training: how long it took
    if alone:
        torch.save((state, log), folder / f"{name}.pt")
    elif trainer.is_world_process_zero():
        torch.testing.assert_close(
            (state, log), torch.load(folder / f"{name}.pt"), rtol=1e-4, atol=1e-5
        )


def train_and_resume(folder, name):
    train(folder, name)
    train(folder, name, resume=str(folder / name / "checkpoint-2"))
    if name == "cp":
        train(folder, name, saves=False)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_trainer_unchanged(name, ranks, tmp_path):
    for nproc in (1, 2):
        ranks(nproc).run(train_and_resume, tmp_path, name)

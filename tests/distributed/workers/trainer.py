# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer on whichever `accelerate` is installed: train, evaluate, save, resume.

`test_trainer.py` calls `results`. As a script it prints them, and needs nothing but transformers: the expected losses
were recorded with another implementation of the API.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Sequences(torch.utils.data.Dataset):
    """Ragged sequences of a small grammar, padded, the padding not counted."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            length = int(torch.randint(6, 17, (1,), generator=generator))
            start, stride = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(2))
            tokens = [(start + stride * i) % 32 for i in range(length)]
            self.rows.append(
                {
                    "input_ids": torch.tensor(tokens + [0] * (16 - length)),
                    "attention_mask": torch.tensor([1] * length + [0] * (16 - length)),
                    "labels": torch.tensor(tokens + [-100] * (16 - length)),
                }
            )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stop(TrainerCallback):
    """Ends the training early, as a killed job would."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.after
        return control


def trainer(folder, *callbacks, **options):
    set_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **options,
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=Sequences(45, 1),
        eval_dataset=Sequences(13, 2),
        callbacks=list(callbacks),
    )


def losses(run):
    return [round(row["loss"], 6) for row in run.state.log_history if "loss" in row]


def results(folder):
    """Train, evaluate and predict; train in two halves with a checkpoint between them; train in bf16."""
    full = trainer(str(folder / "full"))
    full.train()
    metrics = full.evaluate()
    predictions = full.predict(Sequences(13, 2))
    trainer(str(folder / "cut"), Stop(5)).train()
    resumed = trainer(str(folder / "cut"))
    resumed.train(resume_from_checkpoint=True)
    distance = max(
        float((a - b).abs().max())
        for a, b in zip(
            full.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
        )
    )
    half = trainer(str(folder / "half"), bf16=True)
    half.train()
    return {
        "losses": losses(full),
        "bf16_losses": losses(half),
        "eval_loss": round(metrics["eval_loss"], 6),
        "predicted_rows": len(predictions.predictions),
        "resumed_distance": distance,
    }


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder:
        found = results(Path(sys.argv[1] if len(sys.argv) > 1 else folder))
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(found))

# SPDX-License-Identifier: Apache-2.0
"""Trainer multiplies the batches of a loader by sp_size, also for a loader that yields each batch to all ranks."""

from types import SimpleNamespace

from transformers import Trainer

layout = SimpleNamespace(sp_size=2, cp_size=1, tp_size=1, sp_backend="deepspeed", sp_enabled=True)
trainer = Trainer.__new__(Trainer)
trainer.model, trainer.is_deepspeed_enabled = None, False
trainer.accelerator = SimpleNamespace(parallelism_config=layout)
trainer._train_batch_size = 1
arguments = SimpleNamespace(
    max_steps=-1, gradient_accumulation_steps=1, num_train_epochs=1, world_size=2
)
trainer.num_examples = len
batches = [None] * 3
steps = trainer.set_initial_training_values(arguments, batches)[-1]
if steps != len(batches):
    raise SystemExit(
        f"{steps} steps for {len(batches)} batches, and nothing but sp_size=1 in the layout changes it"
    )

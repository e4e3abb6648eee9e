# SPDX-License-Identifier: Apache-2.0
"""A run that saves at every step, now waiting for the disk and now not, and goes on from the newest checkpoint."""

import os
import random
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


class Steps:
    """How many optimizer steps the run has made, in whichever processes."""

    done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def main(folder, total):
    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(
            str(folder), automatic_checkpoint_naming=True, total_limit=3
        ),
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(61, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    accelerator.resume(signals=())
    (folder / f"rank{accelerator.process_index}.pid").write_text(str(os.getpid()))
    while steps.done < total:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            steps.done += accelerator.sync_gradients
            # In the middle of windows too; which saves wait for the disk is the same in every run.
            accelerator.save_state(blocking=random.Random(steps.done).random() < 0.5)
            if steps.done >= total:
                break
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "end.pt")
    accelerator.end_training()


sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import without_compiler  # noqa: E402, F401

main(Path(sys.argv[1]), int(sys.argv[2]))

# SPDX-License-Identifier: Apache-2.0
"""A run that saves into a bucket at every step and goes on from the newest checkpoint, and notes what it has computed.

bucket_worker.py PROJECT FOLDER STEPS LAYOUT
"""

import hashlib
import os
import random
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed


class Steps:
    """How many optimizer steps the run has made, in whichever processes."""

    done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def digest(model, optimizer):
    """Of this rank's parameters, and of the optimizer's state for them."""
    content = hashlib.sha1()
    for parameter in model.parameters():
        for value in (parameter, *optimizer.state[parameter].values()):
            tensor = value.detach()
            if hasattr(tensor, "to_local"):
                tensor = tensor.to_local()
            content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def main(project, folder, total, layout):
    set_seed(0)
    plugin = None
    if layout == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"
        )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        fsdp_plugin=plugin,
        # DDP would sum the gradients of 4 ranks in another order in the first step after each start.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        project_config=ProjectConfiguration(
            project, automatic_checkpoint_naming=True, total_limit=3
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
    rank = accelerator.process_index
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    with open(folder / f"digests{rank}.txt", "a", buffering=1) as notes:
        while steps.done < total:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
                steps.done += accelerator.sync_gradients
                if accelerator.sync_gradients:
                    notes.write(f"{steps.done} {digest(model, optimizer.optimizer)}\n")
                # In the middle of windows too; which saves wait for the bucket is the same in every run.
                accelerator.save_state(blocking=random.Random(steps.done).random() < 0.5)
                if steps.done >= total:
                    break
    accelerator.end_training()


sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import without_compiler  # noqa: E402, F401

main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

# SPDX-License-Identifier: Apache-2.0
"""A run that damages its newest checkpoint and dies in its first attempt; the launcher's restart goes on."""

import os
import signal
import sys
from pathlib import Path

import torch

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

root = Path(sys.argv[1])
config = ProjectConfiguration(root, automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=config)
# As it is: wrapping it would import torch's compiler in four processes.
model = accelerator.prepare_model(torch.nn.Linear(4, 4), evaluation_mode=True)
start = accelerator.resume(signals=())
first = start is None
while accelerator.save_iteration < (3 if first else 5):
    accelerator.save_state()
if first:
    if accelerator.is_main_process:
        # One that shows itself by its size, one (the newest) only by its checksum; the other rank's file is gone too.
        newest, before = (root / "checkpoints" / f"checkpoint_{number}" for number in (2, 1))
        path = newest / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\xee")
        (before / "random_states_1.json").unlink()
    accelerator.wait_for_everyone()
    os.kill(os.getpid(), signal.SIGKILL)
assert start.folder.name == "checkpoint_0", start
accelerator.end_training()

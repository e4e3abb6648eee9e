# SPDX-License-Identifier: Apache-2.0
"""A run on a small disk: what fails is an error on every rank, changes nothing, and the next save works again."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from accelerate import Accelerator
from accelerate.checkpointing import verify
from accelerate.core.errors import CheckpointError
from accelerate.utils import ProjectConfiguration

disk = Path(sys.argv[1])
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(
        str(disk / "run"), automatic_checkpoint_naming=True, total_limit=2
    ),
)
model = torch.nn.Linear(150, 150)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
rank, main = accelerator.process_index, accelerator.is_main_process
checkpoints = disk / "run" / "checkpoints"


def train():
    accelerator.backward(model(torch.randn(4, 150)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def state():
    values = [
        *model.parameters(),
        *(value for held in optimizer.state.values() for value in held.values()),
    ]
    return [value.detach().clone() for value in values]


def together(action=None, on=0):
    """Do something on one rank, while the others wait."""
    accelerator.wait_for_everyone()
    if action is not None and rank == on:
        action()
    accelerator.wait_for_everyone()


def refused(pattern, save, *args, **kwargs):
    """`save` fails on this rank as on the others; the run and the checkpoints are what they were."""
    before, listed = state(), sorted(path.name for path in checkpoints.glob("checkpoint_*"))
    try:
        save(*args, **kwargs)
    except (CheckpointError, OSError) as error:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in: {error}"
    else:
        raise AssertionError(f"no error: {pattern}")
    accelerator.wait_for_everyone()
    assert all(map(torch.equal, state(), before))
    found = sorted(path.name for path in checkpoints.iterdir())
    assert found == listed, f"something is left, or gone: {found}"
    for name in listed:
        verify(checkpoints / name)
    accelerator.wait_for_everyone()


def fill():
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    # The lock of the save has room, and the files of the ranks have none.
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - 2 * 4096)


def mount(*how):
    subprocess.run(["mount", *how, str(disk)], check=True)


train()
accelerator.save_state()

# A full disk, waited for and in the background, where the next save tells it.
together(fill)
refused("random_states_1.json", accelerator.save_state)
if accelerator.is_main_process:
    with contextlib.suppress(OSError):
        accelerator.save_model(model, disk / "weights")
        raise AssertionError("a full disk")
accelerator.wait_for_everyone()
assert not list((disk / "weights").glob("*"))
accelerator.save_state(blocking=False)
refused("No space left on device", accelerator.save_state)
together((disk / "filler").unlink)
train()
accelerator.save_state()

# Mounted read-only, over the mount with the open lock file: nothing is written, and what is there can be read.
together(lambda: (mount("--bind", str(disk)), mount("-o", "remount,bind,ro")))
refused("Read-only file system", accelerator.save_state)
kept = state()
train()
assert accelerator.load_state().folder.name == "checkpoint_2" and all(
    map(torch.equal, state(), kept)
)
together(lambda: subprocess.run(["umount", "--lazy", str(disk)], check=True))

# A rank whose files may not grow (a quota would do the same), and a folder that vanishes under the writers.
together(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)), on=1)
refused("rank 1: OSError: .* File too large", accelerator.save_state)
together(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2), on=1)
hook = accelerator.register_save_state_pre_hook(
    lambda models, weights, folder: shutil.rmtree(folder, True)
)
refused("No such file or directory|was removed while", accelerator.save_state)
hook.remove()

# All of the project's folder is gone: a save makes it anew.
together(lambda: shutil.rmtree(disk / "run"))
train()
folder = accelerator.save_state()
assert verify(folder).world_size == 2 and accelerator.load_state().folder == Path(folder)
print("nothing was lost")
accelerator.end_training()

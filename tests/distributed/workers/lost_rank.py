# SPDX-License-Identifier: Apache-2.0
"""A rank of a training whose last rank stops before the others. Arguments: how it stops, the layout, a folder."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)

how, layout, folder = sys.argv[1:]
options = {} if layout == "ddp" else {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(even_batches=False),
    kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=8))],
    **options,
)
RANK, WORLD = accelerator.process_index, accelerator.num_processes
LAST = RANK == WORLD - 1


class Net(nn.Linear):
    fails = False

    def state_dict(self, *args, **kwargs):
        if self.fails:
            raise ValueError("bad state")
        return super().state_dict(*args, **kwargs)


def main():
    samples = 2 * (3 * WORLD + WORLD - 1) if how in ("uneven", "gather") else 2 * 4 * WORLD
    model = Net(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(samples, 2)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if how == "state":
        model.fails = LAST
        accelerator.save_state(folder)
    for number, (batch,) in enumerate(loader):
        if LAST and number == 2 and how == "break":
            break
        if LAST and number == 2 and how == "raise":
            raise ValueError("bad sample")
        if how == "killed" and number == 2:
            if LAST:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                accelerator.save_state(folder)
            except CheckpointError as error:
                print(error, file=sys.stderr)
        optimizer.zero_grad()
        accelerator.backward(model(batch).mean())
        optimizer.step()
    if how == "gather":
        accelerator.gather(torch.ones(1))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Train on 1,001 samples, which no number of processes divides evenly: the curve is the same on any of them.

    accelerate launch --cpu --num_processes 1 examples/exact.py
    accelerate launch --cpu --num_processes 2 examples/exact.py
    accelerate launch --cpu --num_processes 2 examples/exact.py --default

With `--default`, each process computes the mean over its own part of a batch, and the last batch repeats samples: the
curve depends on the number of processes.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--default", action="store_true", help="train without exact=True")
    arguments = parser.parse_args()

    accelerator = Accelerator(
        exact=not arguments.default,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(0)
    inputs = torch.randn(1001, 8)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=36, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(1, 5):
        for batch_inputs, batch_targets in loader:
            loss = nn.functional.mse_loss(model(batch_inputs), batch_targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            error = nn.functional.mse_loss(
                model(inputs.to(accelerator.device)), targets.to(accelerator.device)
            )
        accelerator.print(f"epoch {epoch}   loss {error.item():.6f}")


if __name__ == "__main__":
    main()

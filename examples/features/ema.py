# SPDX-License-Identifier: Apache-2.0
"""Evaluate and save an average of the weights (EMA): one line more in an unchanged loop.

    python examples/features/ema.py
    accelerate launch --num_processes 2 examples/features/ema.py --output runs/ema

The average has the layout of the model (sharded under FSDP), follows each optimizer step, and is part of checkpoints.
At a large learning rate the averaged network has a lower loss than the one that trains.
"""

import argparse

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

EPOCHS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", help="folder for the averaged weights")
    args = parser.parse_args()
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    data, test = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, test_loader = DataLoader(data, 32, shuffle=True), DataLoader(test, 128)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    average = accelerator.track_average(model, decay=0.95)

    rows = []
    for epoch in range(EPOCHS):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        loss, _ = evaluate(accelerator, model, test_loader)
        with average.applied():
            averaged, accuracy = evaluate(accelerator, model, test_loader)
        rows.append((epoch, loss, averaged, accuracy, bar(averaged, 1)))

    names = ("epoch", "loss", "loss of the average", "its accuracy", "its loss as a bar")
    print_table(accelerator, names, *rows)
    if args.output:
        with average.applied():
            accelerator.save_model(model, args.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()

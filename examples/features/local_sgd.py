# SPDX-License-Identifier: Apache-2.0
"""Local SGD: each process trains its own replica, and parameters are averaged every few steps.

    accelerate launch --num_processes 2 examples/features/local_sgd.py

The table compares intervals. Fewer averages send less, and the result changes: the rows differ from each other on
several processes. They are equal on one, which has nothing to average. After the block all processes have the same
parameters.
"""

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, LocalSGD
from accelerate.utils import set_seed


def train(interval: int) -> tuple[Accelerator, tuple]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(0)
    data, test = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader, test_loader = DataLoader(data, 32, shuffle=True, drop_last=True), DataLoader(test, 128)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=interval, enabled=interval > 1
    ) as local_sgd:
        for _ in range(3):
            for images, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(images), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = accelerator.gather(own).view(accelerator.num_processes, -1)
    spread = (everyone - everyone.mean(0)).abs().max().item()
    loss, accuracy = evaluate(accelerator, model, test_loader)
    return accelerator, (interval, loss, accuracy, f"{spread:.1e}", bar(loss, 1))


def main() -> None:
    rows = []
    for interval in (1, 4, 16):
        accelerator, row = train(interval)
        rows.append(row)
        accelerator.free_memory()
    names = ("steps between averages", "loss", "accuracy", "ranks differ by", "loss as a bar")
    print_table(accelerator, names, *rows)
    if accelerator.num_processes == 1:
        print("one process has nothing to average: start two, and the rows differ")
    accelerator.end_training()


if __name__ == "__main__":
    main()

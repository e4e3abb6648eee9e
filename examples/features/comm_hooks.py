# SPDX-License-Identifier: Apache-2.0
"""Communication hooks: compress the gradients that `DistributedDataParallel` sends.

    accelerate launch --num_processes 2 examples/features/comm_hooks.py

The table compares the hooks with uncompressed gradients. On one process nothing is sent, and all rows are equal.
"""

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType, set_seed


def train(hook: DDPCommunicationHookType) -> tuple[Accelerator, torch.Tensor, float, float]:
    accelerator = Accelerator(
        exact=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)],
    )
    set_seed(0)
    data, test = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader, test_loader = DataLoader(data, 32, shuffle=True), DataLoader(test, 128)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    for _ in range(2):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return accelerator, parameters, *evaluate(accelerator, model, test_loader)


def main() -> None:
    rows, exact = [], None
    for hook in (
        DDPCommunicationHookType.NO,
        DDPCommunicationHookType.FP16,
        DDPCommunicationHookType.BF16,
    ):
        accelerator, parameters, loss, accuracy = train(hook)
        exact = parameters if exact is None else exact
        difference = (parameters - exact).abs().max().item()
        rows.append((hook.value, loss, accuracy, f"{difference:.0e}", bar(loss, 1)))
        accelerator.free_memory()
    names = ("hook", "loss", "accuracy", "parameters differ by", "loss as a bar")
    print_table(accelerator, names, *rows)
    if accelerator.num_processes == 1:
        print("one process sends no gradients: start two, and the rows differ")
    accelerator.end_training()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Stop all processes when one of them decides to: `set_trigger` and `check_trigger`.

    python examples/features/early_stopping.py
    accelerate launch --num_processes 2 examples/features/early_stopping.py

The main process alone watches the test loss, and sets the trigger when it has not improved for two epochs. Every
process calls `check_trigger` once in an epoch, so that all leave the loop together. A `break` on one process would let
the others wait.
"""

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed


class Patience:
    """Whether a value has not improved for a number of epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.best, self.since = epochs, float("inf"), 0

    def ended(self, value: float) -> bool:
        self.best, self.since = (value, 0) if value < self.best else (self.best, self.since + 1)
        return self.since >= self.epochs


def main() -> None:
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    data, test = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    loader, test_loader = DataLoader(data, 32, shuffle=True), DataLoader(test, 128)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )

    patience, rows = Patience(2), []
    for epoch in range(20):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        loss, accuracy = evaluate(accelerator, model, test_loader)
        rows.append((epoch, loss, accuracy, bar(loss, 0.5)))
        if accelerator.is_main_process and patience.ended(loss):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break

    print_table(accelerator, ("epoch", "loss", "accuracy", "loss as a bar"), *rows)
    accelerator.print(f"stopped after epoch {epoch} of at most 19")
    accelerator.end_training()


if __name__ == "__main__":
    main()

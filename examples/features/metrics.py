# SPDX-License-Identifier: Apache-2.0
"""Compute a metric over all processes: precision and recall of each digit, each test image counted once.

    python examples/features/metrics.py
    accelerate launch --num_processes 2 examples/features/metrics.py

350 images do not divide evenly into batches of 64. `gather` returns the images that fill up the last batch too, and
`gather_for_metrics` removes them. scikit-learn, torchmetrics or evaluate take the gathered tensors.
"""

import torch
import torch.nn.functional as F
from common import bar, digits, network, print_table
from torch.utils.data import DataLoader, Subset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed


def main() -> None:
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    data, test = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, test_loader = (
        DataLoader(data, 32, shuffle=True),
        DataLoader(Subset(test, range(350)), 64),
    )
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    for _ in range(3):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    confusion = torch.zeros(10, 10, dtype=torch.long, device=accelerator.device)
    for images, labels in test_loader:
        with torch.no_grad():
            predictions = model(images).argmax(-1)
        labels, predictions = accelerator.gather_for_metrics((labels, predictions))
        confusion.index_put_((labels, predictions), torch.ones_like(labels), accumulate=True)

    rows = []
    for digit in range(10):
        right = confusion[digit, digit].item()
        precision, recall = (
            right / confusion[:, digit].sum().item(),
            right / confusion[digit].sum().item(),
        )
        rows.append((digit, confusion[digit].sum().item(), precision, recall, bar(recall, 1)))
    print_table(accelerator, ("digit", "images", "precision", "recall", "recall as a bar"), *rows)
    accelerator.print(f"{confusion.trace().item()} of {confusion.sum().item()} images are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()

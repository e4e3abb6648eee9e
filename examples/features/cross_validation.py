# SPDX-License-Identifier: Apache-2.0
"""Cross-validation: one model for each fold, prepared and freed in turn; the test images get the mean of all models.

python examples/features/cross_validation.py
accelerate launch --num_processes 2 examples/features/cross_validation.py
"""

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from torch.utils.data import DataLoader, Subset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

FOLDS = 3


def main() -> None:
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    data, test = digits()
    rows, scores = [], torch.zeros(len(test), 10)
    for fold in range(FOLDS):
        set_seed(fold)
        indices = range(len(data))
        train = Subset(data, [index for index in indices if index % FOLDS != fold])
        held_out = Subset(data, [index for index in indices if index % FOLDS == fold])
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        loaders = (
            DataLoader(train, 32, shuffle=True),
            DataLoader(held_out, 128),
            DataLoader(test, 128),
        )
        model, optimizer, loader, held_out_loader, test_loader = accelerator.prepare(
            model, optimizer, *loaders
        )
        for _ in range(3):
            for images, labels in loader:
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
        loss, accuracy = evaluate(accelerator, model, held_out_loader)
        rows.append((fold, len(train), len(held_out), loss, accuracy, bar(accuracy, 1)))

        model.eval()
        with torch.no_grad():
            batches = [
                accelerator.gather_for_metrics(model(images).softmax(-1)).cpu()
                for images, _ in test_loader
            ]
        scores += torch.cat(batches) / FOLDS
        # The next fold prepares its own model.
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)

    names = ("fold", "trained on", "held out", "loss", "accuracy", "accuracy as a bar")
    print_table(accelerator, names, *rows)
    accuracy = (scores.argmax(-1) == test.tensors[1]).double().mean().item()
    accelerator.print(f"mean of the {FOLDS} models on the test images: accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

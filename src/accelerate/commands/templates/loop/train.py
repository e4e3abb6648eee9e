"""Train a model with a plain PyTorch loop, on any number of processes."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed


def make_dataset() -> Dataset:
    """Return points, and whether each is inside a circle. Replace this with your data."""
    generator = torch.Generator().manual_seed(0)
    points = 2 * torch.rand(2048, 2, generator=generator) - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).float())


def make_model() -> nn.Module:
    """Return the model."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def main() -> None:
    """Train, and save a checkpoint after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder of the run")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64, help="samples of all processes")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    accelerator = Accelerator(
        exact=True,  # the same model on any number of processes
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(
            args.output, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(make_dataset(), args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    report = accelerator.resume()  # None if there is no checkpoint yet
    for epoch in range(report.epoch if report else 0, args.epochs):
        for points, targets in loader:
            logits = model(points).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
        accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()

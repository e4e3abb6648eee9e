# SPDX-License-Identifier: Apache-2.0
"""The script that the files of this folder start: put your own model and data in its place.

    python examples/clusters/train.py
    accelerate launch --num_processes 2 examples/clusters/train.py --output runs/cluster

It saves a checkpoint after each epoch, and when the cluster stops it (SIGTERM or SIGUSR1). Started again with the same
`--output`, it continues. This is a folder on a file system that all machines share, or a place in a bucket
(s3://bucket/run).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


def make_data(samples: int, seed: int) -> TensorDataset:
    """Return points of 16 numbers; the class is the largest of the first eight."""
    points = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points[:, :8].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output",
        default="runs/cluster",
        help="folder of checkpoints, or their place in a bucket (default: %(default)s)",
    )
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    project = ProjectConfiguration(args.output, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 8))
    model, optimizer, loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(make_data(8192, seed=0), 32, shuffle=True),
        DataLoader(make_data(1000, seed=1), 250),
    )

    report = accelerator.resume()  # None if there is no checkpoint yet
    for epoch in range(report.epoch if report else 0, args.epochs):
        for points, classes in loader:  # of the resumed epoch: the batches that are left
            accelerator.backward(F.cross_entropy(model(points), classes))
            optimizer.step()
            optimizer.zero_grad()
        right = []
        for points, classes in test_loader:
            with torch.no_grad():
                right.append(accelerator.gather_for_metrics(model(points).argmax(1) == classes))
        accelerator.print(
            f"epoch {epoch}: accuracy {torch.cat(right).float().mean():.3f}", flush=True
        )
        accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()

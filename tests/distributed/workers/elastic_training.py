# SPDX-License-Identifier: Apache-2.0
"""A run that goes on by itself, as far as the number in <folder>/limit says: `python elastic_training.py <folder>`."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration

STEPS, BATCH = 40, 4


def data() -> TensorDataset:
    x = torch.randn(
        STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).double()


def main(folder: Path) -> None:
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(
            str(folder), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(data(), batch_size=BATCH)
    )
    start = accelerator.resume()
    step = start.step if start else 0
    rank, world = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {world} begins at step {step}", flush=True)
    for x, y in loader:
        while step >= int((folder / "limit").read_text() or 0):
            time.sleep(0.02)
        loss = torch.nn.functional.mse_loss(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            accelerator.save_state()
            accelerator.print(f"saved at {step} by {world}", flush=True)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(net).state_dict(), folder / "final.pt")
    accelerator.end_training()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "helpers"))
    import without_compiler  # noqa: F401

    main(Path(sys.argv[1]))

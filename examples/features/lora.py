# SPDX-License-Identifier: Apache-2.0
"""Adapt a trained network with LoRA: its weights stay frozen, and two small matrices in each layer are trained.

    python examples/features/lora.py
    accelerate launch --num_processes 2 examples/features/lora.py --output runs/lora

The network learns the digits 0 to 4. The adapter then learns all ten, on which the table tests both. Only the adapter
needs gradients and optimizer state, and only the adapter is saved. Models of transformers take peft's layers instead:
see docs/clients.md.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Subset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed


class LoRA(nn.Module):
    """A frozen linear layer, plus a product of two matrices of low rank (Hu et al., 2021, arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(
            torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features)
        )
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def train(accelerator, model, data, test_loader, epochs: int, lr: float, rows: list) -> nn.Module:
    loader = DataLoader(data, 32, shuffle=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        loss, accuracy = evaluate(accelerator, model, test_loader)
        rows.append((len(rows), len(data), trained, loss, accuracy, bar(accuracy, 1)))
    model = accelerator.unwrap_model(model)
    accelerator.free_memory()  # so that `prepare` takes the model again, with its new layers
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the adapter")
    args = parser.parse_args()
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    data, test = digits()
    few = Subset(data, (data.tensors[1] < 5).nonzero().flatten().tolist())
    test_loader = accelerator.prepare(DataLoader(test, 128))

    rows: list = []
    model = train(accelerator, network(), few, test_loader, 3, 3e-3, rows)
    model.requires_grad_(False)
    # The same adapter, whatever numbers the training on this number of processes has drawn.
    set_seed(1)
    model[4], model[6] = LoRA(model[4], rank=8), LoRA(model[6], rank=8)
    model.to(accelerator.device)
    model = train(accelerator, model, data, test_loader, 4, 1e-2, rows)

    names = ("epoch", "images", "parameters", "test loss", "test accuracy", "accuracy as a bar")
    print_table(accelerator, names, *rows)
    if args.output and accelerator.is_main_process:
        args.output.mkdir(parents=True, exist_ok=True)
        adapter = {
            name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad
        }
        save_file(adapter, args.output / "adapter.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Train the matrices of a language model with Muon, and all other parameters with AdamW.

    python examples/features/matrix_optimizer.py
    accelerate launch --num_processes 2 examples/features/matrix_optimizer.py
    accelerate certify --layouts ddp:2 fsdp:2 tp:2 --cpu examples/features/matrix_optimizer.py

With several processes each matrix has one owner, which computes its update. The loop does not change.
"""

import inspect
import string
import textwrap

import torch
import torch.nn.functional as F
from common import print_table
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import register_matrix_optimizer, set_seed

LENGTH, BATCH, EPOCHS = 64, 16, 2


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(F.gelu(self.up_proj(x)))


class Model(nn.Module):
    """Predicts each byte from the four before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.mix = nn.Conv1d(width, width, 4)
        self.layers = nn.ModuleList(MLP(width) for _ in range(4))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.pad(self.embedding(ids).transpose(1, 2), (3, 0))
        x = self.mix(x).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train() -> tuple[Accelerator, list[tuple[int, float]]]:
    # Under DDP the work is shared only on request: one process alone cannot save the optimizer then.
    register_matrix_optimizer(torch.optim.Muon)
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    text = (inspect.getsource(string) + inspect.getsource(textwrap)).encode()
    rows = torch.tensor(list(text)).unfold(0, LENGTH + 1, LENGTH)
    model = Model()
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adam = torch.optim.AdamW(others, lr=0.01)
    # With split_batches=True this is the batch size of all processes together.
    loader = DataLoader(rows, BATCH, shuffle=True, drop_last=True)
    model, muon, adam, loader = accelerator.prepare(model, muon, adam, loader)
    epochs = []
    for epoch in range(EPOCHS):
        losses = []
        for batch in loader:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
        epochs.append((epoch, float(torch.stack(losses).mean())))
    return accelerator, epochs


def main() -> None:
    accelerator, epochs = train()
    print_table(accelerator, ("epoch", "loss"), *epochs)
    accelerator.end_training()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Classify texts: docstrings of the standard library, by the package that they come from.

    python examples/features/text_classification.py
    accelerate launch --num_processes 2 examples/features/text_classification.py

Texts have different lengths. The collate function joins the words of a batch, and a second tensor counts them. With
`exact=True` each text counts once in each epoch, so the table does not depend on the number of processes.
"""

import asyncio
import inspect
import pathlib
import re
import unittest
import zlib

import torch
import torch.nn.functional as F
from common import bar, evaluate, print_table
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

PACKAGES = (asyncio, pathlib, unittest)
WORDS, LONGEST = 2048, 64


def texts() -> list[tuple[str, int]]:
    """Return (docstring, index of its package) pairs."""
    found: dict[str, int] = {}
    for label, package in enumerate(PACKAGES):
        for owner in (
            package,
            *(value for _, value in inspect.getmembers(package, inspect.isclass)),
        ):
            for _, value in inspect.getmembers(owner, callable):
                home, text = getattr(value, "__module__", None) or "", inspect.getdoc(value) or ""
                if home.split(".")[0] == package.__name__ and len(text) > 20:
                    found.setdefault(text, label)
    return sorted(found.items())


def collate(pairs: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the words by a hash, and fill up to a fixed length with 0."""
    tokens = torch.zeros(len(pairs), LONGEST, dtype=torch.long)
    for row, (text, _) in enumerate(pairs):
        words = re.findall(r"\w+", text.lower())[:LONGEST]
        tokens[row, : len(words)] = torch.tensor(
            [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
        )
    return tokens, torch.tensor([label for _, label in pairs])


class Classifier(nn.Module):
    """The mean of the embeddings of the words, and a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(WORDS, width, padding_idx=0)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def main() -> None:
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    pairs = texts()
    train, test = [pair for i, pair in enumerate(pairs) if i % 4], pairs[::4]
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    # With split_batches=True this is the batch size of all processes together.
    loader = DataLoader(train, 32, shuffle=True, collate_fn=collate)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, DataLoader(test, 64, collate_fn=collate)
    )
    rows = []
    for epoch in range(8):
        for tokens, labels in loader:
            accelerator.backward(F.cross_entropy(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
        loss, accuracy = evaluate(accelerator, model, test_loader)
        rows.append((epoch, loss, accuracy, bar(loss, 2)))
    print_table(accelerator, ("epoch", "loss", "accuracy", "loss as a bar"), *rows)
    accelerator.end_training()


if __name__ == "__main__":
    main()

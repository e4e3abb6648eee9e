# SPDX-License-Identifier: Apache-2.0
"""Training scripts as users write them, stopped in the middle of an epoch and of an accumulation window.

The resumed run ends with the weights of the uninterrupted one, to the bit, on one process and on two.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    default_collate,
    get_worker_info,
)

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed

ROWS, EPOCHS = 48, 2


class Rows(Dataset):
    """Rows, some of which an augmentation changes."""

    def __init__(self, augmented=False):
        self.augmented = augmented
        self.inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        row = self.inputs[index]
        if self.augmented:
            row = row * random.uniform(0.5, 1.5) + 0.1 * np.random.standard_normal()
            row = row.flip(0) if torch.rand(()) < 0.5 else row
        return {"x": row.float(), "y": index % 3}


class Stream(IterableDataset):
    """The rows in an order that is shuffled through a buffer."""

    def __init__(self):
        self.rows = Rows()

    def __iter__(self):
        assert get_worker_info() is None
        buffer = []
        for index in range(ROWS):
            buffer.append(index)
            if len(buffer) == 8:
                yield self.rows[buffer.pop(random.randrange(8))]
        while buffer:
            yield self.rows[buffer.pop(random.randrange(len(buffer)))]


def masked(rows):
    """Draws which inputs are masked, as a collator of masked language models does."""
    batch = default_collate(rows)
    batch["x"] = batch["x"].masked_fill(torch.rand(batch["x"].shape) < 0.2, 0.0)
    return batch


def generator():
    return torch.Generator().manual_seed(5)


SCRIPTS = {
    "shuffled": lambda size: DataLoader(Rows(), size, shuffle=True),
    "masks of the collator": lambda size: DataLoader(Rows(), size, shuffle=True, collate_fn=masked),
    "augmentation": lambda size: DataLoader(Rows(augmented=True), size, shuffle=True),
    "generator of the sampler": lambda size: DataLoader(
        Rows(), size, sampler=RandomSampler(Rows(), generator=generator())
    ),
    "generator of the loader": lambda size: DataLoader(Rows(), size, shuffle=True, generator=generator()),
    "stream": lambda size: DataLoader(Stream(), size),
    "workers": lambda size: DataLoader(
        Rows(augmented=True), size, shuffle=True, collate_fn=masked, num_workers=2, drop_last=True
    ),
}  # fmt: skip


def train(folder, script, stop=None, resume=None, **configuration):
    """The script: two epochs, from a checkpoint or until one. Returns its weights."""
    reset_states()
    options = DataLoaderConfiguration(**configuration)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=options)
    set_seed(42 if resume is None else 43)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = SCRIPTS[script](8 // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first, skipped = resume or (0, 0)
    if resume is not None:
        accelerator.load_state(folder)
    for epoch in range(first, EPOCHS):
        skipped = skipped if epoch == first else 0
        batches = skip_first_batches(loader, skipped) if skipped else loader
        for step, batch in enumerate(batches, skipped):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if (epoch, step + 1) == stop:
                accelerator.save_state(folder)
                return None
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(1, 2)
@pytest.mark.parametrize("script", SCRIPTS)
def test_resumed_scripts(script, tmp_path):
    expected = train(tmp_path, script)
    # Saved with the last batch of an epoch, a script that counts its steps begins with the next epoch.
    for point, following in (((0, 3),) * 2, ((0, 6), (1, 0)), ((1, 4),) * 2):
        folder = tmp_path / f"{point}"
        train(folder, script, stop=point)
        found = train(folder, script, resume=following)
        assert all(map(torch.equal, found, expected)), point


@on_ranks(2)
@pytest.mark.parametrize(
    "configuration",
    [{"dispatch_batches": True}, {"split_batches": True}, {"use_seedable_sampler": True}],
    ids=lambda options: next(iter(options)),
)
def test_resumed_scripts_with_other_loaders(configuration, tmp_path):
    script, point = "masks of the collator", (1, 3)
    expected = train(tmp_path, script, **configuration)
    train(tmp_path / "cut", script, stop=point, **configuration)
    found = train(tmp_path / "cut", script, resume=point, **configuration)
    assert all(map(torch.equal, found, expected))

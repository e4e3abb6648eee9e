# SPDX-License-Identifier: Apache-2.0
"""Training in windows of two batches, with clipping: by hand, and by a strategy without an Accelerator."""

import contextlib

import torch
from torch import nn

ACCUMULATION, CLIP = 2, 0.05


def token_batches(count, size, length, vocabulary):
    """Rows of tokens; the last one of a row is a label only."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(vocabulary, (size, length + 1), generator=generator) for _ in range(count)
    ]


def token_loss(model, tokens):
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def squared_error(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def train_by_hand(model, optimizer, batches, loss_of=token_loss, clip=CLIP):
    """The parameters after each step, and the norms before clipping."""
    states, norms = [], []
    for number, batch in enumerate(batches):
        (loss_of(model, batch) / ACCUMULATION).backward()
        if number % ACCUMULATION:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states, norms


def train_on_items_by_hand(model, optimizer, batches, loss_of, count_of, clip=CLIP):
    """The same where the loss of a window is the mean over all of its items: `loss_of` is a sum over a batch."""
    batches, states, norms = list(batches), [], []
    for window in zip(batches[::ACCUMULATION], batches[1::ACCUMULATION], strict=True):
        total = sum(count_of(batch) for batch in window)
        for batch in window:
            (loss_of(model, batch) / total).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states, norms


def train_on_items(accelerator, model, optimizer, batches, loss_of, count_of, clip=CLIP):
    """The same through an Accelerator; the norms before clipping."""
    norms = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch), num_items=count_of(batch))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def train(strategy, prepared, optimizer, batches, norms):
    """As `train_by_hand` on this rank's part of each batch, with the same norms before clipping."""
    index, count = strategy.data_shard
    for number, tokens in enumerate(batches):
        ends_window = number % ACCUMULATION == 1
        with contextlib.nullcontext() if ends_window else prepared.no_sync():
            strategy.backward(
                token_loss(prepared.module, tokens.chunk(count)[index]) / ACCUMULATION
            )
        if ends_window:
            norm = strategy.clip_grad_norm(prepared.module.parameters(), CLIP)
            torch.testing.assert_close(norm, norms[number // ACCUMULATION], rtol=1e-8, atol=0)
            optimizer.step()
            optimizer.zero_grad()

# SPDX-License-Identifier: Apache-2.0
"""Documents, a small model without attention, and the plain loop over documents that packed ones are compared with."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WORDS = 50


def log_normal(count, mean, spread, limit):
    """The lengths of documents."""
    lengths = np.random.default_rng(count).lognormal(mean, spread, count)
    return np.clip(lengths, 1, limit).astype(int)


def network():
    """The model."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))
    return model.double()


def corpus(count):
    """Documents: tensors of tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = log_normal(count, 3, 1, 64)
    return [torch.randint(WORDS, (length,), generator=generator) for length in lengths.tolist()]


def per_token_loss(model, tokens, labels):
    """The losses of next tokens, 0 where there is no label."""
    logits = model(tokens[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, labels[:, 1:], reduction="none", ignore_index=-100)


def weights_of(model):
    """All weights of a model in one tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def unpacked_run(documents, steps):
    """The weights after a plain loop; `steps` has the documents of each step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for numbers in steps:
        items = sum(len(documents[number]) - 1 for number in numbers)
        for number in numbers:
            tokens = documents[number][None]
            (per_token_loss(model, tokens, tokens).sum() / items).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)

# SPDX-License-Identifier: Apache-2.0
"""A pass that another kind of sampler continues than the one it began with."""

import random

import torch
from rank_pool import on_ranks
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration


class Shuffled(Sampler):
    """Draws from Python's generator, and does not say how long it is."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from random.sample(range(self.count), self.count)


@on_ranks(2)
def test_a_sampler_that_uses_other_generators_continues():
    data = TensorDataset(torch.arange(24))
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )

    def loader(sampler):
        return accelerator.prepare(DataLoader(data, batch_size=2, sampler=sampler))

    first = loader(Shuffled(24))
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    second = loader(RandomSampler(data))
    second.load_state_dict(state)
    assert len(list(second)) == 4

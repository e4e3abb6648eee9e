# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are drawn in worker processes: those of torch's loader, and the same again after a resume."""

import itertools
import random

import numpy as np
import pytest
import torch
from cases import cases
from loaders import seed
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from accelerate.data_loader import prepare_data_loader

LENGTH = 26


class Augmented(Dataset):
    """Draws from all global generators, from some of them only for some samples."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), random.gauss(0, 1) if index % 3 else 0.0]
        drawn.append(np.random.standard_normal() if index % 4 == 1 else 0.0)
        return torch.tensor([index, *drawn], dtype=torch.float64)


def masking(rows):
    return default_collate(rows), torch.rand(3), get_worker_info().seed


def start(worker):
    """Draws and seeds, as users' functions do."""
    np.random.seed(torch.initial_seed() % 2**32 + int(torch.randint(9, ())))


def build(shards=1, index=0, **options):
    raw = DataLoader(Augmented(), batch_size=2, shuffle=True, collate_fn=masking, **options)
    return (
        raw
        if shards is None
        else prepare_data_loader(raw, num_processes=shards, process_index=index)
    )


def flat(batch):
    return torch.cat([batch[0].flatten(), batch[1]]).tolist() + [batch[2]]


def read(loader, stop=None):
    return [flat(batch) for batch in itertools.islice(loader, stop)]


OPTIONS = {
    "one worker": {"num_workers": 1},
    "two workers": {"num_workers": 2, "worker_init_fn": start},
    "three workers that read ahead": {"num_workers": 3, "prefetch_factor": 4},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_process_draws_as_the_plain_loader_does(name):
    runs = []
    for shards in (None, 1):
        seed(5)
        loader = build(shards, **OPTIONS[name])
        runs.append([read(loader) for _ in range(2)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", cases(OPTIONS, thorough=["one worker", "two workers"]))
@pytest.mark.parametrize(("shards", "index"), [(1, 0), (2, 1)])
def test_a_resumed_pass_draws_the_same_numbers(name, shards, index):
    seed(5)
    loader = build(shards, index, **OPTIONS[name])
    wanted = [read(loader) for _ in range(3)]
    points = (1, 2, 5) if shards == 1 else (3,)
    # Persistent workers go on drawing in the next epoch.
    first = 1 if name == "persistent workers" else 0
    for point in points:
        seed(5)
        loader = build(shards, index, **OPTIONS[name])
        for _ in range(first):
            read(loader)
        passing = iter(loader)
        assert [flat(next(passing)) for _ in range(point)] == wanted[first][:point]
        saved, state = loader.state_dict(), torch.get_rng_state()
        del passing
        seed(99)
        resumed, again = (build(shards, index, **OPTIONS[name]) for _ in range(2))
        resumed.load_state_dict(saved)
        torch.set_rng_state(state)
        passing = iter(resumed)
        found = [flat(next(passing))]
        # Saved and resumed once more.
        again.load_state_dict(resumed.state_dict())
        found += [flat(batch) for batch in passing]
        assert found == wanted[first][point:], point
        assert read(again) == found[1:], point
        assert read(resumed) == wanted[first + 1], point


@pytest.mark.parametrize(
    "changed", [{"num_workers": 3}, {"num_workers": 2, "shards": 2, "index": 1}]
)
def test_other_workers_read_the_rest_with_new_numbers(changed):
    seed(5)
    loader = build(num_workers=2)
    passing = iter(loader)
    next(passing)
    saved = loader.state_dict()
    del passing
    resumed = build(**changed)
    resumed.load_state_dict(saved)
    assert len(read(resumed)) == 12 // changed.get("shards", 1)

# SPDX-License-Identifier: Apache-2.0
"""States of generators: what is captured is what the generator itself returns, whatever was drawn in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from loaders import Ids, ids
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accelerate.data_loader import generators, prepare_data_loader
from accelerate.data_loader.generators import Generators, differing, equal


def seed_with_kept_normal():
    """The bits of a fresh seed, and a normal number that was drawn before and is returned next."""
    np.random.seed(0)
    state = np.random.get_state()
    np.random.set_state((*state[:3], 1, 0.25))


def keep_another_normal():
    state = np.random.get_state()
    np.random.set_state((*state[:3], 1, state[4] + 1.0))


def seed_python_with_kept_normal():
    random.seed(0)
    version, words, _ = random.getstate()
    random.setstate((version, words, 0.25))


DRAWS = {
    "nothing": lambda: None,
    "numpy uniform": np.random.rand,
    "numpy normal, the second is kept": np.random.randn,
    "numpy three normals": lambda: np.random.standard_normal(3),
    "numpy integers": lambda: np.random.randint(10),
    "numpy seed": lambda: np.random.seed(0),
    "numpy seed, then a kept normal": seed_with_kept_normal,
    "numpy another kept normal": keep_another_normal,
    "python uniform": random.random,
    "python normal, the second is kept": lambda: random.gauss(0, 1),
    "python seed": lambda: random.seed(0),
    "python seed, then a kept normal": seed_python_with_kept_normal,
    "torch uniform": lambda: torch.rand(1),
    "torch normal, the second is kept": lambda: torch.randn(1),
    "torch two normals": lambda: (torch.randn(1), torch.randn(1)),
    "torch another kept normal": lambda: (torch.randn(2), torch.randn(1)),
    "torch permutation": lambda: torch.randperm(3),
    "torch state": lambda: torch.set_rng_state(torch.Generator().manual_seed(0).get_state()),
    "torch seed": lambda: torch.manual_seed(0),
}


def expected():
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("first", DRAWS)
def test_states_are_those_of_the_generators(first, readable, monkeypatch):
    """Also where their memory cannot be compared, as in another implementation of Python or NumPy."""
    if not readable:
        unreadable = (
            generators._Watched(torch.get_rng_state, generators._copy_of_torch),
            generators._Watched(random.getstate, lambda: None),
            generators._Watched(np.random.get_state, lambda: None),
        )
        monkeypatch.setattr(generators, "_watched", lambda: unreadable)
    for second in DRAWS:
        np.random.seed(0)
        random.seed(0)
        torch.manual_seed(0)
        for name in (first, second, first):
            before, was = Generators().capture(), expected()
            DRAWS[name]()
            after, now = Generators().capture(), expected()
            assert equal(after, now), (first, second, name)
            assert differing(before, after) == differing(was, now), (first, second, name)


def test_memory_is_compared_on_cpython():
    """Without it a batch of a stream takes twice the time."""
    assert generators._offset_of_torch_seed() is not None
    assert generators._python_is_readable()
    assert generators._numpy_is_readable()


def test_another_bit_generator_of_numpy():
    bits = np.random.get_bit_generator()
    Generators().capture()
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        for _ in range(2):
            assert equal(Generators().capture()["numpy"], np.random.get_state())
            np.random.rand()
    finally:
        np.random.set_bit_generator(bits)
    assert equal(Generators().capture()["numpy"], np.random.get_state())


class Reseeding(Sampler):
    """Draws normal numbers; before each draw it goes back to the same bits, with another number kept."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        left = list(range(self.length))
        while left:
            kept = np.random.standard_normal()
            state = np.random.get_state()
            np.random.seed(0)
            np.random.set_state((*np.random.get_state()[:3], 1, kept + state[2] / 7))
            yield left.pop(int(abs(kept) * 1000) % len(left))


class ReseedingStream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.order = Reseeding(length)

    def __iter__(self):
        return iter(self.order)


BUILD = {
    "sampler": lambda: DataLoader(Ids(53), batch_size=4, sampler=Reseeding(53)),
    "stream": lambda: DataLoader(ReseedingStream(53), batch_size=4),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", BUILD)
def test_a_sampler_that_seeds_to_the_same_bits(kind, exact):
    """One process draws as torch's loader does; a resumed pass continues as the saved one, whatever the loop draws."""
    np.random.seed(3)
    wanted = [ids(batch) for batch in BUILD[kind]()]
    np.random.seed(3)
    loader = prepare_data_loader(BUILD[kind](), num_processes=1, process_index=0, exact=exact)
    found, positions = [], []
    for batch in loader:
        found.append(ids(batch))
        positions.append(loader.state_dict())
        if exact:
            np.random.randn()
    assert found == wanted
    for point in (1, 7):
        np.random.seed(90)
        resumed = prepare_data_loader(BUILD[kind](), num_processes=1, process_index=0, exact=exact)
        resumed.load_state_dict(positions[point - 1])
        assert [ids(batch) for batch in resumed] == wanted[point:]

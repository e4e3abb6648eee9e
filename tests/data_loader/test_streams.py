# SPDX-License-Identifier: Apache-2.0
"""The random numbers that a script sees on several processes: those of the API, drawn by hand here."""

from __future__ import annotations

import itertools

import pytest
import torch
from loaders import Ids, Numbers, StreamAsItGoes, ids, keep_states, seed, seeded
from rank_pool import on_ranks
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState

SAMPLERS = {
    "shuffle": lambda: None,
    "replacement": lambda: RandomSampler(range(11), True, 41),
    "weighted": lambda: WeightedRandomSampler([1.0] * 11, 13),
    "subset": lambda: SubsetRandomSampler(range(11)),
}


def build(name):
    sampler = SAMPLERS[name]()
    return DataLoader(Ids(11), batch_size=2, shuffle=sampler is None, sampler=sampler)


def part_of(order, rank):
    """What a rank of two reads of an order in batches of 2: the last step is filled from the start of the epoch."""
    order = order + order[: -len(order) % 4]
    return [order[start : start + 2] for start in range(2 * rank, len(order), 4)]


def drawn_worker_seed():
    return torch.empty((), dtype=torch.int64).random_().item()


@on_ranks(2)
@pytest.mark.parametrize("name", SAMPLERS)
def test_prepare_seeds_the_sampler_from_the_global_generator(name):
    rank = PartialState().process_index
    seed(5)
    loader = prepare_data_loader(build(name), rng_types=["generator"])
    found = [[(ids(batch), torch.rand(()).item()) for batch in loader] for _ in range(2)]
    seed(5)
    sampler = seeded(build(name)).sampler
    for one in found:
        drawn_worker_seed()
        assert one == [(part, torch.rand(()).item()) for part in part_of(list(sampler), rank)]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["map", "workers", "generator", "stream"])
def test_dispatching_draws_one_number_on_every_rank(kind):
    rank = PartialState().process_index
    seed(5)
    generator = torch.Generator().manual_seed(9)
    raw = {
        "map": lambda: DataLoader(Ids(12), batch_size=2, shuffle=True),
        "workers": lambda: DataLoader(Ids(12), batch_size=2, shuffle=True, num_workers=1),
        "generator": lambda: DataLoader(Ids(12), batch_size=2, shuffle=True, generator=generator),
        "stream": lambda: DataLoader(Numbers(12), batch_size=2),
    }[kind]()
    loader = prepare_data_loader(raw, dispatch_batches=True)
    found = [([ids(batch) for batch in loader], torch.rand(()).item()) for _ in range(2)]
    seed(5)
    generator.manual_seed(9)
    for batches, after in found:
        drawn_worker_seed()
        if kind == "generator":
            assert batches == part_of(list(RandomSampler(range(12), generator=generator)), rank)
        elif kind == "stream":
            assert batches == part_of(list(range(12)), rank)
        elif kind == "workers" or rank == 0:
            assert batches == part_of(list(RandomSampler(range(12))), rank)
        assert after == torch.rand(()).item()


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(2, 1), (1, 2), (2, 3)])
def test_an_epoch_resumes_on_another_number_of_processes(name, saved_on, resumed_on):
    def loaders(count):
        for index in range(count):
            seed(5)
            yield prepare_data_loader(
                build(name), num_processes=count, process_index=index, even_batches=False
            )

    def read(loader):
        seed(7)
        return [ids(batch) for batch in loader]

    def joined(passes):
        steps = itertools.zip_longest(*passes, fillvalue=[])
        return list(itertools.chain.from_iterable(itertools.chain.from_iterable(steps)))

    wanted = []
    for loader in loaders(saved_on):
        batches = iter(loader)
        next(batches)
        position = loader.state_dict()
        wanted.append((list(map(ids, batches)), read(loader)))
    found = []
    for loader in loaders(resumed_on):
        loader.load_state_dict(position)
        found.append((read(loader), read(loader)))
    for rests in zip(zip(*wanted, strict=True), zip(*found, strict=True), strict=True):
        assert joined(rests[0]) == joined(rests[1])


@on_ranks(2)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("dispatch", [True, False])
def test_the_epoch_after_a_resumed_one_is_that_of_the_uninterrupted_run(dispatch, step):
    def prepared(number):
        seed(number)
        return prepare_data_loader(
            DataLoader(StreamAsItGoes(23, "python"), batch_size=2), dispatch_batches=dispatch
        )

    def read(batches):
        return [(ids(batch), torch.rand(()).item()) for batch in batches]

    loader = prepared(5)
    wanted = [read(loader), read(loader)]
    loader = prepared(5)
    batches = iter(loader)
    read(itertools.islice(batches, step))
    position, put_back = loader.state_dict(), keep_states()
    batches.close()
    resumed = prepared(6)
    resumed.load_state_dict(position)
    put_back()
    assert [read(resumed), read(resumed)] == [wanted[0][step:], wanted[1]]

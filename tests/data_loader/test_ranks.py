# SPDX-License-Identifier: Apache-2.0
"""Loaders of 2 and 3 ranks, which must agree although the ranks' random numbers differ, and dispatched batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loaders import EagerBatches, Ids, Numbers, PythonShuffle, ids, seed, states
from rank_pool import on_ranks
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader
from accelerate.state import PartialState

everywhere = on_ranks(2, 3)
CPU = torch.device("cpu")


def my_rank():
    return PartialState(cpu=True).process_index


def world():
    return PartialState(cpu=True).num_processes


def all_ranks(value):
    found = [None] * world()
    dist.all_gather_object(found, value)
    return found


def generator(number):
    return torch.Generator().manual_seed(number)


def steps_of(loader):
    return [(ids(batch), loader.batch_counts, loader.end_of_dataloader, loader.remainder) for batch in loader]


LOADERS = {
    "shuffled": lambda: DataLoader(Ids(23), batch_size=2, shuffle=True),
    "generator": lambda: DataLoader(Ids(23), batch_size=2, shuffle=True, generator=generator(my_rank())),
    "sampler's generator": lambda: DataLoader(
        Ids(23), batch_size=2, sampler=RandomSampler(range(23), generator=generator(my_rank()))
    ),
    "weighted": lambda: DataLoader(Ids(23), batch_size=2, sampler=WeightedRandomSampler([1.0] * 23, 19)),
    "python's": lambda: DataLoader(Ids(23), batch_size=2, sampler=PythonShuffle(23)),
    "own batches": lambda: DataLoader(Ids(23), batch_sampler=EagerBatches(23)),
    "workers": lambda: DataLoader(Ids(23), batch_size=2, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Numbers(23, shuffled=True), batch_size=2),
    "stream with a worker": lambda: DataLoader(Numbers(23, shuffled=True), batch_size=2, num_workers=1),
}


def global_batches(name, build):
    """A plain loop over what one process would read at the global batch size; rank 0's random numbers."""
    raw = build()
    if name == "own batches":
        batches = [ids(batch) for batch in raw]
        return [sum(batches[start : start + world()], []) for start in range(0, len(batches), world())]  # noqa: RUF017
    raw.__dict__["batch_size"] = raw.batch_sampler.batch_size = 2 * world()
    return [ids(batch) for batch in raw]


@everywhere
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_orders_are_rank_0s(name, exact):
    build = LOADERS[name]
    loader = prepare_data_loader(build(), exact=exact, rng_types=["generator"])
    seed(100 + my_rank())
    parts = [steps_of(loader) for _ in range(2)]
    after = all_ranks(states())
    passes = all_ranks(parts)
    if my_rank():
        return
    seed(100)
    plain = build()
    wanted = [global_batches(name, lambda: plain) for _ in range(2)]
    assert states() == after[0], "rank 0 draws what a plain loop draws"
    for epoch, batches in enumerate(wanted):
        joined = []
        for step in range(len(batches)):
            counts = passes[0][epoch][step][1]
            joined.append([
                sample for rank in range(world()) for sample in passes[rank][epoch][step][0][: counts[rank]]
            ])  # fmt: skip
        assert joined == batches
        assert {len(one[epoch]) for one in passes} == {len(batches)}


@everywhere
def test_ranks_keep_their_own_random_numbers():
    loader = prepare_data_loader(DataLoader(Ids(9), batch_size=2, sampler=PythonShuffle(9)))
    seed(7 + my_rank())
    list(loader)
    drawn = all_ranks((random.random(), float(np.random.rand()), torch.rand(1).item()))
    assert len(set(drawn)) == world(), drawn


@everywhere
def test_a_seed_that_differs_is_agreed_on():
    torch.manual_seed(50 + my_rank())
    loader = prepare_data_loader(DataLoader(Ids(4 * world()), batch_size=2, shuffle=True), use_seedable_sampler=True)
    for epoch in range(2):
        parts = all_ranks([ids(batch) for batch in loader])
        joined = [sample for step in range(2) for part in parts for sample in part[step]]
        assert joined == torch.randperm(4 * world(), generator=generator(50 + epoch)).tolist()


@everywhere
def test_dispatched_batches():
    def build(data, batch_size, **options):
        raw = DataLoader(data, batch_size=batch_size)
        return prepare_data_loader(raw, device=CPU, put_on_device=True, dispatch_batches=True, **options)

    for data in (Ids, Numbers):
        for length in (1, 4 * world(), 4 * world() + 1, 4 * world() + 3):
            for options in ({}, {"exact": True}, {"split_batches": True}, {"split_batches": True, "exact": True}):
                size = 2 * world() if "split_batches" in options else 2
                loader = build(data(length), size, **options)
                assert isinstance(loader, DataLoaderDispatcher)
                for _ in range(2):
                    passes = all_ranks(steps_of(loader))
                    assert len({len(one) for one in passes}) == 1
                    seen = []
                    for parts in zip(*passes, strict=True):
                        assert len({part[1:] for part in parts}) == 1, "all ranks are told the same"
                        seen += [
                            sample for rank, part in enumerate(parts) for sample in part[0][: part[1][rank]]
                        ]  # fmt: skip
                        if "exact" not in options:
                            assert len({len(part[0]) for part in parts}) == 1
                    assert seen == list(range(length)), (options, passes)
                    assert passes[0][-1][2] and passes[0][-1][3] == length % (2 * world())
                if my_rank() and isinstance(loader.dataset, Ids):
                    assert loader.dataset.read == [], "only one process reads"


@everywhere
def test_dispatched_objects():
    def collate(samples):
        return {"text": [f"#{sample}" for sample in samples], "id": torch.tensor(samples), "kind": "all"}

    loader = prepare_data_loader(
        DataLoader(list(range(2 * world() + 1)), batch_size=2, collate_fn=collate), dispatch_batches=True
    )
    first, last = list(loader)
    assert first["text"] == [f"#{2 * my_rank()}", f"#{2 * my_rank() + 1}"] and first["kind"] == "all"
    assert last["text"] == [f"#{number}" for number in last["id"].tolist()] and len(last["text"]) == 1
    assert last["id"].item() == (2 * world() if my_rank() == 0 else my_rank() - 1)


@everywhere
def test_uneven_dispatch_ends_rank_by_rank():
    loader = prepare_data_loader(
        DataLoader(Ids(2 * world() + 1), batch_size=2), dispatch_batches=True, even_batches=False
    )
    for _ in range(2):
        assert len(steps_of(loader)) == (2 if my_rank() == 0 else 1)
        assert loader.end_of_dataloader


@everywhere
def test_a_reader_that_fails_fails_everywhere():
    class Broken(Numbers):
        def __iter__(self):
            yield from range(2 * world())
            raise OSError("the disk is gone")

    loader = prepare_data_loader(DataLoader(Broken(0), batch_size=2), dispatch_batches=True)
    seen = 0
    try:
        for _ in loader:
            seen += 1
    except (OSError, RuntimeError) as error:
        assert "the disk is gone" in str(error) and (my_rank() == 0 or "rank 0, which reads" in str(error))
    else:
        raise AssertionError("nothing was raised")
    # The stream is read a batch ahead, and fails while the first step is being read ahead of.
    assert seen <= 1
    assert len(list(prepare_data_loader(DataLoader(Ids(world())), dispatch_batches=True))) == 1


@everywhere
def test_positions_go_from_one_kind_to_another():
    def build(dispatch):
        raw = DataLoader(Ids(23), batch_size=2, shuffle=True)
        return prepare_data_loader(raw, dispatch_batches=dispatch, exact=True)

    for before, after in ((False, True), (True, False)):
        seed(3 + my_rank())
        loader = build(before)
        passing = iter(loader)
        seen = []
        for _ in range(2):
            seen += ids(next(passing))
        saved = all_ranks(loader.state_dict())[0]
        assert loader.state_dict()["consumed"] == 4 * world()
        del passing
        seed(70 + my_rank())
        resumed = build(after)
        resumed.load_state_dict(saved)
        for batch in resumed:
            seen += ids(batch)[: resumed.batch_counts[my_rank()]]
        assert sorted(sum(all_ranks(seen), [])) == list(range(23))  # noqa: RUF017
        assert len(list(resumed)) == -(-23 // (2 * world()))

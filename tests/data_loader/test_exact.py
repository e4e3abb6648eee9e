# SPDX-License-Identifier: Apache-2.0
"""exact=True: all shards together read what one plain loop reads at the global batch size, each sample once."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from loaders import EagerBatches, Ids, Numbers, PythonShuffle, ids, seed
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from accelerate.core.errors import PrepareError
from accelerate.data_loader import prepare_data_loader


def shards_of(build, count, **options):
    return [
        prepare_data_loader(
            build(), num_processes=count, process_index=index, exact=True, **options
        )
        for index in range(count)
    ]


def steps_of(loader):
    """Each step of a shard: its real samples, the counts of all shards, its weight, and whether it was the last."""
    return [
        (ids(batch)[: loader.batch_counts[loader.plan().cut.index]], loader.batch_counts, loader.batch_weight,
         loader.end_of_dataloader)
        for batch in loader
    ]  # fmt: skip


def check_against(plain, shards, epochs=2):
    """Compare epoch by epoch with the plain loop's global batches."""
    count = len(shards)
    wanted = []
    seed(5)
    for _ in range(epochs):
        wanted.append([ids(batch) for batch in plain])
    found = []
    for shard in shards:
        seed(5)
        found.append([steps_of(shard) for _ in range(epochs)])
    for number, batches in enumerate(wanted):
        passes = [one[number] for one in found]
        assert [len(one) for one in passes] == [len(batches)] * count, (
            "all shards make as many steps"
        )
        for step, batch in enumerate(batches):
            parts = [one[step] for one in passes]
            assert [sample for part in parts for sample in part[0]] == batch
            counts = tuple(len(part[0]) for part in parts)
            assert {part[1] for part in parts} == {counts}
            for part in parts:
                assert part[2] == pytest.approx(len(part[0]) * count / len(batch))
            assert [part[3] for part in parts] == [step + 1 == len(batches)] * count


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 7, 12, 13, 23])
def test_the_shards_read_the_plain_loops_batches(count, length):
    for options in ({}, {"shuffle": True}, {"shuffle": True, "drop_last": True}):
        build = functools.partial(DataLoader, Ids(length), **options)
        check_against(
            build(batch_size=3 * count), shards_of(lambda build=build: build(batch_size=3), count)
        )
        split = shards_of(
            lambda build=build: build(batch_size=3 * count), count, split_batches=True
        )
        check_against(build(batch_size=3 * count), split)


SAMPLERS = {
    "replacement": lambda: RandomSampler(range(13), replacement=True, num_samples=17),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0] * 6, 11),
    "python's": lambda: PythonShuffle(11),
    "generator": lambda: RandomSampler(range(13), generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler(name):
    plain = DataLoader(Ids(13), batch_size=6, sampler=SAMPLERS[name]())
    check_against(
        plain, shards_of(lambda: DataLoader(Ids(13), batch_size=2, sampler=SAMPLERS[name]()), 3)
    )


def test_workers():
    def build(batch_size):
        return DataLoader(Ids(11), batch_size=batch_size, shuffle=True, num_workers=2)

    check_against(build(6), shards_of(lambda: build(3), 2))


def test_batches_of_a_batch_sampler_are_taken_as_they_are():
    batches = [[0], [1, 2, 3], [4, 5], [6], [7, 8, 9]]
    shards = shards_of(lambda: DataLoader(Ids(10), batch_sampler=batches), 2)
    check_against(DataLoader(Ids(10), batch_sampler=[[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]), shards)
    split = shards_of(lambda: DataLoader(Ids(10), batch_sampler=batches), 2, split_batches=True)
    check_against(DataLoader(Ids(10), batch_sampler=batches), split)
    assert [steps_of(shard)[1][0] for shard in split] == [[1, 2], [3]]
    seed(1)
    drawn = list(EagerBatches(9))
    pairs = [list(itertools.chain(*drawn[start : start + 2])) for start in range(0, len(drawn), 2)]
    found = []
    for shard in shards_of(lambda: DataLoader(Ids(9), batch_sampler=EagerBatches(9)), 2):
        seed(1)
        found.append([step[0] for step in steps_of(shard)])
    assert [left + right for left, right in zip(*found, strict=True)] == pairs


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("length", [1, 5, 12, 13])
def test_streams(workers, length):
    def build(batch_size):
        return DataLoader(
            Numbers(length, shuffled=not workers), batch_size=batch_size, num_workers=workers
        )

    check_against(build(6), shards_of(lambda: build(2), 3))


def test_a_placeholder_is_the_first_sample_of_its_step():
    dataset = Ids(9)
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=4), num_processes=2, process_index=1, exact=True
    )
    batches = [(ids(batch), loader.batch_counts, loader.batch_weight) for batch in loader]
    assert batches == [([4, 5, 6, 7], (4, 4), 1.0), ([8], (1, 0), 0.0)]
    assert loader.remainder == 1
    stream = prepare_data_loader(
        DataLoader(Numbers(9), batch_size=4), num_processes=2, process_index=1, exact=True
    )
    assert [(ids(batch), stream.batch_weight) for batch in stream] == [
        ([4, 5, 6, 7], 1.0),
        ([8], 0.0),
    ]


def test_one_process_is_the_plain_loop():
    loader = prepare_data_loader(
        DataLoader(Ids(5), batch_size=2, shuffle=True), num_processes=1, process_index=0, exact=True
    )
    check_against(DataLoader(Ids(5), batch_size=2, shuffle=True), [loader])


def test_a_mean_loss_weighed_by_the_batch_weight_is_the_mean_over_all_samples():
    values = torch.randn(11, dtype=torch.float64)
    shards = shards_of(lambda: DataLoader(Ids(11), batch_size=2), 3)
    passes = [
        [values[ids(batch)].mean() * loader.batch_weight for batch in loader] for loader in shards
    ]
    plain = [values[ids(batch)].mean() for batch in DataLoader(Ids(11), batch_size=6)]
    for step, wanted in enumerate(plain):
        torch.testing.assert_close(sum(one[step] for one in passes) / 3, wanted, rtol=0, atol=1e-14)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(PrepareError, match="batch_size=None"):
        shards_of(lambda: DataLoader(Numbers(4), batch_size=None), 2)
    with pytest.raises(PrepareError, match="batch_size=None"):
        shards_of(lambda: DataLoader(Ids(4), batch_size=None), 2)
    with pytest.raises(PrepareError, match="in_order=False"):
        shards_of(lambda: DataLoader(Ids(4), batch_size=2, num_workers=1, in_order=False), 2)

    class Own(DataLoader):
        def __iter__(self):
            return super().__iter__()

    with pytest.raises(PrepareError, match="Own"):
        shards_of(lambda: Own(Ids(4), batch_size=2), 2)
    batches = BatchSampler(range(5), 2, False)
    listed = shards_of(lambda: DataLoader(torch.arange(5), batch_size=None, sampler=batches), 2)
    check_against(DataLoader(torch.arange(5), batch_size=4), listed)

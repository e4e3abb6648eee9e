# SPDX-License-Identifier: Apache-2.0
"""Loaders of one process in place of several: each step is what the prepared loaders of all shards read, in order."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from rank_pool import on_ranks
from states import all_ranks
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from accelerate.certify.joined import ShardGenerators, join_shards
from accelerate.core.errors import PrepareError
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.utils import set_seed


class Rows(Dataset):
    """Samples that draw random numbers when they are read."""

    def __init__(self, length, noise=True):
        self.length = length
        self.noise = noise

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = torch.rand(2) + random.random() + np.random.rand() if self.noise else torch.zeros(2)
        return {"id": index, "x": noise, "text": str(index)}


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, step):
            yield {"id": index, "x": torch.rand(2)}


class OwnOrder(Sampler):
    """An order that is drawn from numpy as it goes."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            yield int(np.random.randint(self.length))


class Buckets:
    """Batches of different lengths."""

    batch_size = None
    drop_last = False

    def __len__(self):
        return 5

    def __iter__(self):
        start = 0
        for size in (3, 1, 4, 2, 3):
            yield list(range(start, start + size))
            start += size


def plain(batch):
    """Nested data as lists."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch


def concatenated(batches):
    first = batches[0]
    if isinstance(first, dict):
        return {key: concatenated([batch[key] for batch in batches]) for key in first}
    return sum(batches[1:], first)


def as_is(loader):
    return loader


def steps_of(loader, loop, epochs, begin=as_is):
    """For each epoch its steps: the batch, the counts and whether it is the last one."""
    read = []
    for _ in range(epochs):
        source = begin(loader)
        read.append([])
        for batch in source:
            read[-1].append((plain(batch), source.batch_counts, source.end_of_dataloader))
            loop()
    return read


def shard_steps(make, shards, options, *args):
    """The steps that the process of each shard reads."""
    read = []
    for index in range(shards):
        set_seed(0)
        loader = prepare_data_loader(make(), num_processes=shards, process_index=index, **options)
        read.append(steps_of(loader, *args))
    return read


def joined_loader(make, shards, options):
    set_seed(0)
    loader = prepare_data_loader(make(), num_processes=shards, process_index=0, **options)
    return join_shards(loader, ShardGenerators(shards))


def check(make, shards, epochs=2, loop=lambda: None, begin=as_is, **options):
    read = shard_steps(make, shards, options, loop, epochs, begin)
    actual = steps_of(joined_loader(make, shards, options), loop, epochs, begin)
    for epoch, *epochs_of_shards in zip(actual, *read, strict=True):
        assert len(epoch) == max(map(len, epochs_of_shards))
        for number, (batch, counts, last) in enumerate(epoch):
            parts = []
            for index, steps in enumerate(epochs_of_shards):
                if number < len(steps):
                    part, samples, _ = steps[number]
                    if not options.get("exact") or samples[index]:
                        parts.append(part)
            assert batch == concatenated(parts)
            assert last == (number == len(epoch) - 1)
            samples = epochs_of_shards[0][number][1]
            assert counts == (None if samples is None else (sum(samples),))


def rows(length=23, batch_size=3, noise=True, **options):
    return lambda: DataLoader(Rows(length, noise), batch_size=batch_size, **options)


KINDS = {
    "in order": (rows(), {}),
    "shuffled": (rows(shuffle=True), {}),
    "drop_last": (rows(shuffle=True, drop_last=True), {}),
    "uneven": (rows(), {"even_batches": False}),
    "split": (rows(batch_size=6, shuffle=True), {"split_batches": True}),
    "exact": (rows(shuffle=True, noise=False), {"exact": True}),
    "exact, short": (rows(length=13), {"exact": True}),
    "exact, split": (rows(batch_size=6), {"exact": True, "split_batches": True}),
    "seedable": (rows(shuffle=True), {"use_seedable_sampler": True}),
    "workers": (rows(shuffle=True, num_workers=2), {}),
    "persistent": (rows(num_workers=2, persistent_workers=True), {}),
    "own sampler": (rows(noise=False, sampler=OwnOrder(23)), {}),
    "weights": (
        lambda: DataLoader(Rows(23), 3, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 22)),
        {},
    ),
    "own batches": (lambda: DataLoader(Rows(13), batch_sampler=Buckets()), {}),
    "own batches, uneven": (
        lambda: DataLoader(Rows(13), batch_sampler=Buckets()),
        {"even_batches": False},
    ),
    "own batches, exact": (lambda: DataLoader(Rows(13), batch_sampler=Buckets()), {"exact": True}),
    "batch sampler as a sampler": (
        lambda: DataLoader(
            torch.arange(14.0), batch_size=None, sampler=BatchSampler(OwnOrder(14), 2, False)
        ),
        {},
    ),
    "stream": (lambda: DataLoader(Stream(23), 3), {}),
    "stream, exact": (lambda: DataLoader(Stream(13), 3), {"exact": True}),
    "stream, workers": (lambda: DataLoader(Stream(24), 3, num_workers=2), {}),
    "stateful": (rows(shuffle=True), {"use_stateful_dataloader": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [2, 3])
def test_steps_of_all_shards(kind, shards):
    make, options = KINDS[kind]
    if options.get("use_stateful_dataloader"):
        pytest.importorskip("torchdata")
    check(make, shards, **options)


def test_random_numbers_of_the_loop():
    check(rows(shuffle=True), 2, loop=lambda: torch.rand(1), epochs=3)


@pytest.mark.parametrize("kind", ["shuffled", "exact", "stream", "own batches"])
def test_first_batches_are_skipped(kind):
    make, options = KINDS[kind]
    check(make, 2, epochs=1, begin=lambda loader: skip_first_batches(loader, 2), **options)


def resumed(loader):
    steps = iter(loader)
    next(steps)
    next(steps)
    state = loader.state_dict()
    steps.close()
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("kind", ["shuffled", "own sampler", "stream", "exact"])
def test_a_position_is_continued(kind):
    make, options = KINDS[kind]
    check(make, 2, epochs=1, begin=resumed, **options)


def test_padded_batches_are_padded_together():
    def collate(samples):
        return {
            "x": pad_sequence([torch.ones(n + 1) for n in samples], True, -1.0),
            "count": torch.tensor(len(samples)),
            "longest": max(samples),
        }

    loader = joined_loader(lambda: DataLoader(range(8), 2, collate_fn=collate), 2, {})
    batch = next(iter(loader))
    assert batch["x"].shape == (4, 4)
    assert batch["x"][0].tolist() == [1, -1, -1, -1]
    assert batch["count"] == 4
    assert batch["longest"] == 3


def test_batches_that_cannot_be_joined():
    ragged = [torch.ones(2, 3), torch.ones(2, 4)] * 2
    loader = joined_loader(lambda: DataLoader(ragged, batch_size=None), 2, {})
    with pytest.raises(PrepareError, match="--reference"):
        next(iter(loader))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"even_batches": False},
        {"split_batches": True},
        {"exact": True},
    ],
    ids=str,
)
def test_dispatched_batches_are_whole(options):
    """One process reads them for all: the joined ones are those that a plain loader reads, whose last is filled."""

    make = rows(21, 4, shuffle=True)
    loader = joined_loader(make, 2, {"dispatch_batches": True, **options})
    actual = [batch["id"].tolist() for batch in loader]
    set_seed(0)
    order = [index for batch in make() for index in batch["id"].tolist()]
    size = 4 if options.get("split_batches") else 8
    expected = [order[i : i + size] for i in range(0, len(order), size)]
    if not {"even_batches", "exact"} & options.keys():
        expected[-1] += order[: len(expected[-1]) % 2]
    assert actual == expected


def hub_stream(length=12, **options):
    """A stream of the package datasets in 2 shards, of 12 samples and of `length`."""
    datasets = pytest.importorskip("datasets")

    def rows_of(starts):
        for start in starts:
            for index in range(start, start + (length if start else 12)):
                yield {"id": index}

    stream = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"starts": [0, 100]})
    return DataLoader(stream.with_format("torch"), 5, **options)


ON_RANKS = {
    "own sampler": (rows(sampler=OwnOrder(23)), {}),
    "exact": (rows(shuffle=True), {"exact": True}),
    "dispatched": (rows(21, shuffle=True), {"dispatch_batches": True}),
    "dispatched, exact": (rows(21), {"dispatch_batches": True, "exact": True}),
    "dispatched stream": (lambda: DataLoader(Stream(14), 4), {"dispatch_batches": True}),
    "split stream": (hub_stream, {"dispatch_batches": False}),
    "split stream, dropped": (lambda: hub_stream(24, drop_last=True), {"dispatch_batches": False}),
    "split stream, uneven": (hub_stream, {"dispatch_batches": False, "even_batches": False}),
}


def test_shards_of_different_lengths_are_read_to_the_end_of_one():
    loader = joined_loader(lambda: hub_stream(24), 2, {"dispatch_batches": False})
    steps = iter(loader)
    assert next(steps)["id"].tolist() == [*range(5), *range(100, 105)]
    next(steps)
    with pytest.raises(PrepareError, match="--reference"):
        next(steps)


@on_ranks(2)
def test_steps_of_real_processes():
    """Orders that ranks share, batches that one of them reads, and shards of data sets that split themselves."""
    for kind, (make, options) in ON_RANKS.items():
        set_seed(0)
        loader = prepare_data_loader(make(), **options)
        read = all_ranks(steps_of(loader, lambda: None, 2))
        actual = steps_of(joined_loader(make, 2, options), lambda: None, 2)
        for epoch, first, second in zip(actual, *read, strict=True):
            assert len(epoch) == len(first) == len(second), kind
            for (batch, _, last), *parts in zip(epoch, first, second, strict=True):
                counted = [
                    part
                    for index, (part, counts, _) in enumerate(parts)
                    if not options.get("exact") or counts[index]
                ]
                assert batch == concatenated(counted), kind
                assert last == parts[0][2], kind

# SPDX-License-Identifier: Apache-2.0
"""A prepared loader beside the torch loader that it was made of: samples, random numbers, attributes, bookkeeping."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from cases import cases
from loaders import (
    EagerBatches,
    EagerOrder,
    Ids,
    ManyIds,
    Numbers,
    PythonShuffle,
    SizedNumbers,
    epoch,
    ids,
    seed,
    states,
)
from ranks import run_ranks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    DataLoaderStateMixin,
    prepare_data_loader,
)
from accelerate.state import GradientState

LENGTH = 11


def generator(number):
    return torch.Generator().manual_seed(number)


LOADERS = {
    "sequential": lambda: DataLoader(Ids(LENGTH, noisy=True), batch_size=3),
    "shuffled": lambda: DataLoader(Ids(LENGTH, noisy=True), batch_size=3, shuffle=True),
    "drop_last": lambda: DataLoader(
        Ids(LENGTH, noisy=True), batch_size=3, shuffle=True, drop_last=True
    ),
    "read in batches": lambda: DataLoader(ManyIds(LENGTH, noisy=True), batch_size=3, shuffle=True),
    "subset": lambda: DataLoader(
        Subset(Ids(LENGTH, noisy=True), range(1, 8)), batch_size=3, shuffle=True
    ),
    "generator": lambda: DataLoader(
        Ids(LENGTH, noisy=True), batch_size=4, shuffle=True, generator=generator(3)
    ),
    "sampler's generator": lambda: DataLoader(
        Ids(LENGTH, noisy=True),
        batch_size=4,
        sampler=RandomSampler(range(LENGTH), generator=generator(3)),
    ),
    "replacement": lambda: DataLoader(
        Ids(LENGTH, noisy=True),
        batch_size=4,
        sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=40),
    ),
    "weighted": lambda: DataLoader(
        Ids(LENGTH, noisy=True), batch_size=4, sampler=WeightedRandomSampler([1.0] * LENGTH, 9)
    ),
    "subset sampler": lambda: DataLoader(
        Ids(LENGTH, noisy=True), batch_size=4, sampler=SubsetRandomSampler(range(2, 9))
    ),
    "python's generators": lambda: DataLoader(
        Ids(LENGTH, noisy=True), batch_size=4, sampler=PythonShuffle(LENGTH)
    ),
    "drawn when iterated": lambda: DataLoader(
        Ids(LENGTH, noisy=True), batch_size=4, sampler=EagerOrder(LENGTH)
    ),
    "own batch sampler": lambda: DataLoader(
        Ids(LENGTH, noisy=True), batch_sampler=EagerBatches(LENGTH)
    ),
    "no batches": lambda: DataLoader(Ids(LENGTH, noisy=True), batch_size=None, shuffle=True),
    "batch sampler as sampler": lambda: DataLoader(
        torch.arange(LENGTH),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(LENGTH)), 4, False),
    ),
    "stream": lambda: DataLoader(Numbers(LENGTH), batch_size=3),
    "stream, drop_last": lambda: DataLoader(SizedNumbers(LENGTH), batch_size=3, drop_last=True),
    "shuffled stream": lambda: DataLoader(Numbers(LENGTH, shuffled=True), batch_size=3),
    "stream of batches": lambda: DataLoader(Numbers(LENGTH, shuffled=True), batch_size=None),
    "empty": lambda: DataLoader(Ids(0), batch_size=3),
    "collate": lambda: DataLoader(
        list(range(LENGTH)), batch_size=3, shuffle=True, collate_fn=tuple
    ),
}


def single(loader, **options):
    return prepare_data_loader(loader, num_processes=1, process_index=0, **options)


def plain(value):
    """Batches as plain data: tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", LOADERS)
def test_one_process_reads_and_draws_like_a_plain_loop(name):
    looks_ahead = "stream" in name
    runs = []
    for prepare in (lambda loader: loader, single):
        seed(7)
        loader = prepare(LOADERS[name]())
        found = []
        for _ in range(3):
            for batch in loader:
                # What the loop draws, as a model with dropout does. A stream is read a batch ahead.
                found.append((plain(batch), None if looks_ahead else torch.rand(1).item()))
            found.append(states())
        runs.append(found)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("workers", cases([1, 2], thorough=[1]))
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "name",
    ["shuffled", "generator", "own batch sampler", "python's generators", "drawn when iterated"],
)
def test_workers_read_the_same_samples(name, workers, persistent):
    def build():
        raw = LOADERS[name]()
        raw.__dict__.update(num_workers=workers, prefetch_factor=2, persistent_workers=persistent)
        seed(7)
        return raw

    raw = build()
    wanted = [[ids(batch) for batch in raw] for _ in range(2)]
    after = states()
    loader = single(build())
    found, ends = [], []
    for _ in range(2):
        found.append([])
        for batch in loader:
            found[-1].append(ids(batch))
            ends.append(loader.end_of_dataloader)
    assert found == wanted
    assert states() == after
    assert ends == [
        number == len(batches) for batches in wanted for number in range(1, len(batches) + 1)
    ]


def test_plain_tensors_are_read_bit_for_bit():
    columns = (
        torch.randn(10, 3, dtype=torch.float64),
        torch.randn(10, requires_grad=True),
        torch.arange(10) > 4,
    )
    raw = DataLoader(TensorDataset(*columns), batch_size=4)
    for ours, theirs in zip(single(raw), raw, strict=True):
        assert type(ours) is type(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert torch.equal(our, their)
            assert (our.dtype, our.stride(), our.requires_grad) == (
                their.dtype,
                their.stride(),
                their.requires_grad,
            )
    transposed = torch.arange(12).view(3, 4).t()
    (batch,) = single(DataLoader(TensorDataset(transposed), batch_size=4))
    assert batch[0].is_contiguous() and torch.equal(batch[0], transposed)
    # Indices as tensors, and from the end, as a sampler may give them.
    own = [torch.tensor(3), -1]
    (batch,) = single(DataLoader(TensorDataset(columns[2]), batch_size=2, sampler=own))
    assert batch[0].tolist() == [False, True]
    (batch,) = single(DataLoader(TensorDataset(torch.arange(5)), batch_size=2, sampler=[-1, 0]))
    assert batch[0].tolist() == [4, 0]
    with pytest.raises(IndexError):
        list(single(DataLoader(TensorDataset(columns[2]), batch_size=2, sampler=[3, 10])))


def test_errors_of_the_dataset_pass_and_the_loop_can_be_run_again():
    class Broken(Ids):
        broken = True

        def __getitem__(self, index):
            if self.broken and index == 4:
                raise KeyError("sample 4")
            return super().__getitem__(index)

    dataset = Broken(8)
    loader = single(DataLoader(dataset, batch_size=2))
    with pytest.raises(KeyError, match="sample 4"):
        list(loader)
    assert not GradientState().in_dataloader
    dataset.broken = False
    assert len(list(loader)) == 4


def test_it_is_a_torch_loader_with_the_attributes_of_its_base():
    class Own(DataLoader):
        extra = "kept"

    dataset = Ids(10)
    raw = Own(dataset, batch_size=4, num_workers=0, collate_fn=default_collate, shuffle=True)
    for shards in (1, 2):
        loader = prepare_data_loader(raw, num_processes=shards, process_index=0)
        assert (
            isinstance(loader, DataLoader)
            and isinstance(loader, Own)
            and isinstance(loader, DataLoaderShard)
        )
        assert type(loader) is DataLoaderShard and isinstance(loader, DataLoaderStateMixin)
        assert (loader.dataset, loader.batch_size, loader.extra) == (dataset, 4, "kept")
        assert loader.collate_fn is default_collate and loader.num_workers == 0
        assert loader.get_sampler() is raw.sampler
        assert (loader.total_batch_size, loader.total_dataset_length) == (4 * shards, 10)
        assert len(loader) == (3 if shards == 1 else 2)
        with pytest.raises(AttributeError, match="no_such"):
            _ = loader.no_such
    assert isinstance(loader.batch_sampler, BatchSamplerShard)
    assert raw.batch_sampler.__class__ is BatchSampler, "the user's loader is left as it was"
    with pytest.raises(AttributeError, match="not have a fixed size"):
        _ = single(DataLoader(dataset, batch_sampler=EagerBatches(10))).total_batch_size


def test_a_loader_that_iterates_in_a_way_of_its_own_does_so():
    class Doubling(DataLoader):
        def __iter__(self):
            return (ids(batch) * 2 for batch in super().__iter__())

    loaders = [
        prepare_data_loader(Doubling(Ids(7), batch_size=2), num_processes=2, process_index=index)
        for index in range(2)
    ]
    found, ends = [], []
    for loader in loaders:
        found.append([])
        for batch in loader:
            found[-1].append(batch)
            ends.append(loader.end_of_dataloader)
    assert found == [[[0, 1, 0, 1], [4, 5, 4, 5]], [[2, 3, 2, 3], [6, 0, 6, 0]]]
    assert ends == [False, True] * 2


def test_a_loader_that_cannot_be_shared_out_says_so():
    class Cached(DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.__dict__["cache"] = list(super().__iter__())

        def __iter__(self):
            return iter(self.cache)

    raw = Cached(Ids(6), batch_size=2)
    assert len(list(single(raw))) == 3
    with pytest.raises(ValueError, match=r"Cached does not use its `batch_sampler`"):
        list(prepare_data_loader(raw, num_processes=2, process_index=0))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("length", "drop_last", "remainders"),
    [
        (10, False, {1: 2, 2: 2}),
        (8, False, {1: 0, 2: 0}),
        (10, True, {1: -1, 2: -1}),
        (3, False, {1: 3, 2: 3}),
    ],
)
def test_the_remainder(shards, length, drop_last, remainders):
    for data in (Ids(length), SizedNumbers(length)):
        raw = DataLoader(data, batch_size=4, drop_last=drop_last)
        loader = prepare_data_loader(raw, num_processes=shards, process_index=shards - 1)
        assert {loader.remainder for _ in loader} <= {remainders[shards]}
        assert loader.remainder == remainders[shards] or not len(loader)
    # A stream without a length tells at its end.
    loader = prepare_data_loader(
        DataLoader(Numbers(length), batch_size=4, drop_last=drop_last),
        num_processes=shards,
        process_index=0,
    )
    seen = [loader.remainder for _ in loader]
    if seen:
        assert seen == [-1] * (len(seen) - 1) + [remainders[shards]]


def test_the_counts_of_every_step():
    for index in range(2):
        loader = prepare_data_loader(
            DataLoader(Ids(11), batch_size=4), num_processes=2, process_index=index
        )
        assert [loader.batch_counts for _ in loader] == [(4, 4), (3, 0)]
        assert loader.batch_weight == 1.0
        loader = prepare_data_loader(
            DataLoader(Ids(9), batch_size=4),
            num_processes=2,
            process_index=index,
            split_batches=True,
        )
        assert [loader.batch_counts for _ in loader] == [(2, 2), (2, 2), (1, 0)]
        stream = prepare_data_loader(
            DataLoader(Numbers(11), batch_size=4, num_workers=1),
            num_processes=2,
            process_index=index,
        )
        assert [stream.batch_counts for _ in stream] == [(4, 4), (3, 0)]
        own = prepare_data_loader(
            DataLoader(Ids(7), batch_sampler=EagerBatches(7)), num_processes=2, process_index=index
        )
        assert [own.batch_counts for _ in own] == [(1, 3), (2, 1)]


def test_gradient_state_follows_the_innermost_loop():
    state = GradientState()
    outer, inner = (single(DataLoader(Ids(4), batch_size=2)) for _ in range(2))
    seen = []
    for _ in outer:
        assert state.active_dataloader is outer
        for _ in inner:
            seen.append(state.end_of_dataloader)
            assert state.active_dataloader is inner
        assert state.active_dataloader is outer
        seen.append(state.end_of_dataloader)
    assert seen == [False, True, False, False, True, True]
    assert not state.in_dataloader and not state.end_of_dataloader and state.remainder == -1
    assert outer.end_of_dataloader, "after the loop a loader still tells of its last batch"


def test_gradient_state_forgets_loops_that_are_left():
    state = GradientState()
    loader = single(DataLoader(Ids(6), batch_size=2))
    for _ in loader:
        break
    assert not state.in_dataloader
    with pytest.raises(RuntimeError, match="in the loop"):
        for _ in loader:
            raise RuntimeError("in the loop")
    gc.collect()
    assert not state.in_dataloader
    iterator = iter(loader)
    assert not state.in_dataloader, "a pass begins with its first batch"
    next(iterator)
    assert state.active_dataloader is loader
    del iterator
    assert not state.in_dataloader


def test_the_epoch_reaches_samplers_and_datasets():
    heard = []

    class Told:
        def __init__(self, name):
            self.name = name

        def set_epoch(self, number):
            heard.append((self.name, number))

    class Dataset(Told, Ids):
        def __init__(self):
            Told.__init__(self, "dataset")
            Ids.__init__(self, 4)

    class Sampler(Told, SequentialSampler):
        def __init__(self):
            Told.__init__(self, "sampler")
            SequentialSampler.__init__(self, range(4))

    loader = prepare_data_loader(
        DataLoader(Dataset(), batch_size=2, sampler=Sampler()), num_processes=2, process_index=0
    )
    for wanted in (0, 1):
        heard.clear()
        list(loader)
        assert sorted(heard) == [("dataset", wanted), ("sampler", wanted)]
    for _ in range(2):
        heard.clear()
        for _ in loader:
            break
        assert sorted(heard) == [("dataset", 2), ("sampler", 2)], (
            "a pass that is left does not count as an epoch"
        )
    loader.set_epoch(7)
    heard.clear()
    list(loader)
    assert sorted(heard) == [("dataset", 7), ("sampler", 7)]
    assert loader.iteration == 8


def test_an_epoch_that_the_user_has_set_stays_and_counts_on():
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0)

    def order(epoch):
        plain = DistributedSampler(range(8), num_replicas=1, rank=0)
        plain.set_epoch(epoch)
        return list(plain)

    loader = single(DataLoader(Ids(8), batch_size=2, sampler=sampler))
    sampler.set_epoch(7)
    for wanted in (7, 8):
        assert sum(map(ids, loader), []) == order(wanted)  # noqa: RUF017
    for wanted in (3, 1):
        sampler.set_epoch(wanted)
        assert sum(map(ids, loader), []) == order(wanted)  # noqa: RUF017
    loader.set_epoch(5)
    for wanted in (5, 6):
        assert sum(map(ids, loader), []) == order(wanted)  # noqa: RUF017

    class Stream(Numbers):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield self.epoch

    for options in ({}, {"exact": True}):
        dataset = Stream(1)
        dataset.set_epoch(7)
        loader = prepare_data_loader(
            DataLoader(dataset), num_processes=2, process_index=0, **options
        )
        assert [ids(next(iter(loader))), *map(ids, loader), *map(ids, loader)] == [[7], [7], [8]]


def test_batches_are_not_kept_after_they_were_handed_out():
    loader = single(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
    iterator = iter(loader)
    reference = weakref.ref(next(iterator)[0])
    gc.collect()
    next(iterator)
    assert reference() is None


def test_an_iterator_that_is_open_at_the_end_of_the_interpreter():
    script = """
import sys, torch, weakref
from accelerate import Accelerator
weakref.main = sys.modules["__main__"]  # Other packages keep it too: its names outlive the other modules.
batches = iter(Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(range(4))))
print(next(batches))
"""
    (done,) = run_ranks(script, 1)
    assert (done.stdout, done.stderr) == ("tensor([0])\n", "")


def test_copies_and_pickles_read_on_their_own():
    loader = prepare_data_loader(DataLoader(Ids(6), batch_size=2), num_processes=2, process_index=1)
    wanted = epoch(loader)
    for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(again) is DataLoaderShard
        assert epoch(again) == wanted


def test_the_mixin_serves_loaders_of_the_users_own():
    class Own(DataLoaderStateMixin):
        def __init__(self):
            self.gradient_state = GradientState()

        def __iter__(self):
            self.begin()
            for number in range(2):
                self.end_of_dataloader = number == 1
                yield number
            self.end()

    loader = Own()
    assert [(number, GradientState().end_of_dataloader) for number in loader] == [
        (0, False),
        (1, True),
    ]
    assert not GradientState().in_dataloader
    loader.reset()
    assert (loader.end_of_dataloader, loader.remainder, loader.batch_counts) == (False, -1, None)


@pytest.mark.parametrize("order", [True, False])
def test_batches_out_of_order_are_all_there(order):
    raw = DataLoader(Ids(12), batch_size=2, num_workers=2, in_order=order)
    loader = single(raw)
    found = []
    ends = []
    for batch in loader:
        found += ids(batch)
        ends.append(loader.end_of_dataloader)
    assert sorted(found) == list(range(12)) and ends == [False] * 5 + [True]

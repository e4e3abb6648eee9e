# SPDX-License-Identifier: Apache-2.0
"""What `prepare_data_loader` and `skip_first_batches` make of a loader, and what they refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from loaders import EagerBatches, Ids, Numbers, SizedNumbers, ids, seed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def permutation(number, length=10):
    return torch.randperm(length, generator=torch.Generator().manual_seed(number)).tolist()


def read(loader):
    return [sample for batch in loader for sample in ids(batch)]


def test_a_seedable_sampler_shuffles_from_seed_and_epoch():
    sampler = SeedableRandomSampler(range(10), data_seed=3)
    assert [list(sampler), list(sampler)] == [permutation(3), permutation(4)]
    sampler.set_epoch(0)
    assert list(sampler) == permutation(3)
    seed(21)
    assert list(SeedableRandomSampler(range(10))) == permutation(21)
    few = SeedableRandomSampler(range(10), num_samples=4, data_seed=3)
    assert list(few) == permutation(3)[:4]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("data_seed", [None, 5])
def test_prepared_with_a_seedable_sampler(shards, data_seed):
    seed(42)
    start = 42 if data_seed is None else data_seed
    raw = DataLoader(Ids(10), batch_size=5, shuffle=True)
    loaders = [
        prepare_data_loader(
            raw,
            num_processes=shards,
            process_index=index,
            use_seedable_sampler=True,
            data_seed=data_seed,
        )
        for index in range(shards)
    ]
    for epoch in range(3):
        assert [sample for loader in loaders for sample in read(loader)] == permutation(
            start + epoch
        )
    for loader in loaders:
        loader.set_epoch(1)
        assert isinstance(loader.get_sampler(), SeedableRandomSampler)
    assert [sample for loader in loaders for sample in read(loader)] == permutation(start + 1)
    assert type(raw.sampler) is RandomSampler and type(raw.batch_sampler.sampler) is RandomSampler


def test_only_plain_shuffling_is_made_seedable():
    class Backwards(RandomSampler):
        def __iter__(self):
            return iter(range(9, -1, -1))

    for sampler in (Backwards(range(10)), SequentialSampler(range(10))):
        raw = DataLoader(Ids(10), batch_size=5, sampler=sampler)
        loader = prepare_data_loader(
            raw, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=1
        )
        assert loader.get_sampler() is sampler and read(loader) == list(sampler)
    raw = DataLoader(Ids(10), batch_sampler=BatchSampler(RandomSampler(range(10)), 5, False))
    loader = prepare_data_loader(
        raw, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=1
    )
    assert read(loader) == permutation(1)


def test_a_sharded_loader_is_not_sharded_again():
    sampler = DistributedSampler(range(10), num_replicas=2, rank=0)
    raw = DataLoader(Ids(10), batch_size=2, sampler=sampler)
    with pytest.raises(PrepareError, match=r"its DistributedSampler.*do not prepare"):
        prepare_data_loader(raw, num_processes=2, process_index=0)
    assert len(read(prepare_data_loader(raw, num_processes=1, process_index=0))) == 5
    alone = DataLoader(
        Ids(10), batch_size=2, sampler=DistributedSampler(range(10), num_replicas=1, rank=0)
    )
    assert len(read(prepare_data_loader(alone, num_processes=2, process_index=0))) == 6
    prepared = prepare_data_loader(
        DataLoader(Ids(8), batch_size=2), num_processes=2, process_index=1
    )
    assert prepare_data_loader(prepared, num_processes=2, process_index=1) is prepared


def test_bad_input_is_one_clear_error():
    raw = DataLoader(Ids(10), batch_size=3)
    with pytest.raises(
        ConfigurationError,
        match=r"takes a torch.utils.data.DataLoader, not a builtins.list",
    ):
        prepare_data_loader([1, 2])
    with pytest.raises(ConfigurationError, match=r"skip_first_batches takes a torch"):
        skip_first_batches([1, 2], 1)
    with pytest.raises(PrepareError, match="process_index=2 is out of range"):
        prepare_data_loader(raw, num_processes=2, process_index=2)
    with pytest.raises(PrepareError, match=r"batch size 3 .*multiple of 2"):
        prepare_data_loader(raw, num_processes=2, process_index=0, split_batches=True)
    with pytest.raises(PrepareError, match=r"batch size 3 .*multiple of 2"):
        prepare_data_loader(
            DataLoader(Numbers(4), batch_size=3),
            num_processes=2,
            process_index=0,
            split_batches=True,
        )
    for loader in (
        DataLoader(Numbers(4), batch_size=None),
        DataLoader(Ids(4), batch_size=None),
        DataLoader(Ids(4), batch_sampler=EagerBatches(4)),
    ):
        for dispatch in (False, True):
            with pytest.raises(PrepareError, match="does not have a batch size"):
                prepare_data_loader(
                    loader,
                    num_processes=2,
                    process_index=0,
                    split_batches=True,
                    dispatch_batches=dispatch,
                )
    with pytest.warns(UserWarning, match="has no effect without dispatch_batches=True"):
        prepare_data_loader(
            raw, num_processes=2, process_index=0, slice_fn_for_dispatch=lambda *_, **__: None
        )
    with pytest.warns(UserWarning, match="has no effect without use_seedable_sampler=True"):
        prepare_data_loader(raw, num_processes=1, process_index=0, data_seed=3)
    with pytest.raises(ConfigurationError, match="not belong to a process group"):
        list(prepare_data_loader(raw, num_processes=2, process_index=0, dispatch_batches=True))


def test_who_reads_is_decided_by_the_dataset():
    kinds = {}
    for name, data in (("map", Ids(4)), ("stream", Numbers(4))):
        for put, dispatch in itertools.product((False, True), (None, False, True)):
            loader = prepare_data_loader(
                DataLoader(data, batch_size=2),
                device=torch.device("cpu"),
                num_processes=1,
                process_index=0,
                put_on_device=put,
                dispatch_batches=dispatch,
            )
            kinds[name, put, dispatch] = type(loader)
    dispatched = {case for case, kind in kinds.items() if kind is DataLoaderDispatcher}
    assert dispatched == {("map", False, True), ("map", True, True), ("stream", False, True), ("stream", True, True),
                          ("stream", True, None)}  # fmt: skip
    assert set(kinds.values()) == {DataLoaderDispatcher, DataLoaderShard}


@pytest.mark.parametrize("number", [0, 1, 2, 9])
def test_skipping_reads_no_sample_of_a_map_style_dataset(number):
    for shards, index in ((1, 0), (2, 0), (2, 1)):
        dataset = Ids(9)
        raw = DataLoader(dataset, batch_size=2)
        loader = (
            prepare_data_loader(raw, num_processes=shards, process_index=index)
            if shards > 1
            else raw
        )
        whole = [ids(batch) for batch in loader]
        dataset.read.clear()
        skipped = skip_first_batches(loader, number)
        assert [ids(batch) for batch in skipped] == whole[number:]
        assert dataset.read == [sample for batch in whole[number:] for sample in batch]
        assert len(skipped) == max(0, len(whole) - number)
        assert [ids(batch) for batch in skip_first_batches(skipped, 1)] == whole[number + 1 :]
        assert [ids(batch) for batch in loader] == whole, "the loader itself is left as it was"


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_in_a_stream(workers):
    raw = DataLoader(SizedNumbers(13), batch_size=2, num_workers=workers)
    for shards, index in ((1, 0), (2, 1)):
        loader = (
            prepare_data_loader(raw, num_processes=shards, process_index=index)
            if shards > 1
            else raw
        )
        whole = [ids(batch) for batch in loader]
        skipped = skip_first_batches(loader, 2)
        assert isinstance(skipped, SkipDataLoader if shards == 1 else DataLoaderShard)
        assert [ids(batch) for batch in skipped] == whole[2:]
        if not workers:
            assert len(skipped) == len(whole) - 2
        assert [ids(batch) for batch in skip_first_batches(skipped, 1)] == whole[3:]


def test_skipping_keeps_the_epoch_and_the_order():
    loader = prepare_data_loader(
        DataLoader(Ids(10), batch_size=2, shuffle=True),
        num_processes=1,
        process_index=0,
        use_seedable_sampler=True,
        data_seed=3,
    )
    read(loader)
    skipped = skip_first_batches(loader, 2)
    assert read(skipped) == permutation(4)[4:]


def test_loaders_that_do_not_batch_go_round_the_shards():
    for build in (
        lambda: DataLoader(Numbers(5), batch_size=None),
        lambda: DataLoader(range(5), batch_size=None),
    ):
        shards = [
            list(prepare_data_loader(build(), num_processes=2, process_index=index))
            for index in range(2)
        ]
        assert shards == [[0, 2, 4], [1, 3, 0]]
    loader = prepare_data_loader(
        DataLoader(range(5), batch_size=None), num_processes=2, process_index=1
    )
    assert list(loader.sampler) == [1, 3, 0]
    for build in (
        lambda: DataLoader(Numbers(5), batch_size=None),
        lambda: DataLoader(range(5), batch_size=None),
    ):
        uneven = [
            list(
                prepare_data_loader(
                    build(), num_processes=2, process_index=index, even_batches=False
                )
            )
            for index in range(2)
        ]
        assert uneven == [[0, 2, 4], [1, 3]]


def test_uneven_shards_know_their_own_last_batch():
    ends = []
    for index in range(2):
        loader = prepare_data_loader(
            DataLoader(Ids(10), batch_size=4),
            num_processes=2,
            process_index=index,
            even_batches=False,
        )
        ends.append([(ids(batch), loader.end_of_dataloader) for batch in loader])
    assert ends == [[([0, 1, 2, 3], False), ([8, 9], True)], [([4, 5, 6, 7], True)]]


def test_a_stateful_loader_is_built_where_it_is_asked_for():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    raws = [
        DataLoader(Ids(7), batch_size=2, shuffle=True, drop_last=True),
        DataLoader(Numbers(7), batch_size=2),
        DataLoader(TensorDataset(torch.arange(4)), batch_size=None),
        DataLoader(Ids(7), batch_sampler=[[1, 2], [0]]),
        stateful(Ids(7), batch_size=2),
    ]
    with pytest.raises(PrepareError, match="into the prepared"):
        positioned = stateful(Ids(4))
        positioned.load_state_dict(stateful(Ids(4)).state_dict())
        prepare_data_loader(positioned, num_processes=1, process_index=0)
    for raw in raws:
        seed(3)
        wanted = [str(batch) for batch in raw]
        loader = prepare_data_loader(
            raw, num_processes=1, process_index=0, use_stateful_dataloader=True
        )
        assert isinstance(loader, stateful)
        assert (loader.batch_size, loader.drop_last, loader.sampler) == (
            raw.batch_size,
            raw.drop_last,
            raw.sampler,
        )
        seed(3)
        assert [str(batch) for batch in loader] == wanted

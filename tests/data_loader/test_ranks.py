# SPDX-License-Identifier: Apache-2.0
"""Loaders of 2 and 3 ranks, which must agree although the ranks' random numbers differ, and dispatched batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from loaders import (
    BatchesAsItGoes,
    DrawsAsItGoes,
    EagerBatches,
    Ids,
    Numbers,
    OwnGenerator,
    PythonShuffle,
    drawn,
    ids,
    keep_states,
    seed,
    seeded,
    states,
)
from rank_pool import on_ranks
from states import all_ranks
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate.core.errors import PrepareError
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from accelerate.data_loader.metrics import gather_for_metrics
from accelerate.state import PartialState

everywhere = on_ranks(2, 3)
on_two = on_ranks(2, thorough=[3])
CPU = torch.device("cpu")


def my_rank():
    return PartialState(cpu=True).process_index


def world():
    return PartialState(cpu=True).num_processes


def generator(number):
    return torch.Generator().manual_seed(number)


def steps_of(loader):
    return [
        (ids(batch), loader.batch_counts, loader.end_of_dataloader, loader.remainder)
        for batch in loader
    ]


SOURCES = ("python", "numpy", "torch")
LOADERS = {
    "shuffled": lambda: DataLoader(Ids(23), batch_size=2, shuffle=True),
    "generator": lambda: DataLoader(
        Ids(23), batch_size=2, shuffle=True, generator=generator(my_rank())
    ),
    "sampler's generator": lambda: DataLoader(
        Ids(23), batch_size=2, sampler=RandomSampler(range(23), generator=generator(my_rank()))
    ),
    "weighted": lambda: DataLoader(
        Ids(23), batch_size=2, sampler=WeightedRandomSampler([1.0] * 23, 19)
    ),
    "python's": lambda: DataLoader(Ids(23), batch_size=2, sampler=PythonShuffle(23)),
    "own batches": lambda: DataLoader(Ids(23), batch_sampler=EagerBatches(23)),
    "workers": lambda: DataLoader(Ids(23), batch_size=2, shuffle=True, num_workers=1),
    "replacement": lambda: DataLoader(
        Ids(23),
        batch_size=2,
        sampler=RandomSampler(range(23), True, 71, generator=generator(my_rank())),
    ),
    "stream": lambda: DataLoader(Numbers(23, shuffled=True), batch_size=2),
    **{
        f"{source} as it goes": lambda source=source: DataLoader(
            Ids(23), batch_size=2, sampler=DrawsAsItGoes(23, source)
        )
        for source in SOURCES
    },
    "batches as it goes": lambda: DataLoader(Ids(23), batch_sampler=BatchesAsItGoes(23, "python")),
    "own batches in workers": lambda: DataLoader(
        Ids(23), batch_sampler=EagerBatches(23), num_workers=1
    ),
    "own generator": lambda: DataLoader(
        Ids(23), batch_size=2, sampler=OwnGenerator(23, random.Random(my_rank()))
    ),
    "numpy's own": lambda: DataLoader(
        Ids(23),
        batch_size=2,
        sampler=OwnGenerator(23, np.random.default_rng(my_rank())),
        num_workers=1,
    ),
    "stream with a worker": lambda: DataLoader(
        Numbers(23, shuffled=True), batch_size=2, num_workers=1
    ),
}


def global_batches(name, build):
    """A plain loop over what one process would read at the global batch size; rank 0's random numbers."""
    raw = build()
    if "batches" in name:
        batches = [ids(batch) for batch in raw]
        starts = range(0, len(batches), world())
        return [sum(batches[start : start + world()], []) for start in starts]  # noqa: RUF017
    raw.__dict__["batch_size"] = raw.batch_sampler.batch_size = 2 * world()
    return [ids(batch) for batch in raw]


@on_two
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_orders_are_rank_0s(name, exact):
    build = LOADERS[name]
    seed(50 + my_rank())
    loader = prepare_data_loader(build(), exact=exact, rng_types=["generator"])
    seed(100 + my_rank())
    parts = [steps_of(loader) for _ in range(2)]
    after = all_ranks(states())
    passes = all_ranks(parts)
    if my_rank():
        return
    seed(50)
    plain = build() if exact else seeded(build())
    seed(100)
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
    found = all_ranks((random.random(), float(np.random.rand()), torch.rand(1).item()))
    assert len(set(found)) == world(), found


def lazies(length, workers=0):
    """Loaders that draw each index when it is asked for, by the name of what they draw with."""
    found = {}
    for source in SOURCES:
        options = {"num_workers": workers, "batch_size": 2}
        found[source] = DataLoader(Ids(length), sampler=DrawsAsItGoes(length, source), **options)
        found[f"{source}, batches"] = DataLoader(
            Ids(length), batch_sampler=BatchesAsItGoes(length, source, 2), num_workers=workers
        )
    return found


def draw_in_between():
    """Each rank another number of draws from each generator."""
    return [[drawn(source, 1000) for _ in range(my_rank() + 1)] for source in SOURCES]


def in_order(seen):
    """The samples that the ranks have seen (a list a step), step by step."""
    return [
        sample for step in zip(*all_ranks(seen), strict=True) for part in step for sample in part
    ]


@on_two
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_that_draw_while_the_loops_draw_unlike(workers, exact):
    for name, raw in lazies(53, workers).items():
        if workers and name not in ("python", "torch, batches"):
            continue
        loader = prepare_data_loader(raw, exact=exact)
        orders = []
        for _ in range(2):
            seen = []
            seed(300 + my_rank())
            for batch in loader:
                seen.append(ids(batch)[: loader.batch_counts[my_rank()]])
                draw_in_between()
            orders.append(in_order(seen))
            assert sorted(orders[-1]) == list(range(53)), (name, orders[-1])
        assert not workers or orders[0] != list(range(53))


class Unseeded(DrawsAsItGoes):
    """Draws from a generator that nobody can share or save."""

    def __iter__(self):
        return iter(np.random.default_rng().permutation(self.length).tolist())


@everywhere
def test_samplers_that_draw_unlike_on_each_rank():
    """Each sample once, also when the rest is read on another number of shards."""
    my_rank()
    loader = prepare_data_loader(
        DataLoader(Ids(53), batch_size=2, sampler=Unseeded(53, "python")), exact=True
    )
    seen = []
    for step, batch in enumerate(loader):
        seen += ids(batch)[: loader.batch_counts[my_rank()]]
        if step == 3:
            break
    positions = all_ranks(loader.state_dict())
    whole = sum(all_ranks([ids(batch)[: loader.batch_counts[my_rank()]] for batch in loader]), [])  # noqa: RUF017
    assert sorted(sum(whole, [])) == list(range(53))  # noqa: RUF017
    for position in positions:
        rest = []
        for index in range(4):
            raw = DataLoader(Ids(53), batch_size=2, sampler=Unseeded(53, "python"))
            resumed = prepare_data_loader(raw, num_processes=4, process_index=index, exact=True)
            resumed.load_state_dict(position)
            rest += [
                sample for batch in resumed for sample in ids(batch)[: resumed.batch_counts[index]]
            ]
        assert sorted(sum(all_ranks(seen), []) + rest) == list(range(53))  # noqa: RUF017


def read_to_a_position():
    """By name: what all ranks have read up to a step of the second epoch, and the positions there."""
    my_rank()
    found = {}
    for name, raw in lazies(53).items():
        loader = prepare_data_loader(raw, exact=True)
        seed(500 + my_rank())
        for epoch in range(2):
            seen = []
            for step, batch in enumerate(loader):
                seen += ids(batch)[: loader.batch_counts[my_rank()]]
                draw_in_between()
                if epoch and step == 4:
                    break
        found[name] = (sum(all_ranks(seen), []), all_ranks(loader.state_dict()))  # noqa: RUF017
    return found


@pytest.mark.parametrize("nproc", [2, 3])
def test_positions_go_on_with_any_number_of_shards(ranks, nproc):
    saved, *_ = ranks(nproc).run(read_to_a_position)
    for name, (seen, positions) in saved.items():
        for shards in (1, 2, 3):
            rest = []
            for index in range(shards):
                seed(index)
                loader = prepare_data_loader(
                    lazies(53)[name], num_processes=shards, process_index=index, exact=nproc == 2
                )
                loader.load_state_dict(positions[index % nproc])
                for batch in loader:
                    drawn("python", 9)
                    rest += ids(batch)[: loader.batch_counts[index]]
            assert sorted(seen + rest) == list(range(53)), (name, shards)


@everywhere
def test_a_position_of_one_process_goes_on_in_a_run():
    """Its sampler had no generator of its own, as those of several processes have."""

    def shuffled(**options):
        loader = DataLoader(Ids(24), batch_size=2, shuffle=True)
        return prepare_data_loader(loader, rng_types=["generator"], **options)

    seed(3)
    alone = shuffled(num_processes=1, process_index=0)
    first = [ids(batch) for _, batch in zip(range(6), alone, strict=False)]
    position = alone.state_dict()
    seed(7 + my_rank())
    loader = shuffled()
    loader.load_state_dict(position)
    passes = []
    for _ in range(2):
        parts = [ids(batch)[: loader.batch_counts[my_rank()]] for batch in loader]
        passes.append(all_ranks(parts))
    rest, following = ([sum(parts, []) for parts in epoch] for epoch in passes)  # noqa: RUF017
    assert sorted(sum(first + rest, [])) == list(range(24))  # noqa: RUF017
    assert sorted(sum(following, [])) == list(range(24))  # noqa: RUF017


@everywhere
def test_a_seed_that_differs_is_agreed_on():
    torch.manual_seed(50 + my_rank())
    loader = prepare_data_loader(
        DataLoader(Ids(4 * world()), batch_size=2, shuffle=True), use_seedable_sampler=True
    )
    for epoch in range(2):
        parts = all_ranks([ids(batch) for batch in loader])
        joined = [sample for step in range(2) for part in parts for sample in part[step]]
        assert joined == torch.randperm(4 * world(), generator=generator(50 + epoch)).tolist()


@everywhere
def test_dispatched_batches():
    def build(data, batch_size, **options):
        sampler = data if isinstance(data, DrawsAsItGoes) else None
        raw = DataLoader(
            data if sampler is None else Ids(sampler.length), batch_size=batch_size, sampler=sampler
        )
        return prepare_data_loader(
            raw, device=CPU, put_on_device=True, dispatch_batches=True, **options
        )

    for source in SOURCES:
        loader = build(DrawsAsItGoes(53, source), 2)
        for _ in range(2):
            seen = []
            for batch in loader:
                seen += ids(batch)[: loader.batch_counts[my_rank()]]
                draw_in_between()
            assert sorted(sum(all_ranks(seen), [])) == list(range(53))  # noqa: RUF017
    for data in (Ids, Numbers):
        for length in (1, 4 * world(), 4 * world() + 1, 4 * world() + 3):
            for options in (
                {},
                {"exact": True},
                {"split_batches": True},
                {"split_batches": True, "exact": True},
            ):
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


class SaysLess(SequentialSampler):
    def __len__(self):
        return len(self.data_source) - 3


class SaysMore(SequentialSampler):
    def __len__(self):
        return len(self.data_source) + 3


METRICS = {
    "ragged batches": lambda: DataLoader(Ids(13), batch_sampler=EagerBatches(13)),
    "a length that is too small": lambda: DataLoader(
        Ids(13), batch_size=2, sampler=SaysLess(range(13))
    ),
    "a length that is too large": lambda: DataLoader(
        Ids(13), batch_size=2, sampler=SaysMore(range(13))
    ),
    "workers that end in the middle": lambda: DataLoader(Numbers(13), batch_size=2, num_workers=2),
}


@on_two
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_have_each_sample_once(name, dispatch):
    all_ranks(None)
    seed(1)
    plain = [sample for batch in METRICS[name]() for sample in ids(batch)]
    seed(1)
    loader = prepare_data_loader(METRICS[name](), dispatch_batches=dispatch)
    found = []
    for batch in loader:
        found += gather_for_metrics(torch.tensor(ids(batch)), loader).tolist()
    assert sorted(found) == sorted(plain) and (found == plain or name.startswith("workers"))


@on_two
def test_the_fill_of_a_dispatched_epoch_does_not_depend_on_where_the_pass_begins():
    def build():
        raw = DataLoader(Ids(15, noisy=True), batch_size=2, shuffle=True, generator=generator(3))
        return prepare_data_loader(raw, device=CPU, put_on_device=True, dispatch_batches=True)

    def passes(loader, count=2):
        return [[(ids(batch), batch["noise"].tolist()) for batch in loader] for _ in range(count)]

    seed(1)
    wanted = passes(build())
    for number in range(2):
        loader = build()
        seed(1)
        if number == 0:
            next(iter(loader))
            position, here = loader.state_dict(), keep_states()
            loader = build()
            loader.load_state_dict(position)
            here()
            first, second = passes(loader)
            assert second == wanted[1], "filling has not changed the generators"
        else:
            first = passes(skip_first_batches(loader, 1), 1)[0]
        assert [found[0] for found in first] == [found[0] for found in wanted[0][1:]]


@everywhere
def test_dispatched_objects():
    def collate(samples):
        return {
            "text": [f"#{sample}" for sample in samples],
            "id": torch.tensor(samples),
            "kind": "all",
        }

    loader = prepare_data_loader(
        DataLoader(list(range(2 * world() + 1)), batch_size=2, collate_fn=collate),
        dispatch_batches=True,
    )
    first, last = list(loader)
    assert (
        first["text"] == [f"#{2 * my_rank()}", f"#{2 * my_rank() + 1}"] and first["kind"] == "all"
    )
    assert (
        last["text"] == [f"#{number}" for number in last["id"].tolist()] and len(last["text"]) == 1
    )
    assert last["id"].item() == (2 * world() if my_rank() == 0 else my_rank() - 1)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("dispatch", [None, True, False])
def test_pipes_of_torch_are_read_once(dispatch, filtered):
    """Opening one is a collective, and behind a `sharding_filter` each rank reads its own part."""
    my_rank()
    pipe = IterableWrapper(list(range(11))).shuffle()
    if filtered:
        pipe = pipe.sharding_filter()
    options = {"device": CPU, "put_on_device": True, "dispatch_batches": dispatch}
    raw = DataLoader(pipe, batch_size=2)
    if filtered and dispatch:
        with pytest.raises(PrepareError, match="already split between the processes"):
            prepare_data_loader(raw, **options)
        return
    loader = prepare_data_loader(raw, **options)
    epochs = []
    for _ in range(2):
        batches = [
            ids(batch)[: loader.batch_counts[my_rank()]] if loader.batch_counts else ids(batch)
            for batch in loader
        ]
        epochs.append([sample for part in all_ranks(batches) for batch in part for sample in batch])
        assert set(epochs[-1]) == set(range(11))
        assert len(epochs[-1]) == 11 or dispatch is False
    assert epochs[0] != epochs[1]


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
        assert "the disk is gone" in str(error) and (
            my_rank() == 0 or "rank 0, which reads" in str(error)
        )
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


@everywhere
@pytest.mark.parametrize("size", [13, 16, 17, 24])
def test_the_length_of_a_dispatched_loader_is_that_of_its_pass(size):
    raw = DataLoader(list(range(size)), batch_size=4)
    loader = prepare_data_loader(
        raw, CPU, put_on_device=True, dispatch_batches=True, even_batches=False
    )
    assert len(loader) == len(list(loader))


@everywhere
@pytest.mark.parametrize("dispatch", [True, False])
def test_several_rows_for_each_sample_are_gathered(dispatch):
    loader = prepare_data_loader(
        DataLoader(torch.arange(11), batch_size=2),
        CPU,
        put_on_device=True,
        dispatch_batches=dispatch,
    )
    rows = []
    objects = []
    for batch in loader:
        rows += gather_for_metrics(batch.repeat_interleave(3), loader).tolist()
        objects += gather_for_metrics([str(i) for i in batch.tolist() for _ in "ab"], loader)
    assert rows == [i for i in range(11) for _ in range(3)]
    assert objects == [str(i) for i in range(11) for _ in range(2)]

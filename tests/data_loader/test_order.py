# SPDX-License-Identifier: Apache-2.0
"""Samplers that draw between their indices: the plain loader's order on one process, one order for all shards."""

from __future__ import annotations

import copy
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from cases import cases
from loaders import (
    BatchesAsItGoes,
    DrawsAsItGoes,
    Ids,
    OwnGenerator,
    StreamAsItGoes,
    drawn,
    ids,
    keep_states,
    seed,
    seeded,
    states,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from accelerate.core.errors import CheckpointError
from accelerate.data_loader import order, prepare_data_loader, skip_first_batches

LENGTH = 53
SOURCES = ("python", "numpy", "torch")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def sampler(source, workers=0):
    return DataLoader(Ids(LENGTH), batch_size=4, sampler=DrawsAsItGoes(LENGTH, source), num_workers=workers)


def batches(source, workers=0):
    return DataLoader(Ids(LENGTH), batch_sampler=BatchesAsItGoes(LENGTH, source), num_workers=workers)


def dropping(source, workers=0):
    return DataLoader(
        Ids(LENGTH), batch_size=4, sampler=DrawsAsItGoes(LENGTH, source), num_workers=workers, drop_last=True
    )


def single(build, **options):
    return prepare_data_loader(build(), num_processes=1, process_index=0, **options)


def noise():
    return [drawn(source, 1000) for source in SOURCES]


def passed(loader, stop=None):
    """The batches of a pass and what the loop draws after each, in the way of dropout and augmentation."""
    found = []
    for batch in loader:
        found.append((ids(batch), noise()))
        if len(found) == stop:
            break
    return found


@pytest.mark.parametrize("build", [sampler, batches, dropping])
@pytest.mark.parametrize(("source", "workers"), [*((source, 0) for source in SOURCES), ("python", 2), ("torch", 2)])
def test_one_process_draws_as_the_plain_loader_does(build, source, workers):
    """The order, what the loop draws in between, and the ends; also after a pass that was left."""
    runs = []
    for loader in (build(source, workers), single(functools.partial(build, source, workers))):
        seed(3)
        runs.append([passed(loader), passed(loader, 2), passed(loader), states()])
    assert runs[0] == runs[1]
    prepared = single(functools.partial(build, source))
    ends = [prepared.end_of_dataloader for _ in prepared]
    assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("build", [sampler, batches])
@pytest.mark.parametrize(
    ("exact", "source", "workers"),
    cases(
        [(exact, source, 0) for exact in (False, True) for source in SOURCES]
        + [(False, "torch", 2), (True, "torch", 2)],
        thorough=[(False, "torch", 2), (True, "torch", 2), (False, "numpy", 0), (True, "python", 0)],
    ),
)
def test_a_resumed_pass_goes_on_like_one_that_never_stopped(build, source, workers, exact):
    build = functools.partial(build, source, workers)
    seed(8)
    loader = single(build, exact=exact)
    passed(loader)
    whole = passed(loader)
    for point in (1, 5, len(whole) - 1, len(whole)):
        seed(8)
        loader = single(build, exact=exact)
        passed(loader)
        passing = iter(loader)
        for _ in range(point):
            next(passing)
            noise()
        saved, put_back = copy.deepcopy(loader.state_dict()), keep_states()
        del passing
        seed(99)
        resumed = single(build, exact=exact)
        resumed.load_state_dict(saved)
        put_back()
        again = passed(resumed)
        assert again == whole[point:], point
        # Also without the generators of the saved run, and after the first batches were left out by hand.
        for rest in (single(build), skip_first_batches(loader, point)):
            seed(5)
            if rest.origin is not loader:
                rest.load_state_dict(saved)
                seen = [sample for batch, _ in passed(rest) for sample in batch]
                done = [sample for batch, _ in whole[:point] for sample in batch]
                assert sorted(done + seen) == list(range(LENGTH))


def test_a_position_of_a_resumed_pass():
    """Saved, resumed, saved again in the same epoch, resumed on other numbers of shards."""
    for source, exact in itertools.product(SOURCES, (False, True)):
        build = functools.partial(sampler, source)
        seed(1)
        loader = single(build, exact=exact)
        seen = [sample for batch, _ in passed(loader, 3) for sample in batch]
        for number in range(2):
            saved = copy.deepcopy(loader.state_dict())
            seed(50 + number)
            loader = single(build, exact=exact)
            loader.load_state_dict(saved)
            seen += [sample for batch, _ in passed(loader, 2) for sample in batch]
        saved = copy.deepcopy(loader.state_dict())
        for shards in (1, 2, 3):
            rest = []
            for index in range(shards):
                seed(70 + index)
                loader = prepare_data_loader(build(), num_processes=shards, process_index=index, exact=True)
                loader.load_state_dict(saved)
                for batch in loader:
                    rest += ids(batch)[: loader.batch_counts[index]]
                    noise()
            assert sorted(seen + rest) == list(range(LENGTH)), (source, exact, shards)


GENERATORS = {
    "random.Random": lambda: random.Random(4),
    "numpy Generator": lambda: np.random.default_rng(4),
    "numpy MT19937": lambda: np.random.Generator(np.random.MT19937(4)),
    "numpy RandomState": lambda: np.random.RandomState(4),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_of_a_samplers_own_are_part_of_the_position(name):
    def build():
        return DataLoader(Ids(LENGTH), batch_size=4, sampler=OwnGenerator(LENGTH, GENERATORS[name]()))

    plain, loader = build(), single(build)
    wanted = [[ids(batch) for batch in plain] for _ in range(3)]
    list(loader)
    between = copy.deepcopy(loader.state_dict())
    list(itertools.islice(loader, 5))
    within = copy.deepcopy(loader.state_dict())
    for saved, left in ((between, wanted[1]), (within, wanted[1][5:])):
        resumed = single(build)
        resumed.load_state_dict(saved)
        assert [ids(batch) for batch in resumed] == left
        assert [ids(batch) for batch in resumed] == wanted[2]


class FromOutside(DrawsAsItGoes):
    """What it draws from, no position holds."""

    calls = 0

    def __iter__(self):
        FromOutside.calls += 1
        return iter(np.random.RandomState(FromOutside.calls).permutation(self.length).tolist())


class Counting(DrawsAsItGoes):
    """Draws from a count of its passes, and tells it."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(np.random.RandomState(self.passes).permutation(self.length).tolist())

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


def counted(kind):
    return DataLoader(Ids(LENGTH), batch_size=4, sampler=kind(LENGTH, "python"))


def grouped():
    transformers = pytest.importorskip("transformers.trainer_pt_utils")
    lengths = [1 + number % 7 for number in range(LENGTH)]
    return DataLoader(Ids(LENGTH), batch_size=4, sampler=transformers.LengthGroupedSampler(4, lengths=lengths))


@pytest.mark.parametrize("exact", [False, True])
def test_a_sampler_that_groups_by_length(exact):
    seed(2)
    plain = grouped()
    wanted = [passed(plain) for _ in range(2)]
    seed(2)
    loader = single(grouped, exact=exact)
    assert [passed(loader), passed(loader, 5)] == [wanted[0], wanted[1][:5]]
    saved = copy.deepcopy(loader.state_dict())
    rest = []
    for index in range(3):
        seed(60 + index)
        resumed = prepare_data_loader(grouped(), num_processes=3, process_index=index, exact=True)
        resumed.load_state_dict(saved)
        rest += [sample for batch in resumed for sample in ids(batch)[: resumed.batch_counts[index]]]
    assert sorted(rest) == sorted(sample for batch, _ in wanted[1][5:] for sample in batch)


def test_an_order_that_cannot_be_drawn_again_is_refused():
    loader = single(lambda: counted(FromOutside))
    list(itertools.islice(loader, 5))
    resumed = single(lambda: counted(FromOutside))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="after 20 elements the FromOutside gives other ones"):
        list(resumed)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(1)
    assert len(list(resumed)) == len(loader)


def test_a_sampler_with_a_state_goes_on_by_it():
    loader = single(lambda: counted(Counting))
    list(loader)
    list(loader)
    wanted = [ids(batch) for batch in loader]
    loader = single(lambda: counted(Counting))
    list(loader)
    list(loader)
    list(itertools.islice(loader, 5))
    resumed = single(lambda: counted(Counting))
    resumed.load_state_dict(copy.deepcopy(loader.state_dict()))
    assert [ids(batch) for batch in resumed] == wanted[5:]


def test_draws_in_turn_that_are_too_many_to_record(monkeypatch):
    monkeypatch.setattr(order, "RECORDS", 3)
    loader = single(functools.partial(sampler, "python"))
    passed(loader, 3)
    assert "unrecorded" not in loader.state_dict()["order"]
    passed(loader, 9)
    with pytest.warns(UserWarning, match="cannot be resumed from"):
        saved = loader.state_dict()
    resumed = single(functools.partial(sampler, "python"))
    resumed.load_state_dict(saved)
    with pytest.raises(CheckpointError, match="the rest of that epoch is not known"):
        next(iter(resumed))
    exact = single(functools.partial(sampler, "python"), exact=True)
    passed(exact, 9)
    assert "unrecorded" not in exact.state_dict()["order"]


def test_a_length_that_is_wrong_is_found_out():
    class Short(DrawsAsItGoes):
        def __len__(self):
            return self.length + 3

    class Long(DrawsAsItGoes):
        def __len__(self):
            return 20

    def ends(kind):
        loader = single(lambda: DataLoader(Ids(LENGTH), batch_size=4, sampler=kind(LENGTH, "torch")))
        return [loader.end_of_dataloader for _ in loader]

    assert ends(Long) == [False] * 13 + [True]
    with pytest.warns(UserWarning, match="has a length of 56 and yields fewer elements"):
        assert len(ends(Short)) == 14


def test_known_samplers_are_read_without_a_look_at_generators(monkeypatch):
    """What keeps the cost of a batch where it is for them."""
    calls = []
    capture = order.Generators.capture
    monkeypatch.setattr(order.Generators, "capture", lambda self: calls.append(1) or capture(self))
    for build in (
        lambda: DataLoader(Ids(400), batch_size=2),
        lambda: DataLoader(Ids(400), batch_size=2, shuffle=True),
        lambda: DataLoader(Ids(400), batch_size=2, sampler=WeightedRandomSampler([1.0] * 400, 400)),
    ):
        for shards in (1, 2):
            loader = prepare_data_loader(build(), num_processes=shards, process_index=0)
            calls.clear()
            assert len(list(loader)) == 200 // shards and len(calls) < 8


# -- a comparison with plain loops over random combinations


def combination(number):
    """One loader of many kinds, how it is shared out, and the order of a plain loop over it at its own batch size."""
    choose = random.Random(number)
    length, size, shards = choose.randint(1, 40), choose.randint(1, 5), choose.randint(1, 4)
    source = choose.choice(SOURCES)
    kind = choose.choice(
        ["sequential", "shuffled", "lazy", "weighted", "replacement", "batches", "none", "stream", "own"]
    )
    drop_last = choose.random() < 0.3 and kind not in ("batches", "none", "own")
    split = choose.random() < 0.3 and kind not in ("batches", "none", "own")
    exact, even = choose.random() < 0.5 and kind != "none", choose.random() < 0.6
    step = size * shards if split else size

    def build(batch_size=step):
        if kind == "none":
            return DataLoader(Ids(length), batch_size=None, sampler=DrawsAsItGoes(length, source))
        if kind == "batches":
            return DataLoader(Ids(length), batch_sampler=BatchesAsItGoes(length, source))
        if kind == "own":
            own = BatchSampler(DrawsAsItGoes(length, source), batch_size, False)
            return DataLoader(torch.arange(length), batch_size=None, sampler=own)
        options = {"batch_size": batch_size, "drop_last": drop_last}
        if kind == "stream":
            return DataLoader(StreamAsItGoes(length, source), **options)
        chosen = {
            "sequential": lambda: SequentialSampler(range(length)),
            "shuffled": lambda: RandomSampler(range(length)),
            "lazy": lambda: DrawsAsItGoes(length, source),
            "weighted": lambda: WeightedRandomSampler([1.0] * length, length + 2),
            "replacement": lambda: RandomSampler(range(length), True, 70, torch.Generator().manual_seed(1)),
        }
        return DataLoader(Ids(length), sampler=chosen[kind](), **options)

    return build, step, shards, {"split_batches": split, "exact": exact, "even_batches": even}, (kind, drop_last)


def all_of(batch):
    found = ids(batch)
    return found if isinstance(found, list) else [found]


def test_random_combinations_lose_and_repeat_nothing():
    for number in range(100):
        compare(number)


@pytest.mark.thorough
@pytest.mark.parametrize("block", range(10))
def test_many_random_combinations_lose_and_repeat_nothing(block):
    for number in range(100 + 150 * block, 250 + 150 * block):
        compare(number)


def compare(number):
    build, step, shards, options, (kind, drop_last) = combination(number)
    seed(number)
    plain = seeded(build()) if shards > 1 and not options["exact"] else build()
    wanted = [[all_of(batch) for batch in plain] for _ in range(2)]
    passes = []
    for index in range(shards):
        seed(number)
        loader = prepare_data_loader(build(), num_processes=shards, process_index=index, **options)
        passes.append([[(all_of(batch), loader.batch_counts) for batch in loader] for _ in range(2)])
    case = (number, kind, shards, step, drop_last, options)
    for epoch, batches in enumerate(wanted):
        found = [one[epoch] for one in passes]
        order = [sample for batch in batches for sample in batch]
        if drop_last and not options["split_batches"]:
            # The last global batch is left out where not all shards have a batch of it.
            order = order[: len(batches) // shards * shards * step]
        seen = []
        for parts in itertools.zip_longest(*found):
            for index, part in enumerate(parts):
                if part is not None:
                    seen += part[0][: part[1][index]] if part[1] is not None else part[0]
        if kind == "none" and options["even_batches"] and shards > 1:
            # Batches that nobody counts: the last step is completed with the first ones.
            assert seen[: len(order)] == order, case
        else:
            assert seen == order, case
        if shards > 1 and (options["even_batches"] or options["exact"] or drop_last):
            assert len({len(one) for one in found}) == 1, case

# SPDX-License-Identifier: Apache-2.0
"""Samplers that draw between their indices: the plain loader's samples on one process, one order for all shards."""

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
    StreamAsItGoes,
    drawn,
    ids,
    keep_states,
    seed,
    seeded,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from accelerate.core.errors import CheckpointError
from accelerate.data_loader import order, prepare_data_loader, skip_first_batches

LENGTH = 53
SOURCES = ("python", "numpy", "torch")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def sampler(source, workers=0):
    return DataLoader(
        Ids(LENGTH), batch_size=4, sampler=DrawsAsItGoes(LENGTH, source), num_workers=workers
    )


def batches(source, workers=0):
    return DataLoader(
        Ids(LENGTH), batch_sampler=BatchesAsItGoes(LENGTH, source), num_workers=workers
    )


def dropping(source, workers=0):
    return DataLoader(
        Ids(LENGTH),
        batch_size=4,
        sampler=DrawsAsItGoes(LENGTH, source),
        num_workers=workers,
        drop_last=True,
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
@pytest.mark.parametrize(
    ("source", "workers"), [*((source, 0) for source in SOURCES), ("torch", 2)]
)
def test_one_process_reads_as_the_plain_loader_does(build, source, workers):
    runs = []
    for loader in (build(source, workers), single(functools.partial(build, source, workers))):
        seed(3)
        runs.append([[ids(batch) for batch in loader] for _ in range(2)])
    assert runs[0] == runs[1]
    ends = [loader.end_of_dataloader for _ in loader]
    assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("build", [sampler, batches])
@pytest.mark.parametrize(
    ("source", "workers"),
    cases([*((source, 0) for source in SOURCES), ("torch", 2)], thorough=[("numpy", 0)]),
)
def test_a_resumed_pass_continues_like_the_saved_one(build, source, workers):
    """Saving draws the rest of the order, without an effect on what the loop draws."""
    build = functools.partial(build, source, workers)
    for point in (1, 5, 12):
        seed(8)
        loader = single(build)
        passed(loader)
        passing = iter(loader)
        done = []
        for _ in range(point):
            done += ids(next(passing))
            noise()
        saved, put_back = copy.deepcopy(loader.state_dict()), keep_states()
        wanted = passed(passing)
        seed(99)
        resumed = single(build)
        resumed.load_state_dict(saved)
        put_back()
        assert passed(resumed) == wanted, point
        # Also without the generators of the saved run, and after the first batches were left out by hand.
        rest = single(build)
        rest.load_state_dict(saved)
        seen = [sample for batch, _ in passed(skip_first_batches(rest, point)) for sample in batch]
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
                loader = prepare_data_loader(
                    build(), num_processes=shards, process_index=index, exact=True
                )
                loader.load_state_dict(saved)
                for batch in loader:
                    rest += ids(batch)[: loader.batch_counts[index]]
                    noise()
            assert sorted(seen + rest) == list(range(LENGTH)), (source, exact, shards)


class FromOutside(DrawsAsItGoes):
    """Draws from what no position contains."""

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
    return DataLoader(
        Ids(LENGTH), batch_size=4, sampler=transformers.LengthGroupedSampler(4, lengths=lengths)
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("build", [grouped, lambda: counted(FromOutside)])
def test_the_rest_of_an_epoch_is_read_by_any_number_of_shards(build, exact):
    seed(2)
    loader = single(build, exact=exact)
    passed(loader)
    passing = iter(loader)
    for _ in range(5):
        next(passing)
    saved = copy.deepcopy(loader.state_dict())
    wanted = [sample for batch, _ in passed(passing) for sample in batch]
    rest = []
    for index in range(3):
        seed(60 + index)
        resumed = prepare_data_loader(build(), num_processes=3, process_index=index, exact=True)
        resumed.load_state_dict(saved)
        rest.append([ids(batch)[: resumed.batch_counts[index]] for batch in resumed])
        assert len(list(resumed)) == 5
    assert [
        sample for step in zip(*rest, strict=True) for part in step for sample in part
    ] == wanted


def test_batches_and_keys_of_other_types_are_saved():
    orders = (
        [["a", "b"], ["c"]],
        [("a", 1), ("b", 2), ("c", 3)],
        [torch.tensor([1, 0]), torch.tensor([2])],
    )
    for elements in orders:
        assert str(order.decoded(order.encoded(elements))) == str(elements)
    assert order.decoded(order.encoded([[3, 1], [], [2]])) == [[3, 1], [], [2]]


def test_a_position_without_the_order_of_a_sampler_of_an_unknown_kind_is_refused():
    loader = single(lambda: DataLoader(Ids(LENGTH), batch_size=4, shuffle=True))
    next(iter(loader))
    other = single(functools.partial(sampler, "torch"))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="DrawsAsItGoes"):
        list(other)


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


# -- a comparison with plain loops over random combinations


def combination(number):
    """One loader of many kinds, how it is shared out, and the order of a plain loop over it at its own batch size."""
    choose = random.Random(number)
    length, size, shards = choose.randint(1, 40), choose.randint(1, 5), choose.randint(1, 4)
    source = choose.choice(SOURCES)
    kind = choose.choice(
        [
            "sequential",
            "shuffled",
            "lazy",
            "weighted",
            "replacement",
            "batches",
            "none",
            "stream",
            "own",
        ]
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
            "replacement": lambda: RandomSampler(
                range(length), True, 70, torch.Generator().manual_seed(1)
            ),
        }
        return DataLoader(Ids(length), sampler=chosen[kind](), **options)

    return (
        build,
        step,
        shards,
        {"split_batches": split, "exact": exact, "even_batches": even},
        (kind, drop_last),
    )


def all_of(batch):
    found = ids(batch)
    return found if isinstance(found, list) else [found]


def test_random_combinations_lose_and_repeat_nothing():
    for number in range(100):
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
        passes.append(
            [[(all_of(batch), loader.batch_counts) for batch in loader] for _ in range(2)]
        )
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

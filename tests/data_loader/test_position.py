# SPDX-License-Identifier: Apache-2.0
"""The position of a loader: saved after any batch, resumed on any number of shards, reading only what is left."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from cases import cases
from loaders import (
    EagerBatches,
    EagerOrder,
    Ids,
    Numbers,
    PythonShuffle,
    StatefulNumbers,
    ids,
    keep_states,
    seed,
    states,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from accelerate.core.errors import CheckpointError
from accelerate.data_loader import prepare_data_loader, skip_first_batches

LENGTH = 23
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker"),
]


def as_saved(value: Any) -> Any:
    """Through JSON and back, byte tensors as lists: what a checkpoint does."""

    def listed(part):
        if isinstance(part, torch.Tensor):
            assert part.dtype == torch.uint8
            return {"bytes": part.tolist()}
        if isinstance(part, dict):
            assert all(isinstance(key, str) for key in part)
            return {key: listed(inner) for key, inner in part.items()}
        return [listed(inner) for inner in part] if isinstance(part, list) else part

    def back(part):
        if isinstance(part, dict):
            if part.keys() == {"bytes"}:
                return torch.tensor(part["bytes"], dtype=torch.uint8)
            return {key: back(inner) for key, inner in part.items()}
        return [back(inner) for inner in part] if isinstance(part, list) else part

    return back(json.loads(json.dumps(listed(value))))


LOADERS = {
    "sequential": lambda: DataLoader(Ids(LENGTH), batch_size=2),
    "shuffled": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True),
    "drop_last": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(
        Ids(LENGTH), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "replacement": lambda: DataLoader(
        Ids(LENGTH), batch_size=2, sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=40)
    ),
    "weighted": lambda: DataLoader(Ids(LENGTH), batch_size=2, sampler=WeightedRandomSampler([1.0] * LENGTH, 19)),
    "python's": lambda: DataLoader(Ids(LENGTH), batch_size=2, sampler=PythonShuffle(LENGTH)),
    "drawn when iterated": lambda: DataLoader(Ids(LENGTH), batch_size=2, sampler=EagerOrder(LENGTH)),
    "own batches": lambda: DataLoader(Ids(LENGTH), batch_sampler=EagerBatches(LENGTH)),
    "workers": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True),
    "four workers": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True, num_workers=4),
    "stream": lambda: DataLoader(Numbers(LENGTH), batch_size=2),
    "shuffled stream": lambda: DataLoader(Numbers(LENGTH, shuffled=True), batch_size=2),
    "stream with workers": lambda: DataLoader(Numbers(LENGTH), batch_size=2, num_workers=2),
    "stream with four workers": lambda: DataLoader(Numbers(LENGTH), batch_size=2, num_workers=4),
    "no batches": lambda: DataLoader(Ids(LENGTH), batch_size=None, shuffle=True),
}


def single(name, **options):
    return prepare_data_loader(LOADERS[name](), num_processes=1, process_index=0, **options)


def batch_ids(batch):
    found = ids(batch)
    return found if isinstance(found, list) else [found]


def run(loader, epochs):
    return [[batch_ids(batch) for batch in loader] for _ in range(epochs)]


SEEDABLE = ("shuffled", "generator", "workers", "persistent")


@pytest.mark.parametrize(
    ("name", "seedable"),
    cases(
        [*((name, False) for name in LOADERS), *((name, True) for name in SEEDABLE)],
        thorough=[("workers", False), ("workers", True), ("stream with workers", False)],  # others have four, or one
    ),
)
def test_a_resumed_run_goes_on_like_one_that_never_stopped(name, seedable):
    options = {"use_seedable_sampler": True} if seedable else {}
    seed(11)
    wanted = run(single(name, **options), 3)
    points = (1, 4, len(wanted[1]))
    for point in points:
        seed(11)
        loader = single(name, **options)
        run(loader, 1)
        passing = iter(loader)
        for _ in range(point):
            next(passing)
        saved, put_back = as_saved(loader.state_dict()), keep_states()
        generators = states()
        del passing
        # Another process, with other random numbers until the saved ones are put back.
        seed(99)
        resumed = single(name, **options)
        resumed.load_state_dict(saved)
        put_back()
        assert resumed.iteration == 1
        assert run(resumed, 1) == [wanted[1][point:]], point
        # The global generators are where they were: the rest of the epoch drew no order.
        assert states() == generators
        if name != "persistent":
            assert run(resumed, 1) == [wanted[2]], point


@pytest.mark.parametrize("name", ["sequential", "shuffled", "generator", "own batches", "workers"])
def test_no_sample_is_read_to_be_thrown_away(name):
    loader = single(name)
    passing = iter(loader)
    for _ in range(4):
        next(passing)
    saved = loader.state_dict()
    resumed = single(name)
    resumed.load_state_dict(saved)
    left = [sample for batch in resumed for sample in ids(batch)]
    if name != "workers":
        assert resumed.dataset.read == left


@pytest.mark.parametrize("name", ["sequential", "shuffled", "generator", "own batches", "stream"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_another_number_of_shards_reads_exactly_what_is_left(name, before, after):
    def build(count, index):
        return prepare_data_loader(LOADERS[name](), num_processes=count, process_index=index, exact=True)

    def real(loader, batch):
        index = loader.plan().cut.index
        return ids(batch)[: loader.batch_counts[index]] if loader.batch_counts else ids(batch)

    seen, saved = [], []
    for index in range(before):
        seed(4)
        loader = build(before, index)
        passing = iter(loader)
        for _ in range(3):
            seen += real(loader, next(passing))
        saved.append(loader.state_dict())
    assert len({state["consumed"] for state in saved}) == 1
    rest = []
    for index in range(after):
        seed(77 + index)
        loader = build(after, index)
        loader.load_state_dict(as_saved(saved[0]))
        counted = [(real(loader, batch), loader.batch_counts) for batch in loader]
        rest += [sample for samples, _ in counted for sample in samples]
    assert sorted(seen + rest) == list(range(LENGTH))
    assert {loader.iteration} == {1}


RESHARDED = [
    ("sequential", {}), ("shuffled", {}), ("shuffled", {"use_seedable_sampler": True}), ("generator", {}),
    ("replacement", {}), ("weighted", {}), ("python's", {}), ("drawn when iterated", {}), ("own batches", {}),
    ("workers", {}), ("four workers", {}), ("four workers", {"use_seedable_sampler": True}), ("stream", {}),
    ("shuffled stream", {}), ("stream with workers", {}), ("stream with four workers", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    cases(RESHARDED, thorough=[("workers", {}), ("stream with workers", {}), ("four workers", {})]),
)
def test_the_stream_of_samples_goes_on_in_its_order_on_another_number_of_shards(name, options):
    """In the middle of a later epoch; the step's samples in shard order are the order of one process."""

    def passing(count, index, saved=None):
        seed(31 if saved is None else 600 + index)
        loader = prepare_data_loader(
            LOADERS[name](), num_processes=count, process_index=index, exact=True, **options
        )  # fmt: skip
        if saved is None:
            run(loader, 1)
        else:
            loader.load_state_dict(as_saved(saved))
        for batch in loader:
            yield loader, batch_ids(batch)[: loader.batch_counts[index] if loader.batch_counts else None]

    def stream(passes, steps=None):
        """The samples of so many steps of all shards, and the position behind them."""
        found, state = [], None
        for number, step in enumerate(itertools.zip_longest(*passes)):
            found += [sample for part in step if part is not None for sample in part[1]]
            state = step[0][0].state_dict()
            if number + 1 == steps:
                break
        return found, state

    wanted, _ = stream([passing(1, 0)])
    slow = "workers" in name
    for before, after, steps in ((2, 3, 1),) if slow else ((1, 3, 4), (2, 3, 1), (3, 2, 2), (3, 1, 3)):
        seen, saved = stream([passing(before, index) for index in range(before)], steps)
        rest, _ = stream([passing(after, index, saved) for index in range(after)])
        if name.startswith("stream with"):
            # Each worker reads a part of its own, and a step is one worker's: its order follows from the step's size.
            assert sorted(seen + rest) == sorted(wanted), (before, after, steps)
        else:
            assert seen + rest == wanted, (before, after, steps)
        assert 0 < len(rest) < len(wanted)


def test_even_shards_are_completed_from_the_start_of_the_epoch_after_a_resume():
    loader = prepare_data_loader(DataLoader(Ids(9), batch_size=1), num_processes=2, process_index=0)
    passing = iter(loader)
    next(passing)
    next(passing)
    found = []
    for index in range(3):
        resumed = prepare_data_loader(DataLoader(Ids(9), batch_size=1), num_processes=3, process_index=index)
        resumed.load_state_dict(loader.state_dict())
        found.append([ids(batch) for batch in resumed])
        assert resumed.remainder == 2
    assert found == [[[4], [7]], [[5], [8]], [[6], [0]]]


def test_between_epochs_a_generator_goes_on():
    wanted = run(single("generator"), 2)
    loader = single("generator")
    run(loader, 1)
    saved = as_saved(loader.state_dict())
    assert (saved["epoch"], saved["consumed"]) == (1, 0) and "order" not in saved
    fresh = single("generator")
    fresh.load_state_dict(saved)
    assert run(fresh, 1) == [wanted[1]] and fresh.iteration == 2


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["global", "generator", "workers"])
def test_a_position_between_the_start_of_a_pass_and_its_first_batch(kind, exact):
    def build():
        generator = torch.Generator().manual_seed(4) if kind == "generator" else None
        raw = DataLoader(Ids(9), 2, shuffle=True, generator=generator, num_workers=int(kind == "workers"))
        return prepare_data_loader(raw, num_processes=1, process_index=0, exact=exact)

    seed(3)
    loader = build()
    passing = iter(loader)
    position, state = loader.state_dict(), torch.get_rng_state()
    wanted = [ids(batch) for batch in passing], [ids(batch) for batch in loader]
    for again in (False, True):
        seed(8)
        resumed = build()
        resumed.load_state_dict(position)
        if again:
            # Saved again before its first pass.
            saved = as_saved(resumed.state_dict())
            resumed = build()
            resumed.load_state_dict(saved)
        torch.set_rng_state(state)
        assert ([ids(batch) for batch in resumed], [ids(batch) for batch in resumed]) == wanted


def test_a_seedable_samplers_seed_is_part_of_the_position():
    seed(1)
    loader = single("shuffled", use_seedable_sampler=True)
    wanted = run(loader, 2)
    seed(1)
    loader = single("shuffled", use_seedable_sampler=True)
    run(loader, 1)
    saved = loader.state_dict()
    seed(2)
    fresh = single("shuffled", use_seedable_sampler=True)
    fresh.load_state_dict(saved)
    assert run(fresh, 1) == [wanted[1]]


def test_the_state_counts_what_was_handed_out():
    loader = single("sequential")
    assert loader.state_dict()["consumed"] == 0
    consumed = [loader.state_dict()["consumed"] for _ in loader]
    assert consumed == [*range(2, LENGTH, 2), LENGTH]
    assert (loader.state_dict()["consumed"], loader.state_dict()["epoch"]) == (0, 1)
    for _ in loader:
        break
    assert (loader.state_dict()["consumed"], loader.state_dict()["epoch"]) == (2, 1)
    saved = loader.state_dict()
    fresh = single("sequential")
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["consumed"] == 2, "a position that was loaded is told until it is used"
    skipped = skip_first_batches(fresh, 3)
    next(iter(skipped))
    assert skipped.state_dict()["consumed"] == 8


def test_after_the_last_batch_nothing_is_left_of_the_epoch():
    loader = single("sequential")
    for _ in loader:
        saved = loader.state_dict()
    fresh = single("sequential")
    fresh.load_state_dict(saved)
    assert run(fresh, 2) == [[], run(single("sequential"), 1)[0]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_dataset_that_keeps_its_position_goes_on_by_itself(workers, shards):
    pytest.importorskip("torchdata")

    def build(dataset):
        return prepare_data_loader(
            DataLoader(dataset, batch_size=2, num_workers=workers),
            num_processes=shards,
            process_index=0,
            use_stateful_dataloader=True,
        )

    wanted = run(build(StatefulNumbers(30)), 2)
    for point in (1, 3, 4):
        loader = build(StatefulNumbers(30))
        passing = iter(loader)
        for _ in range(point):
            next(passing)
        saved = as_saved(loader.state_dict())
        del passing
        dataset = StatefulNumbers(30)
        resumed = build(dataset)
        resumed.load_state_dict(saved)
        whole = point + len(run(resumed, 1)[0]) == len(wanted[0])
        assert whole
        resumed.load_state_dict(saved)
        dataset.read = 0
        assert run(resumed, 1) == [wanted[0][point:]]
        if not workers:
            assert dataset.read == 30 - 2 * shards * point, "what was read before is not read again"
        assert run(resumed, 1) == [wanted[1]]


def test_a_dataset_that_keeps_its_position_goes_on_over_another_number_of_shards():
    pytest.importorskip("torchdata")

    def build(count, index):
        return prepare_data_loader(
            DataLoader(StatefulNumbers(30), batch_size=2),
            num_processes=count,
            process_index=index,
            use_stateful_dataloader=True,
            exact=True,
        )

    for before, after in ((2, 3), (3, 1), (1, 2)):
        seen, rest = [], []
        for index in range(before):
            loader = build(before, index)
            passing = iter(loader)
            seen += [sample for _ in range(2) for sample in ids(next(passing))]
            saved = as_saved(loader.state_dict())
        for index in range(after):
            resumed = build(after, index)
            resumed.load_state_dict(saved)
            for batch in resumed:
                rest += ids(batch)[: resumed.batch_counts[index] if resumed.batch_counts else None]
        assert sorted(seen) + sorted(rest) == list(range(30)), (before, after)


class Counting(Ids):
    """A map-style dataset with a state of its own: how often it was asked."""

    asked = 0

    def __getitem__(self, index):
        self.asked += 1
        return {**super().__getitem__(index), "asked": self.asked}

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_map_style_dataset_with_a_state(workers):
    pytest.importorskip("torchdata")

    def build():
        raw = DataLoader(Counting(10), batch_size=2, num_workers=workers)
        return prepare_data_loader(raw, num_processes=1, process_index=0, use_stateful_dataloader=True)

    def asked(batches):
        return [batch["asked"].tolist() for batch in batches]

    wanted = asked(build())
    loader = build()
    passing = iter(loader)
    next(passing)
    next(passing)
    resumed = build()
    resumed.load_state_dict(as_saved(loader.state_dict()))
    assert asked(resumed) == wanted[2:]


def test_a_state_that_does_not_fit_is_refused():
    loader = single("sequential")
    next(iter(loader))
    saved = loader.state_dict()
    with pytest.raises(CheckpointError, match="counts samples of the epoch and this loader batches"):
        single("own batches").load_state_dict(saved)
    with pytest.raises(CheckpointError, match="over 23 samples, and this loader has 9"):
        prepare_data_loader(DataLoader(Ids(9), batch_size=2), num_processes=1, process_index=0).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="not the state of a prepared data loader"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(CheckpointError, match="format 99"):
        loader.load_state_dict({**saved, "format": 99})
    stream = single("stream with workers")
    next(iter(stream))
    with pytest.raises(CheckpointError, match=r"2 worker\(s\).*set num_workers=2"):
        single("stream").load_state_dict(stream.state_dict())


@pytest.mark.parametrize("name", ["shuffled", "generator", "own batches", "stream", "workers"])
@pytest.mark.parametrize("seedable", [False, True])
def test_skipping_by_hand_after_a_position_was_loaded_skips_once(name, seedable):
    """The API's own way to resume: load the state, then leave out the batches that were done."""
    options = {"use_seedable_sampler": True} if seedable else {}
    seed(11)
    wanted = run(single(name, **options), 3)
    seed(11)
    loader = single(name, **options)
    run(loader, 1)
    passing = iter(loader)
    for _ in range(4):
        next(passing)
    saved, put_back = as_saved(loader.state_dict()), keep_states()
    consumed = saved["consumed"]
    del passing
    for told in (4, 3):
        seed(5)
        fresh = single(name, **options)
        fresh.load_state_dict(saved)
        put_back()
        rest = skip_first_batches(fresh, told)
        found = []
        for batch in rest:
            found.append(batch_ids(batch))
            # A checkpoint asks the prepared loader, not the one that goes on for it.
            assert fresh.state_dict() == rest.state_dict()
            assert fresh.state_dict()["consumed"] > consumed and fresh.state_dict()["epoch"] == 1
        assert found == wanted[1][4:]
        assert (fresh.iteration, fresh.state_dict()["consumed"]) == (2, 0)
        assert run(fresh, 1) == [wanted[2]]


def test_asking_for_another_epoch_drops_a_position_in_this_one():
    loader = single("sequential")
    next(iter(loader))
    saved = loader.state_dict()
    fresh = single("sequential")
    fresh.load_state_dict(saved)
    fresh.set_epoch(0)
    assert len(run(fresh, 1)[0]) == len(loader) - 1
    fresh.load_state_dict(saved)
    fresh.set_epoch(3)
    assert len(run(fresh, 1)[0]) == len(loader) and fresh.iteration == 4


def test_random_numbers_of_the_process_are_left_alone_by_a_resume():
    for name in ("shuffled", "python's", "own batches", "drawn when iterated"):
        loader = single(name)
        next(iter(loader))
        fresh = single(name)
        fresh.load_state_dict(loader.state_dict())
        seed(8)
        before = states()
        assert run(fresh, 1)
        assert states() == before


def test_batch_samplers_of_torch_count_samples_whatever_they_are_given_as():
    batches = BatchSampler(SequentialSampler(range(9)), 2, False)
    loader = prepare_data_loader(
        DataLoader(torch.arange(9), batch_size=None, sampler=batches), num_processes=1, process_index=0
    )
    passing = iter(loader)
    next(passing)
    assert (loader.state_dict()["unit"], loader.state_dict()["consumed"]) == ("samples", 2)


@pytest.mark.parametrize("name", ["shuffled", "generator", "stream"])
@pytest.mark.parametrize("how", ["left", "set_epoch", "skip"])
def test_after_the_last_batch_the_next_epoch_may_be_asked_for(name, how):
    """A script that counts its optimizer steps begins with the next epoch, in the order of the uninterrupted run."""
    seed(11)
    wanted = run(single(name), 3)
    seed(11)
    loader = single(name)
    for _ in loader:
        saved, put_back = as_saved(loader.state_dict()), keep_states()
    seed(99)
    fresh = single(name)
    fresh.load_state_dict(saved)
    put_back()
    passing = fresh
    if how == "left":
        assert fresh.leave_ended_epoch() and fresh.iteration == 1
    elif how == "set_epoch":
        fresh.set_epoch(1)
    else:
        passing = skip_first_batches(fresh, 0)
    assert run(passing, 1) + run(fresh, 1) == wanted[1:]
    assert fresh.iteration == 3 and not fresh.leave_ended_epoch()


def test_a_length_that_depends_on_the_epoch():
    class Curriculum(Sampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4 + 2 * self.epoch

        def __iter__(self):
            return iter(range(len(self)))

    def build():
        raw = DataLoader(Ids(20), batch_size=2, sampler=Curriculum())
        return prepare_data_loader(raw, num_processes=1, process_index=0)

    loader = build()
    assert [len(list(loader)) for _ in range(2)] == [2, 3]
    next(iter(loader))
    resumed = build()
    resumed.load_state_dict(loader.state_dict())
    assert [ids(batch) for batch in resumed] == [[2, 3], [4, 5], [6, 7]] and len(list(resumed)) == 5

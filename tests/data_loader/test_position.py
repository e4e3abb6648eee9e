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
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from accelerate.checkpointing.documents import TensorSink, decode, encode
from accelerate.core.errors import CheckpointError
from accelerate.data_loader import prepare_data_loader, skip_first_batches

LENGTH = 23
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker"),
]


def as_saved(value: Any) -> Any:
    """Through the codec of checkpoints and back."""
    sink = TensorSink()
    text = json.dumps(encode(value, sink, "loader"))
    return decode(json.loads(text), sink.tensors, "loader")


LOADERS = {
    "sequential": lambda: DataLoader(Ids(LENGTH), batch_size=2),
    "shuffled": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True),
    "drop_last": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(
        Ids(LENGTH), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "replacement": lambda: DataLoader(
        Ids(LENGTH),
        batch_size=2,
        sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=40),
    ),
    "weighted": lambda: DataLoader(
        Ids(LENGTH), batch_size=2, sampler=WeightedRandomSampler([1.0] * LENGTH, 19)
    ),
    "python's": lambda: DataLoader(Ids(LENGTH), batch_size=2, sampler=PythonShuffle(LENGTH)),
    "drawn when iterated": lambda: DataLoader(
        Ids(LENGTH), batch_size=2, sampler=EagerOrder(LENGTH)
    ),
    "own batches": lambda: DataLoader(Ids(LENGTH), batch_sampler=EagerBatches(LENGTH)),
    "workers": lambda: DataLoader(Ids(LENGTH), batch_size=2, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        Ids(LENGTH), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
    ),
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
        thorough=[
            ("workers", False),
            ("workers", True),
            ("stream with workers", False),
        ],  # others have four, or one
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
            yield (
                loader,
                batch_ids(batch)[: loader.batch_counts[index] if loader.batch_counts else None],
            )

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
    for before, after, steps in (
        ((2, 3, 1),) if slow else ((1, 3, 4), (2, 3, 1), (3, 2, 2), (3, 1, 3))
    ):
        seen, saved = stream([passing(before, index) for index in range(before)], steps)
        rest, _ = stream([passing(after, index, saved) for index in range(after)])
        if name.startswith("stream with"):
            # Each worker reads a part of its own, and a step is one worker's: its order follows from the step's size.
            assert sorted(seen + rest) == sorted(wanted), (before, after, steps)
        else:
            assert seen + rest == wanted, (before, after, steps)
        assert 0 < len(rest) < len(wanted)


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
    assert fresh.state_dict()["consumed"] == 2, (
        "a position that was loaded is told until it is used"
    )
    skipped = skip_first_batches(fresh, 3)
    next(iter(skipped))
    assert skipped.state_dict()["consumed"] == 8


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


def test_a_state_that_does_not_fit_is_refused():
    loader = single("sequential")
    next(iter(loader))
    saved = loader.state_dict()
    with pytest.raises(CheckpointError, match=r"samples .*this loader counts batches"):
        single("own batches").load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"23 samples, .* 9"):
        prepare_data_loader(
            DataLoader(Ids(9), batch_size=2), num_processes=1, process_index=0
        ).load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"not the state of a .*loader"):
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
            assert str(fresh.state_dict()) == str(rest.state_dict())
            assert fresh.state_dict()["consumed"] > consumed and fresh.state_dict()["epoch"] == 1
        assert found == wanted[1][4:]
        assert (fresh.iteration, fresh.state_dict()["consumed"]) == (2, 0)
        assert run(fresh, 1) == [wanted[2]]


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


class GoesOn(IterableDataset):
    """Is its own iterator, so that a pass begins where the one before was left."""

    def __init__(self, length):
        self.position, self.length = 0, length

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.length:
            self.position = 0
            raise StopIteration
        self.position += 1
        return self.position - 1


@pytest.mark.parametrize("peeks_before", [False, True])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_stream_that_was_peeked_at_continues_at_the_position(dispatch, epoch, peeks_before):
    def build(peeks):
        loader = prepare_data_loader(
            DataLoader(GoesOn(20), batch_size=2), dispatch_batches=dispatch
        )
        if peeks:
            next(iter(loader))
        return loader

    loader = build(peeks_before)
    for _ in range(epoch):
        list(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    position = loader.state_dict()
    wanted = [ids(batch) for batch in batches]
    resumed = build(True)
    resumed.load_state_dict(position)
    assert [ids(batch) for batch in resumed] == wanted
    assert [ids(batch) for batch in resumed] == [ids(batch) for batch in loader]

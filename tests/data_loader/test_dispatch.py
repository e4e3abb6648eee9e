# SPDX-License-Identifier: Apache-2.0
"""Dealing batches out to shards, the bytes they travel as, and a dispatcher on one process."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from loaders import Ids, Numbers, SizedNumbers, epoch, ids, seed, states
from torch.utils.data import DataLoader

from accelerate.core import trees
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from accelerate.data_loader.assign import NO_BATCH, BatchAssigner
from accelerate.data_loader.batch_source import BatchSource, plan_for
from accelerate.data_loader.channel import BatchMessage, pack, padded_row, unpack
from accelerate.data_loader.order import OwnGenerators, ReplayedOrder
from accelerate.data_loader.rows import count_rows, join_rows, repeat_rows, take_rows
from accelerate.data_loader.steps import ShardSplit, StreamPosition


def own_order():
    """The order of one process."""
    return ReplayedOrder(OwnGenerators(()), (), True)


def dealt(loader, cut, slice_fn=None):
    """What a dispatcher's reader hands out: for each shard its steps, as (samples, counts, last)."""
    plan = plan_for(loader)
    plan.cut = cut
    rounds = BatchAssigner(plan, slice_fn).steps(
        BatchSource(loader).open(plan_for(loader), own_order(), StreamPosition())
    )
    found = [[] for _ in range(cut.shards)]
    for step in rounds:
        for shard, part in enumerate(step.batches):
            if part is not NO_BATCH:
                found[shard].append((ids(part), step.counts, step.last[shard]))
    return found


@pytest.mark.parametrize("data", [Ids, Numbers])
def test_batches_go_round_and_the_rest_is_cut_evenly(data):
    assert dealt(DataLoader(data(10), batch_size=4), ShardSplit(2, even=True)) == [
        [([0, 1, 2, 3], (4, 4), False), ([8], (1, 1), True)],
        [([4, 5, 6, 7], (4, 4), False), ([9], (1, 1), True)],
    ]
    assert dealt(DataLoader(data(9), batch_size=4), ShardSplit(2, even=True)) == [
        [([0, 1, 2, 3], (4, 4), False), ([8], (1, 0), True)],
        [([4, 5, 6, 7], (4, 4), False), ([0], (1, 0), True)],
    ]
    # The last batch is short: the whole step is cut anew.
    assert [
        shard[-1][:2]
        for shard in dealt(DataLoader(data(15), batch_size=4), ShardSplit(2, even=True))
    ] == [
        ([8, 9, 10, 11], (4, 3)),
        ([12, 13, 14, 0], (4, 3)),
    ]
    assert (
        dealt(DataLoader(data(1), batch_size=4), ShardSplit(3, even=True))
        == [[([0], (1, 0, 0), True)]] * 3
    )


@pytest.mark.parametrize("data", [Ids, Numbers])
def test_split_batches_are_cut(data):
    assert dealt(DataLoader(data(9), batch_size=4), ShardSplit(2, split=True, even=True)) == [
        [([0, 1], (2, 2), False), ([4, 5], (2, 2), False), ([8], (1, 0), True)],
        [([2, 3], (2, 2), False), ([6, 7], (2, 2), False), ([0], (1, 0), True)],
    ]


@pytest.mark.parametrize("split", [False, True])
def test_exact_falls_as_it_falls(split):
    batch = 4 if split else 2
    for length in range(1, 14):
        for data in (Ids(length), Numbers(length)):
            shards = dealt(
                DataLoader(data, batch_size=batch), ShardSplit(2, split=split, exact=True)
            )
            assert len(shards[0]) == len(shards[1])
            seen = []
            for left, right in zip(*shards, strict=True):
                assert left[1:] == right[1:]
                seen += left[0][: left[1][0]] + right[0][: right[1][1]]
                assert left[0] and right[0], "a shard without samples has a placeholder"
            assert seen == list(range(length))


def test_uneven_shards_end_on_their_own():
    assert dealt(DataLoader(Ids(9), batch_size=4), ShardSplit(2, even=False)) == [
        [([0, 1, 2, 3], (4, 4), False), ([8], (1, 0), True)],
        [([4, 5, 6, 7], (4, 4), True)],
    ]


@pytest.mark.parametrize("data", [Ids, Numbers])
def test_what_is_left_is_dropped_where_the_loader_drops(data):
    shards = dealt(DataLoader(data(15), batch_size=4, drop_last=True), ShardSplit(2, even=True))
    assert shards == [[([0, 1, 2, 3], (4, 4), True)], [([4, 5, 6, 7], (4, 4), True)]]
    shards = dealt(
        DataLoader(data(9), batch_size=4, drop_last=True), ShardSplit(2, split=True, even=True)
    )
    assert shards == [
        [([0, 1], (2, 2), False), ([4, 5], (2, 2), True)],
        [([2, 3], (2, 2), False), ([6, 7], (2, 2), True)],
    ]


def test_batches_of_different_shapes_are_handed_out_as_they_were_collated():
    def padded(samples):
        width = max(samples) + 1
        return {"x": torch.zeros(len(samples), width), "id": torch.tensor(samples)}

    loader = DataLoader(list(range(8)), batch_size=2, collate_fn=padded)
    assert [shard[-1][0] for shard in dealt(loader, ShardSplit(2, even=True))] == [[4, 5], [6, 7]]
    loader = DataLoader(list(range(7)), batch_size=2, collate_fn=padded)
    for cut in (ShardSplit(2, even=True), ShardSplit(2), ShardSplit(2, exact=True)):
        right = [6, 6] if cut.even else [6]
        assert [shard[-1][:2] for shard in dealt(loader, cut)] == [
            ([4, 5], (2, 1)),
            (right, (2, 1)),
        ]
    loader = DataLoader(list(range(5)), batch_size=2, collate_fn=padded)
    for split in (False, True):
        # The first rows of the epoch have a different width.
        last = [shard[-1][:2] for shard in dealt(loader, ShardSplit(2, split=split, even=True))]
        assert last == [([4], (1, 0)), ([4], (1, 0))]


@pytest.mark.parametrize("kind", ["dataclass", "array", "none", "text"])
def test_the_last_step_loses_no_sample(kind):
    collate = {
        "dataclass": lambda rows: Record(torch.tensor(rows), [f"n{i}" for i in rows]),
        # A tuple as long as the completed last step has rows is no column.
        "array": lambda rows: {"x": np.array(rows), "note": ("a", None, 3, 4)},
        "none": lambda rows: None,
        "text": str,
    }[kind]
    raw = DataLoader(Numbers(7), batch_size=2, collate_fn=collate)
    plan = plan_for(raw)
    plan.cut = ShardSplit(2, even=True)
    order, place = own_order(), StreamPosition()
    *_, last = BatchAssigner(plan).steps(BatchSource(raw).open(plan_for(raw), order, place))
    left, right = last.batches
    if kind == "dataclass":
        assert (left.values.tolist(), left.names) == ([4, 5], ["n4", "n5"])
        assert (right.values.tolist(), right.names) == ([6, 0], ["n6", "n0"])
    elif kind == "array":
        assert (left["x"].tolist(), right["x"].tolist()) == ([4, 5], [6, 0])
        assert left["note"] == right["note"] == ("a", None, 3, 4)
    else:
        # What has no rows is given as it was collated, and not split.
        assert (left, right) == ((None, None) if kind == "none" else ("[4, 5]", "[6]"))
        plan.cut = ShardSplit(2, split=True, even=True)
        with pytest.raises(ValueError, match="not contain tensors or lists"):
            next(
                BatchAssigner(plan).steps(BatchSource(raw).open(plan_for(raw), own_order(), place))
            )


def test_a_cut_of_the_users_own():
    calls = []

    def backwards(batch, part, process_index=None, num_processes=None):
        calls.append((part, process_index, num_processes))
        return {"id": batch["id"].flip(0)[part]}

    shards = dealt(DataLoader(Ids(6), batch_size=2), ShardSplit(2, even=True), backwards)
    assert [[step[0] for step in shard] for shard in shards] == [[[3, 2], [5]], [[1, 0], [4]]]
    assert calls[:2] == [(slice(0, 2), 0, 2), (slice(2, 4), 1, 2)]


Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    values: torch.Tensor
    names: list[str]


def test_rows_of_nested_batches():
    batch = {
        "x": torch.arange(6).view(3, 2),
        "pair": Pair(torch.tensor([1, 2, 3]), ["a", "b", "c"]),
        "scalar": torch.tensor(5),
        "note": "for all",
    }
    assert count_rows(batch) == 3
    part = take_rows(batch, 3, 1, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]] and part["pair"].right == ["b", "c"]
    assert isinstance(part["pair"], Pair) and part["scalar"] == 5 and part["note"] == "for all"
    joined = join_rows([batch, part], [3, 2])
    assert joined["x"].tolist() == [[0, 1], [2, 3], [4, 5], [2, 3], [4, 5]]
    assert joined["pair"].right == ["a", "b", "c", "b", "c"]
    assert repeat_rows(batch, 3, 4)["pair"].left.tolist() == [1, 2, 3, 1]
    columns = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert [column.tolist() for column in take_rows(columns, 2, 0, 1)] == [[1], [3]]
    assert (count_rows(["a", "b"]), count_rows(7), count_rows({"n": torch.tensor(1)})) == (
        2,
        None,
        None,
    )


def test_batches_with_a_tensor_of_other_rows_are_not_split():
    def graphs(samples):
        numbers = [int(sample["id"]) for sample in samples]
        return {
            "id": torch.tensor(numbers),
            "nodes": torch.tensor([n for n in numbers for _ in range(n % 3 + 1)]),
        }

    def loader(size):
        return DataLoader(Ids(5), batch_size=size, collate_fn=graphs)

    assert [
        [step[:2] for step in shard] for shard in dealt(loader(2), ShardSplit(2, even=True))
    ] == [
        [([0, 1], (2, 2)), ([4], (1, 0))],
        [([2, 3], (2, 2)), ([0, 1], (1, 0))],
    ]
    with pytest.raises(ValueError, match="cannot be split into samples"):
        dealt(loader(4), ShardSplit(2, split=True, even=True))


def test_parcels_come_out_as_they_went_in():
    batch = {
        "half": torch.randn(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "wide": torch.randn(2, 2, dtype=torch.complex128),
        "across": torch.arange(6).view(2, 3).t(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int8),
        "names": ["a", None, 3.5],
        "record": Record(torch.arange(5, dtype=torch.int16), ["x" * 5000]),
        "sparse": torch.eye(2).to_sparse(),
    }
    sent = BatchMessage(batch, (3, 0), 17, True, False)
    row = pack(sent)
    found = unpack(padded_row(row, row.numel() + 37))
    assert (found.counts, found.position, found.last, found.final) == ((3, 0), 17, True, False)
    assert found.batch.keys() == batch.keys()
    assert (
        found.batch["names"] == batch["names"]
        and found.batch["record"].names == batch["record"].names
    )
    assert torch.equal(found.batch["sparse"].to_dense(), torch.eye(2))
    del batch["sparse"], found.batch["sparse"]
    for ours, theirs in zip(trees.leaves(found.batch), trees.leaves(batch), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert unpack(padded_row(None, 64)) is None
    nothing = unpack(pack(BatchMessage(["only", "objects"], None, 0, False, False)))
    assert nothing.batch == ["only", "objects"] and nothing.counts is None


def test_a_dispatcher_on_one_process_is_a_plain_loop():
    for data in (lambda: Ids(7, noisy=True), lambda: SizedNumbers(7)):
        runs = []
        for prepare in (
            lambda raw: raw,
            lambda raw: prepare_data_loader(
                raw, num_processes=1, process_index=0, dispatch_batches=True
            ),
        ):
            seed(3)
            loader = prepare(DataLoader(data(), batch_size=2))
            runs.append(([epoch(loader), epoch(loader)], states(), len(loader)))
        assert runs[0] == runs[1]
    assert isinstance(loader, DataLoaderDispatcher) and isinstance(loader, DataLoader)
    assert (loader.total_batch_size, loader.total_dataset_length, loader.iteration) == (2, 7, 2)
    assert [ids(batch) for batch in skip_first_batches(loader, 2)] == [[4, 5], [6]]
    direct = DataLoaderDispatcher(Ids(5), batch_size=2, skip_batches=1)
    assert [ids(batch) for batch in direct] == [[2, 3], [4]]

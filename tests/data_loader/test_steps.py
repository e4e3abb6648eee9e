# SPDX-License-Identifier: Apache-2.0
"""Every cut of an order between shards, over a large grid, against slices of a plain list."""

from __future__ import annotations

import itertools

import pytest
from loaders import Numbers, SizedNumbers
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate.core.errors import PrepareError
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from accelerate.data_loader.steps import ReadPlan, ShardSplit


def expected(length, batch, shards, index, drop_last, even, exact, split):
    """Slices of the list of all samples: what shard `index` reads, and what each shard really has in each step."""
    order = list(range(length))
    step = batch if split else batch * shards
    part = step // shards
    batches, counts = [], []
    for start in range(0, length, step):
        group = order[start : start + step]
        real = tuple(len(group[part * shard : part * (shard + 1)]) for shard in range(shards))
        if len(group) < step:
            if drop_last:
                break
            if even and not exact:
                group = (group + order[:step] * step)[:step]
        mine = group[part * index : part * (index + 1)]
        if not mine and exact:
            mine = group[:1]
        if mine:
            batches.append(mine)
            counts.append(real)
    return batches, counts


class Batches:
    """A batch sampler that is not torch's."""

    def __init__(self, batches, batch_size, drop_last):
        self.batches, self.batch_size, self.drop_last = batches, batch_size, drop_last

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def grid(split):
    for length, batch, shards in itertools.product(range(31), range(1, 6), range(1, 5)):
        if split and batch % shards:
            continue
        for index in range(shards):
            yield length, batch, shards, index


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("even", "exact"), [(True, False), (False, False), (True, True)])
def test_every_shard_reads_its_slices(split, drop_last, even, exact):
    for length, batch, shards, index in grid(split):
        wanted, counts = expected(length, batch, shards, index, drop_last, even, exact, split)
        case = (length, batch, shards, index)
        torchs = BatchSampler(SequentialSampler(range(length)), batch, drop_last)
        shard = BatchSamplerShard(torchs, shards, index, split, even, exact)
        assert list(shard) == wanted, case
        assert len(shard) == len(wanted), case
        assert shard.total_length == len(torchs)
        steps = list(shard.plan().read(iter(range(length))))
        assert [step.counts for step in steps] == counts, case
        assert [step.last for step in steps] == [
            number == len(wanted) for number in range(1, len(wanted) + 1)
        ], case
        if steps and (even or exact):
            assert steps[-1].position == (
                length - length % (batch * (1 if split else shards)) if drop_last else length
            ), case
        # A sampler of the user's own with the same batches is cut alike.
        own = BatchSamplerShard(
            Batches(list(torchs), batch, drop_last), shards, index, split, even, exact
        )
        assert list(own) == wanted, case


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_stream_is_cut_like_a_sampler(split, drop_last, exact):
    for length, batch, shards, index in grid(split):
        wanted, _ = expected(length, batch, shards, index, drop_last, True, exact, split)
        stream = IterableDatasetShard(
            SizedNumbers(length), batch, drop_last, shards, index, split, exact=exact
        )
        assert list(stream) == [sample for samples in wanted for sample in samples]
        if not exact:
            assert len(stream) == len(list(stream))


def test_going_on_in_the_middle_completes_from_the_start_of_the_epoch():
    for length, batch, shards in itertools.product(range(14), range(1, 4), range(1, 4)):
        for index, start in itertools.product(range(shards), range(length + 1)):
            rest = list(range(start, length))
            step = batch * shards
            wanted = []
            for begin in range(0, len(rest), step):
                group = rest[begin : begin + step]
                group = (group + list(range(min(length, step))) * step)[:step]
                wanted.append(group[batch * index : batch * (index + 1)])
            plan = ReadPlan(range(length), True, batch, False, ShardSplit(shards, index, even=True))
            assert [step.data for step in plan.steps(iter(range(length)), start)] == wanted


def test_batches_of_many_lengths_are_all_read_and_none_is_changed():
    batches = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]
    shards = [
        list(BatchSamplerShard(Batches(batches, None, False), 2, index)) for index in range(2)
    ]
    # Without a batch size to fill up to, whole batches from the start complete the last step.
    assert shards == [[[0, 1], [3, 4, 5], [7, 8]], [[2], [6], [0, 1]]]
    exact = [
        list(BatchSamplerShard(Batches(batches, 3, False), 2, index, exact=True))
        for index in range(2)
    ]
    assert exact == [[[0, 1], [3, 4, 5], [7, 8]], [[2], [6], [7]]]
    plan = BatchSamplerShard(Batches(batches, 3, False), 2, 1, exact=True).plan()
    assert [step.counts for step in plan.steps(iter(batches))] == [(2, 1), (3, 1), (2, 0)]
    even = [list(BatchSamplerShard(Batches(batches, 3, False), 2, index)) for index in range(2)]
    assert even == [[[0, 1], [3, 4, 5], [7, 8, 0]], [[2], [6], [1, 2, 0]]]
    assert batches == [[0, 1], [2], [3, 4, 5], [6], [7, 8]]


def test_exact_split_cuts_each_batch_of_unknown_size_into_equal_parts():
    batches = [[0, 1, 2, 3, 4], [5], [6, 7]]
    shards = [
        list(BatchSamplerShard(Batches(batches, None, False), 2, index, True, exact=True))
        for index in range(2)
    ]
    assert shards == [[[0, 1, 2], [5], [6]], [[3, 4], [5], [7]]]


def test_skipped_batches_are_stepped_over_by_index():
    torchs = BatchSampler(SequentialSampler(range(10)), 2, False)
    skipped = SkipBatchSampler(torchs, 2)
    assert list(skipped) == [[4, 5], [6, 7], [8, 9]]
    assert (len(skipped), skipped.total_length, skipped.batch_size) == (3, 5, 2)
    # Skipped before the cut: batches of all shards; after it: of each shard. The epoch starts where it did.
    assert list(BatchSamplerShard(skipped, 2, 1)) == [[6, 7], [0, 1]]
    after = SkipBatchSampler(BatchSamplerShard(torchs, 2, 1), 1)
    assert list(after) == [[6, 7], [0, 1]]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(PrepareError, match=r"batch size 3 .*multiple of 2"):
        BatchSamplerShard(BatchSampler(range(10), 3, False), 2, 0, split_batches=True)
    with pytest.raises(PrepareError, match="does not have a batch size"):
        BatchSamplerShard([[0], [1]], 2, 0, split_batches=True)
    with pytest.raises(PrepareError, match=r"IterableDatasetShard.*batch size 3 .*multiple of 2"):
        IterableDatasetShard(Numbers(3), 3, num_processes=2, split_batches=True)

# SPDX-License-Identifier: Apache-2.0
"""Samplers, datasets and collate functions that yield one buffer again and again, against the plain loop."""

import pytest
import torch
from loaders import Ids, ids
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data_loader import prepare_data_loader
from accelerate.data_loader.assign import BatchAssigner
from accelerate.data_loader.batch_source import BatchSource, plan_for
from accelerate.data_loader.generators import Generators
from accelerate.data_loader.order import Order
from accelerate.data_loader.position import StreamPosition
from accelerate.data_loader.steps import ShardSplit


class OneList:
    """Batches of two in one list, which is refilled; without a length."""

    def __iter__(self):
        batch = []
        for index in range(13):
            batch.append(index)
            if len(batch) == 2:
                yield batch
                batch.clear()
        yield batch


class OneTensor(OneList):
    def __iter__(self):
        batch = torch.empty(2, dtype=torch.int64)
        for start in range(0, 12, 2):
            yield batch.copy_(torch.arange(start, start + 2))
        yield torch.tensor([12])


class Iterators(OneList):
    def __iter__(self):
        return (iter(range(start, min(13, start + 2))) for start in range(0, 13, 2))


class Buffers(IterableDataset):
    """Batches in one tensor, or one dict, which is refilled."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        batch, record = torch.empty(2, dtype=torch.int64), {}
        for start in range(0, 12, 2):
            if self.kind == "tensor":
                yield batch.copy_(torch.arange(start, start + 2))
            else:
                record["id"] = torch.arange(start, start + 2)
                yield record


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("batches", [OneList, OneTensor, Iterators])
@pytest.mark.parametrize("count", [1, 3])
def test_batch_samplers_that_refill_a_batch(batches, count, exact):
    def build():
        return DataLoader(Ids(13), batch_sampler=batches())

    plain = [ids(batch) for batch in build()]
    shards = [
        prepare_data_loader(build(), num_processes=count, process_index=index, even_batches=False, exact=exact)
        for index in range(count)
    ]
    found = [[ids(batch) for batch in shard if shard.batch_weight] for shard in shards]
    assert found == [plain[index::count] for index in range(count)]


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_datasets_that_refill_a_batch(kind):
    plain = [ids(batch) for batch in DataLoader(Buffers(kind), batch_size=None)]
    loader = prepare_data_loader(DataLoader(Buffers(kind), batch_size=None), num_processes=1, process_index=0)
    assert [ids(batch) for batch in loader] == plain
    shards = [
        prepare_data_loader(DataLoader(Buffers(kind), batch_size=None), num_processes=2, process_index=index)
        for index in range(2)
    ]
    assert [[ids(batch) for batch in shard] for shard in shards] == [plain[::2], plain[1::2]]


def test_collate_functions_that_refill_a_batch():
    batch = torch.empty(2, dtype=torch.int64)

    def collate(samples):
        return batch.copy_(torch.stack([sample["id"] for sample in samples]))

    loader = DataLoader(Ids(8), batch_size=2, collate_fn=collate)
    plan = plan_for(loader)
    plan.cut = ShardSplit(2, even=True)
    source = BatchSource(loader).open(plan_for(loader), Order(None, Generators()), StreamPosition())
    steps = list(BatchAssigner(plan).steps(source))
    assert [[ids(part) for part in step.batches] for step in steps] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]

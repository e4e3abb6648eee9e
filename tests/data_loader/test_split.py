# SPDX-License-Identifier: Apache-2.0
"""`datasets.IterableDataset` on two ranks: each reads its own shard, all make equally many steps, nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import random
import sys
import types

import pytest
import torch
from loaders import ids
from rank_pool import on_ranks
from states import all_ranks
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.core.errors import CheckpointError, PrepareError
from accelerate.data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches
from accelerate.data_loader.metrics import gather_for_metrics
from accelerate.data_loader.split import SplitLoader
from accelerate.state import PartialState

PRELOADED = ("datasets.distributed",)
READ = []


@dataclasses.dataclass
class Files(IterableDataset):
    """A stand-in for `datasets.IterableDataset`, with what a loader uses of it."""

    files: list
    shuffled: bool = False
    epoch: int = 0
    _distributed: object = None
    _ex_iterable: object = dataclasses.field(default_factory=object)

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index):
        size = len(self.files) // num_shards
        return dataclasses.replace(self, files=self.files[size * index : size * (index + 1)])

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        files = self.files[slice(None) if info is None else slice(info.id, None, info.num_workers)]
        if self.shuffled:
            files = random.Random(self.epoch).sample(files, len(files))
        for sample in samples(files):
            yield {"id": torch.tensor(sample["id"])}


def split_by_node(dataset, rank, world_size):
    return dataclasses.replace(
        dataset, files=dataset.files[rank::world_size], _distributed=(rank, world_size)
    )


def samples(files):
    for first, count in files:
        for number in range(first, first + count):
            READ.append(number)
            yield {"id": number}


# The first sample of each file, and how many it has.
FILES = {
    "even": [(0, 5), (100, 5), (200, 5), (300, 5)],
    "uneven": [(0, 5), (100, 2), (200, 6), (300, 4)],
    "indivisible": [(0, 5), (100, 5), (200, 5)],
    "single": [(0, 11)],
}


def build(files="even", shuffled=False, by_node=False, workers=0, **options):
    if LIBRARY == "stand-in":
        sys.modules["datasets"] = types.SimpleNamespace(IterableDataset=Files)
        dataset, split = Files(FILES[files], shuffled), split_by_node
    else:
        import datasets
        from datasets.distributed import split_dataset_by_node as split

        dataset = datasets.IterableDataset.from_generator(
            samples, gen_kwargs={"files": FILES[files]}
        )
        if shuffled:
            dataset = dataset.shuffle(seed=3, buffer_size=4)
        dataset = dataset.with_format("torch")
    if by_node:
        dataset = split(dataset, rank(), 2)
    return DataLoader(dataset, batch_size=2, num_workers=workers, **options)


def everything(files):
    return sorted(number for first, count in FILES[files] for number in range(first, first + count))


def rank():
    return PartialState(cpu=True).process_index


def real(loader, batch):
    """The samples of a batch without those that fill it."""
    return ids(batch)[: loader.batch_counts[rank()]]


CASES = {
    "even": {},
    "uneven": {"files": "uneven"},
    "indivisible": {"files": "indivisible"},
    "single": {"files": "single"},
    "shuffled": {"shuffled": True, "files": "uneven"},
    "by node": {"by_node": True, "files": "uneven"},
    "workers": {"workers": 2, "files": "uneven"},
}


LIBRARY = "stand-in"
REAL = pytest.param(
    "datasets", marks=pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="missing")
)


def joined(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.fixture(params=["stand-in", REAL])
def library(request):
    return request.param


@on_ranks(2)
def test_each_sample_is_read_once_by_one_rank(library):
    globals()["LIBRARY"] = library
    for name, options in CASES.items():
        files = options.get("files", "even")
        loader = prepare_data_loader(build(**options))
        for _ in range(2):
            READ.clear()
            found, metrics, ends = [], [], []
            for batch in loader:
                found += real(loader, batch)
                metrics += gather_for_metrics(batch["id"], loader).tolist()
                ends.append(loader.end_of_dataloader)
            assert ends == [False] * (len(ends) - 1) + [True], name
            assert len(set(all_ranks(len(ends)))) == 1, name
            assert sorted(joined(all_ranks(found))) == sorted(metrics) == everything(files), name
            if name in ("even", "uneven", "shuffled", "by node"):
                assert sorted(READ) == sorted(found), "no other samples are read"


@on_ranks(2)
def test_resumes_in_the_middle_of_an_epoch(library):
    globals()["LIBRARY"] = library
    for name in ("uneven", "shuffled", "by node", "workers", "indivisible"):
        options = CASES[name]
        loader = prepare_data_loader(build(**options))
        passes = [[ids(batch) for batch in loader] for _ in range(2)]
        for step in range(1, len(passes[0]), 2):
            loader = prepare_data_loader(build(**options))
            batches = iter(loader)
            read = [real(loader, next(batches)) for _ in range(step)]
            position = loader.state_dict()
            batches.close()
            resumed = prepare_data_loader(build(**options))
            resumed.load_state_dict(position)
            assert [[ids(batch) for batch in resumed] for _ in range(2)] == [
                passes[0][step:],
                passes[1],
            ], name
            skipping = skip_first_batches(prepare_data_loader(build(**options)), step)
            assert [ids(batch) for batch in skipping] == passes[0][step:], name
            if name not in ("by node", "workers"):
                check_on_other_numbers(options, position, joined(joined(all_ranks(read))))


def check_on_other_numbers(options, position, consumed):
    for shards in (1, 3):
        rest = []
        for index in range(shards):
            other = prepare_data_loader(build(**options), num_processes=shards, process_index=index)
            other.load_state_dict(position)
            for batch in other:
                rest += ids(batch)[: other.batch_counts[index]]
        assert sorted(consumed + rest) == everything(options["files"])


@on_ranks(2)
def test_continues_an_epoch_of_one_process():
    single = prepare_data_loader(build(), num_processes=1, process_index=0)
    batches = iter(single)
    consumed = ids(next(batches))
    position = single.state_dict()
    batches.close()
    loader = prepare_data_loader(build())
    loader.load_state_dict(position)
    found = joined(real(loader, batch) for batch in loader)
    assert sorted(consumed + joined(all_ranks(found))) == everything("even")
    READ.clear()
    assert joined(real(loader, batch) for batch in loader) == READ, "the next epoch is split again"


@on_ranks(2)
def test_exact_keeps_the_order_of_one_process():
    loader = prepare_data_loader(build("uneven"), exact=True)
    steps = zip(*all_ranks([real(loader, batch) for batch in loader]), strict=True)
    assert joined(joined(steps)) == everything("uneven")
    shortest = prepare_data_loader(build("uneven", drop_last=True))
    assert [len(batch["id"]) for batch in shortest] == [2, 2, 2]


class Pipeline(IterableDataset):
    """A stand-in for `webdataset.DataPipeline`: stages, of which `split_by_node` takes the shards of this rank."""

    def __init__(self, *pipeline):
        self.pipeline = pipeline

    def __iter__(self):
        for first, count in self.pipeline[-1](FILES["uneven"]):
            for number in range(first, first + count):
                yield {"id": torch.tensor(number)}


def split_files_by_node(files):
    return files[rank() :: 2]


@on_ranks(2)
def test_a_pipeline_of_webdataset_that_splits_itself():
    sys.modules["webdataset"] = types.SimpleNamespace(
        DataPipeline=Pipeline, split_by_node=split_files_by_node
    )

    def prepared(stage, **options):
        return prepare_data_loader(DataLoader(Pipeline(stage), batch_size=2), **options)

    for options in ({"put_on_device": True, "device": torch.device("cpu")}, {}):
        for stage in (list, split_files_by_node):
            loader = prepared(stage, **options)
            metrics = joined(gather_for_metrics(batch["id"], loader).tolist() for batch in loader)
            assert sorted(metrics) == everything("uneven"), "each sample is read once"
    batches = iter(loader)
    read = [ids(next(batches)) for _ in range(2)]
    resumed = prepared(split_files_by_node)
    resumed.load_state_dict(loader.state_dict())
    assert read + [ids(batch) for batch in resumed] == [
        ids(batch) for batch in prepared(split_files_by_node)
    ]
    with pytest.raises(PrepareError, match="already split between the processes"):
        prepared(split_files_by_node, exact=True)
    # In a layout in which all ranks read the same data.
    with pytest.raises(PrepareError, match="each of 2 processes"):
        prepared(split_files_by_node, num_processes=1, process_index=0)


@on_ranks(2)
def test_refuses_what_would_lose_samples():
    for options in ({"dispatch_batches": True}, {"exact": True}, {"split_batches": True}):
        with pytest.raises(PrepareError, match="split_dataset_by_node"):
            prepare_data_loader(build(by_node=True), **options)
    # By default batches go to a device, and rank 0 reads for all: not if each rank has one shard only.
    loader = prepare_data_loader(
        build(by_node=True), put_on_device=True, device=torch.device("cpu")
    )
    assert sorted(joined(all_ranks(joined(map(ids, loader))))) == everything("even")
    position = {**loader.state_dict(), "order": {}, "consumed": 12, "parts": [3, 4, 1]}
    with pytest.raises(CheckpointError, match="split_dataset_by_node"):
        loader.load_state_dict(position)
    with pytest.raises(CheckpointError, match="dispatch_batches"):
        prepare_data_loader(build(), dispatch_batches=True).load_state_dict(position)
    FILES["empty"] = [(0, 5), (100, 0)]
    with pytest.raises(PrepareError, match="process 1 of 2 is empty"):
        list(prepare_data_loader(build("empty")))


@on_ranks(2)
@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="missing")
def test_a_stream_has_the_rows_of_one_process():
    """Steps that count, group or interleave see the samples of the whole stream; else processes read shards."""
    import datasets

    def whole(factor=5):
        return datasets.IterableDataset.from_generator(
            numbers, gen_kwargs={"shards": [0, 1, 2, 3], "factor": [factor] * 4}
        )

    def grouped(batch):
        return {
            "id": [sum(batch["id"][start : start + 3]) for start in range(0, len(batch["id"]), 3)]
        }

    shuffled = whole().shuffle(seed=0, buffer_size=4)
    mixed = [whole().skip(6), whole(100).take(7)]
    interleaved = functools.partial(datasets.interleave_datasets, [whole(), whole(100)])
    streams = {
        shuffled.map(lambda row: row): SplitLoader,
        datasets.concatenate_datasets([whole(), whole(100)]).filter(
            lambda row: row["id"] % 3
        ): SplitLoader,
        interleaved(stopping_strategy="all_exhausted_without_replacement"): SplitLoader,
        shuffled.skip(6): DataLoaderShard,
        shuffled.take(6).map(lambda row: row): DataLoaderShard,
        datasets.concatenate_datasets(mixed): DataLoaderShard,
        datasets.interleave_datasets(mixed): DataLoaderShard,
        interleaved(probabilities=[0.6, 0.4], seed=0): DataLoaderShard,
        whole().map(grouped, batched=True, batch_size=7): DataLoaderShard,
        whole().batch(3).map(lambda row: {"id": sum(row["id"])}): DataLoaderShard,
        whole().map(
            lambda row, index: {"id": 100 * row["id"] + index}, with_indices=True
        ): DataLoaderShard,
    }
    for stream, kind in streams.items():
        expected = [row["id"] for row in stream]
        loader = prepare_data_loader(
            DataLoader(stream, batch_size=2), dispatch_batches=False, put_on_device=False
        )
        assert type(loader) is kind
        found = [gather_for_metrics(batch["id"], loader) for batch in loader]
        assert sorted(torch.cat(found).tolist()) == sorted(expected)


def numbers(shards, factor):
    for shard, size in zip(shards, factor, strict=True):
        for number in range(5):
            yield {"id": size * shard + number}

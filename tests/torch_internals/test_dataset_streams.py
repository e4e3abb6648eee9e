# SPDX-License-Identifier: Apache-2.0
"""The steps of streams of `datasets`: after which of them the shards have together the rows of the stream."""

import pytest

from accelerate.torch_internals.dataset_streams import treats_rows_alone

datasets = pytest.importorskip("datasets")


def rows(shards):
    for shard in shards:
        yield {"id": shard}


def test_steps_that_shards_do_not_change():
    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})
    shuffled = stream.shuffle(seed=0, buffer_size=2)
    joined = datasets.concatenate_datasets([shuffled.filter(bool), stream.map(dict)])
    for kept in (stream, shuffled, joined, joined.repeat(2).select_columns("id")):
        assert treats_rows_alone(kept)
    first = stream.take(2)
    for changed in (
        first,
        shuffled.skip(1).map(dict),
        datasets.concatenate_datasets([stream, first]),
        datasets.interleave_datasets([stream, stream]),
        stream.map(dict, batched=True),
        stream.batch(2),
        stream.filter(max, with_indices=True),
    ):
        assert not treats_rows_alone(changed)

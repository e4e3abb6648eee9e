# SPDX-License-Identifier: Apache-2.0
"""What the package `datasets` does to a stream, one step after another."""

from __future__ import annotations

from typing import Any

from . import Internal

DATASET_STEPS = Internal(
    name="dataset_steps",
    what="IterableDataset._ex_iterable, the last step of a stream of datasets, and what it reads from",
    versions="datasets 5.2",
    upstream="not reported",
    needed_by="dispatch_batches=False with a datasets.IterableDataset (docs/data.md)",
    without="every process reads all samples of such a stream, instead of its own files",
    test="tests/torch_internals/test_dataset_streams.py::test_steps_that_shards_do_not_change",
)

# Attributes of steps, with the values at which the shards of a stream have together the rows of the whole.
_ROW_BY_ROW = {
    "batched": False,  # map, filter, batch
    "with_indices": False,
    "n": None,  # skip, take
    "offset": None,  # shard
    "stopping_strategy": "all_exhausted_without_replacement",  # interleave_datasets
}


def treats_rows_alone(dataset: Any) -> bool:
    """Whether the shards of a stream have together its rows: no step counts, groups or interleaves them."""
    if not DATASET_STEPS.is_on:
        return False
    steps = [dataset._ex_iterable]
    for step in steps:
        for name, value in _ROW_BY_ROW.items():
            if getattr(step, name, value) != value:
                return False
        steps += getattr(step, "ex_iterables", [])
        if hasattr(step, "ex_iterable"):
            steps.append(step.ex_iterable)
    return True

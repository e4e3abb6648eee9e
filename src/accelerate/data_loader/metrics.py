# SPDX-License-Identifier: Apache-2.0
"""Gather one row for each sample from all ranks, without the repeated samples that fill the last batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import gather, gather_object
from ..collectives.metrics import gather_counted, gather_objects_counted
from ..collectives.objects import gather_each
from ..collectives.tensors import gather_nested
from ..core import trees
from ..core.messages import warn
from ..logging import MultiProcessAdapter, get_logger
from .steps import real_counts

logger: MultiProcessAdapter = get_logger(__name__)


def gather_for_metrics(
    input_data: Any,
    loader: Any,
    use_gather_object: bool = False,
    shards: int | None = None,
    group: dist.ProcessGroup | None = None,
    slices: dist.ProcessGroup | None = None,
    gather_all: Callable[[Any], Any] | None = None,
) -> Any:
    """Gather nested data with one row for each sample from all ranks, each sample once.

    Args:
        input_data: tensors whose dimension 0 is the batch (a 0-d tensor is one value for each rank), or a list of
            objects.
        loader: the prepared loader whose batch the data belongs to, or None.
        use_gather_object: gather as objects even if all values are tensors.
        shards: the number of shards of the data. None: the size of the group.
        group: ranks that have one shard each. None: all ranks.
        slices: ranks that computed on different slices of the same samples; each contributes its rows.
        gather_all: gathers tensors from all ranks, instead of `gather`.

    Returns:
        The gathered data, on every rank.
    """
    as_objects = use_gather_object or not _only_tensors(input_data)
    gathered = _each_once(input_data, loader, as_objects, shards, group, gather_all)
    if slices is None:
        return gathered
    return _gather(gathered, as_objects, None, slices)


def _each_once(
    input_data: Any,
    loader: Any,
    as_objects: bool,
    shards: int | None,
    group: dist.ProcessGroup | None,
    gather_all: Callable[[Any], Any] | None,
) -> Any:
    if loader is not None and _is_uneven(loader):
        if as_objects:
            return gather_objects_counted(input_data, loader.batch_counts, group)
        return gather_counted(input_data, loader.batch_counts, group)
    if gather_all is not None and group is None and not as_objects:
        gathered = gather_all(input_data)
    else:
        gathered = _gather(input_data, as_objects, shards, group)
    if loader is None or not loader.end_of_dataloader:
        return gathered
    remainder = loader.remainder
    if remainder == -1:
        logger.info(
            "The length of the dataset is unknown, so rows that pad the last batch are not removed."
        )
    if remainder <= 0:
        return gathered
    filled = getattr(loader, "last_step_size", None) or remainder
    if as_objects:
        return gathered[: _real_rows(len(gathered), remainder, filled)]

    def without_filling(rows: torch.Tensor) -> torch.Tensor:
        # One process does not gather, so a 0-d tensor is still one.
        if rows.ndim == 0:
            return rows
        return rows[: _real_rows(len(rows), remainder, filled)]

    return trees.map_leaves(without_filling, gathered)


def _real_rows(rows: int, samples: int, filled: int) -> int:
    """How many of the gathered rows are of the last step's samples, of which there are `filled` with repetitions."""
    if rows > filled > samples and rows % filled == 0:
        # Several for each sample, as sequences that a model has generated.
        return rows // filled * samples
    if rows > filled > samples:
        warn(
            f"gather_for_metrics: {rows} rows are not a multiple of the {filled} samples in the "
            "last step, so rows that pad it cannot be distinguished from the others: the first "
            f"{samples} are returned"
        )
    return samples


def _gather(
    data: Any, as_objects: bool, shards: int | None, group: dist.ProcessGroup | None
) -> Any:
    if shards == 1:
        return data
    if group is None:
        if as_objects:
            return gather_object(data)
        return gather(data)
    if as_objects:
        return list(itertools.chain.from_iterable(gather_each(data, group)))
    return gather_nested(data, group)


def _is_uneven(loader: Any) -> bool:
    """Whether ranks have different, known numbers of samples in this step, and not those of a regular last step.

    In a regular last step the batches are filled to one length, and `remainder` is the number of rows that are real.
    """
    counts = loader.batch_counts
    if counts is None or len(set(counts)) == 1:
        return False
    if loader.end_of_dataloader and loader.remainder > 0:
        plan = loader.plan()
        if plan.cut.repeats and plan.size is not None:
            return bool(counts != real_counts(sum(counts), max(counts), len(counts)))
    return True


def _only_tensors(data: Any) -> bool:
    try:
        trees.map_leaves(lambda leaf: leaf, data, strict="gather_for_metrics")
    except TypeError:
        return False
    return trees.first_leaf(data) is not None

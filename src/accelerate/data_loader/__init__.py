# SPDX-License-Identifier: Apache-2.0
"""Samplers, shards, dispatch, prefetch, position in the epoch."""

from typing import TYPE_CHECKING

from ..core.imports import is_available
from ..core.lazy import public_names
from .base import DataLoaderAdapter, DataLoaderStateMixin
from .dispatch import DataLoaderDispatcher
from .iterable import IterableDatasetShard
from .loader import DataLoaderShard, SkipDataLoader
from .prepare import prepare_data_loader, skip_first_batches
from .samplers import SeedableRandomSampler, SkipBatchSampler, get_sampler
from .shard import BatchSamplerShard

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

if is_available("torch_xla"):
    from .xla import MpDeviceLoaderWrapper  # noqa: F401

    __all__.append("MpDeviceLoaderWrapper")

if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

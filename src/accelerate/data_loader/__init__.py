# SPDX-License-Identifier: Apache-2.0
"""Samplers, shards, dispatch, prefetch, position in the epoch."""

from typing import TYPE_CHECKING

from ..core.imports import is_available
from ..core.lazy import public_names
from .base import DataLoaderAdapter, DataLoaderStateMixin
from .dispatch import DataLoaderDispatcher
from .loader import DataLoaderShard, SkipDataLoader
from .packing import PackedDataset, pack
from .prepare import prepare_data_loader, skip_first_batches
from .samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)
from .token_batches import TokenBatchSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "PackedDataset",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "TokenBatchSampler",
    "get_sampler",
    "pack",
    "prepare_data_loader",
    "skip_first_batches",
]

# The arguments of torch's loader with their defaults, by which subclasses of the loaders above copy one.
_PYTORCH_DATALOADER_KWARGS = {
    "batch_size": 1,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}

if is_available("torch_xla"):
    from .xla import MpDeviceLoaderWrapper  # noqa: F401

    __all__.append("MpDeviceLoaderWrapper")

if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

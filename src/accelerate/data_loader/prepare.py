# SPDX-License-Identifier: Apache-2.0
"""From a torch loader to a prepared one: which samplers and datasets are exchanged, and what cannot be prepared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..core.errors import PrepareError
from ..core.imports import is_available
from ..state import PartialState
from .base import check_loader, loader_class
from .batch_source import is_iterable, is_native, plan_for
from .dispatch import DataLoaderDispatcher, shards_of_mesh
from .iterable import IterableDatasetShard
from .loader import DataLoaderShard, PreparedLoader, SkipDataLoader
from .order import is_distributed
from .samplers import (
    SeedableRandomSampler,
    SkipBatchSampler,
    check_skip,
    get_sampler,
    seedable,
    shuffles_plainly,
    with_sampler,
)
from .shard import BatchSamplerShard, check_part
from .steps import ShardSplit
from .workers import altered

# What torchdata's loader is built from, besides the dataset and its order.
_LOADER_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def prepare_data_loader(
    dataloader: DataLoader,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    exact: bool = False,
) -> Any:
    """A loader that reads this process's part of `dataloader`'s data. A prepared one is returned as it is.

    Args:
        device, put_on_device: where batches are put, and whether they are put anywhere.
        num_processes, process_index: how many shards the data has and which one this is; by default the run's
            processes, or those of `torch_device_mesh` that do not share their samples.
        split_batches: the batch size is that of all processes together.
        rng_types, non_blocking: see `DataLoaderShard`.
        dispatch_batches: rank 0 reads for all. None: where the dataset is iterable and batches are put on a device.
        even_batches: complete the last step with samples from the start of the epoch.
        slice_fn_for_dispatch: how a dispatched batch is cut: `(batch, slice, process_index=, num_processes=)`.
        use_seedable_sampler, data_seed: shuffle by `SeedableRandomSampler`.
        use_stateful_dataloader: the loader is torchdata's, and its position holds the dataset's own state.
        exact: each sample is read once in every epoch. A step is `batch_size * num_processes` consecutive samples of
            the one order, of which shard r takes the r-th `batch_size`; the last one falls as it falls, and a shard
            without samples in it reads a placeholder (`batch_weight` 0.0). Batches of a batch sampler are taken as
            they are: `num_processes` of them are a step; with `split_batches` each is one, cut into equal parts.

    Raises PrepareError (a ValueError) for a loader that is sharded already, one without a batch size where one is
    needed, and one whose batches cannot be cut; ConfigurationError (a ValueError) for anything but a DataLoader.

    Example:
        loader = prepare_data_loader(DataLoader(dataset, batch_size=8), num_processes=2, process_index=0)
    """
    check_loader(dataloader, "prepare_data_loader")
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    cut = _cut(num_processes, process_index, torch_device_mesh, split_batches, even_batches, exact)
    _check_not_sharded(dataloader, cut)
    if data_seed is not None and not use_seedable_sampler:
        warnings.warn(
            "data_seed is the seed of the seedable sampler: it does nothing without use_seedable_sampler=True"
        )
    if dispatch_batches is None:
        dispatch_batches = is_iterable(dataloader) and put_on_device
    base = _base(dataloader, use_stateful_dataloader)
    if use_seedable_sampler:
        base = _with_seedable_sampler(base, data_seed)
    target = torch.device(device) if put_on_device and device is not None else None
    on_xla = target is not None and target.type == "xla" and is_available("torch_xla")
    options: dict[str, Any] = {
        "use_stateful_dataloader": use_stateful_dataloader,
        # torch_xla's own feed copies in a thread.
        "device": None if on_xla else target,
        "_non_blocking": non_blocking,
        "_drop_last": base.drop_last,
        "torch_device_mesh": torch_device_mesh,
    }
    if dispatch_batches:
        return DataLoaderDispatcher.around(base, cut=cut, slice_fn=slice_fn_for_dispatch, **options)
    if slice_fn_for_dispatch is not None and cut.shards > 1:
        warnings.warn("slice_fn_for_dispatch cuts dispatched batches: it does nothing without dispatch_batches=True")
    generator = _synchronized_generator(base, cut)
    loader = DataLoaderShard.around(
        _shard(base, cut), rng_types=rng_types, synchronized_generator=generator, **options
    )
    if target is not None and on_xla:
        from .xla import MpDeviceLoaderWrapper

        return MpDeviceLoaderWrapper(loader, target)
    return loader


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> Any:
    """A loader without the first `num_batches` of every pass: to go on in the middle of an epoch.

    Of a map-style dataset no sample is read for them, only their indices are drawn; a stream is read on. Where a
    position was loaded into `dataloader`, the loader goes on in that epoch's order, and not before that position.
    A loader around another says itself how, by a method `without_first(num_batches)`. Raises PrepareError for a
    negative number, ConfigurationError for anything else.

    Example:
        for batch in skip_first_batches(loader, 100): ...
    """
    check_skip(num_batches)
    if (without_first := getattr(dataloader, "without_first", None)) is not None:
        return without_first(num_batches)
    check_loader(dataloader, "skip_first_batches")
    kind: Any = type(dataloader)
    if is_available("torch_xla") and hasattr(dataloader, "dataloader"):
        from .xla import MpDeviceLoaderWrapper

        if isinstance(dataloader, MpDeviceLoaderWrapper):
            return MpDeviceLoaderWrapper(skip_first_batches(dataloader.dataloader, num_batches), dataloader.device)
    if not isinstance(dataloader, PreparedLoader):
        if is_iterable(dataloader):
            return SkipDataLoader.around(dataloader, skip_batches=num_batches)
        return _without_first(dataloader, num_batches)
    for call in dataloader.before_pass:
        call(dataloader)
    options = dataloader.options()
    base = dataloader.base_dataloader
    if is_iterable(base) or kind is not DataLoaderShard:
        options["skip_batches"] += num_batches
    else:
        base = _without_first(base, num_batches)
    loader = kind.around(base, **options)
    loader.succeed(dataloader)
    return loader


def _without_first(base: DataLoader, num_batches: int) -> Any:
    if base.batch_sampler is None:
        return altered(base, sampler=SkipBatchSampler(base.sampler, num_batches))
    return altered(base, batch_sampler=SkipBatchSampler(base.batch_sampler, num_batches))


def _cut(
    shards: int | None, index: int | None, mesh: Any, split_batches: bool, even_batches: bool, exact: bool
) -> ShardSplit:
    if shards is None or index is None:
        state = PartialState()
        found = (state.num_processes, state.process_index) if mesh is None else shards_of_mesh(mesh)
        shards = found[0] if shards is None else shards
        index = found[1] if index is None else index
    if not 0 <= index < shards:
        raise PrepareError(f"process_index={index} is none of {shards} processes: they are counted from 0")
    return ShardSplit(shards, index, split_batches, even_batches, exact)


def _check_not_sharded(dataloader: DataLoader, cut: ShardSplit) -> None:
    """Raise PrepareError where the loader's sampler gives each process a part already."""
    if cut.shards == 1 or is_iterable(dataloader):
        return
    for sampler in (dataloader.sampler, dataloader.batch_sampler, get_sampler(dataloader)):
        replicas = getattr(sampler, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1:
            raise PrepareError(
                f"this loader is sharded already: its {type(sampler).__name__} gives each of {replicas} "
                f"processes a part of the dataset, and sharing that out between {cut.shards} processes would drop the "
                "rest. Give the DataLoader no such sampler (shuffle=True, or a sampler over the whole dataset); "
                "`prepare` shares it out. Or keep the loader as it is: do not prepare it."
            )


def _base(dataloader: DataLoader, stateful: bool) -> Any:
    """A loader of the user's own class (torchdata's where it is asked for) that may be changed."""
    if getattr(dataloader, "next_iter_state", None) is not None:
        raise PrepareError(
            "a position was loaded into this loader before it was prepared: load it into the prepared one"
        )
    kind = loader_class(stateful)
    if isinstance(dataloader, kind):
        return altered(dataloader)
    arguments = {name: getattr(dataloader, name) for name in _LOADER_ARGUMENTS}
    if dataloader.batch_sampler is None:
        sampler = None if is_iterable(dataloader) else dataloader.sampler
        fresh = kind(dataloader.dataset, batch_size=None, sampler=sampler, **arguments)
    elif is_iterable(dataloader):
        fresh = kind(dataloader.dataset, batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, **arguments)
    else:
        fresh = kind(dataloader.dataset, batch_sampler=dataloader.batch_sampler, **arguments)
    for name in ("sampler", "batch_size", "drop_last"):
        fresh.__dict__[name] = getattr(dataloader, name)
    return fresh


def _with_seedable_sampler(base: Any, data_seed: int | None) -> Any:
    sampler: Any = None if is_iterable(base) else get_sampler(base)
    if not shuffles_plainly(sampler):
        return base
    fresh = seedable(sampler, data_seed)
    fresh.seed_agreed = fresh.seed_agreed or not is_distributed()
    if base.batch_sampler is None:
        return altered(base, sampler=fresh)
    return altered(base, sampler=fresh, batch_sampler=with_sampler(base.batch_sampler, fresh))


def _shard(base: Any, cut: ShardSplit) -> Any:
    """`base` with samplers or a dataset that give this shard its part."""
    if cut.shards == 1 and not cut.exact:
        return base
    options: dict[str, Any] = {
        "num_processes": cut.shards,
        "process_index": cut.index,
        "split_batches": cut.split,
        "even_batches": cut.even,
        "exact": cut.exact,
    }
    if is_iterable(base):
        return _shard_stream(base, cut, options)
    plan = plan_for(base)
    if cut.shards > 1 and cut.exact:
        _check_counted(base, plan.counted)
    if cut.split and not plan.counted:
        check_part(None, cut.shards, True, False, "prepare_data_loader")
    if base.batch_sampler is not None:
        return altered(base, batch_sampler=BatchSamplerShard(base.batch_sampler, **options))
    return altered(base, sampler=BatchSamplerShard(base.sampler, **options))


def _shard_stream(base: Any, cut: ShardSplit, options: dict[str, Any]) -> Any:
    size = base.batch_size
    if cut.exact and cut.shards > 1:
        _check_counted(base, size is not None)
    check_part(size, cut.shards, cut.split, False, "prepare_data_loader")
    shard = IterableDatasetShard(base.dataset, size or 1, base.drop_last, **options)
    local = size // cut.shards if cut.split and size is not None else size
    return altered(base, dataset=shard, batch_size=local)


def _check_counted(base: Any, counted: bool) -> None:
    if not counted:
        raise PrepareError(
            "exact=True counts samples, and this loader has batch_size=None: how many samples its elements hold is "
            "not known. Give the DataLoader a batch_size (or a BatchSampler as its sampler)."
        )
    if not is_native(base) or not base.in_order:
        why = "in_order=False gives batches in any order" if is_native(base) else "it iterates in a way of its own"
        raise PrepareError(
            f"exact=True needs to know which samples a batch of this {type(base).__name__} holds, and {why}: use a "
            "torch DataLoader with in_order=True"
        )


def _synchronized_generator(base: Any, cut: ShardSplit) -> torch.Generator | None:
    """The generator of the loader's order that all ranks are to have alike, where it has one of its own."""
    sampler = base.dataset if is_iterable(base) else get_sampler(base)
    generator = getattr(sampler, "generator", None)
    if cut.shards == 1 or isinstance(sampler, SeedableRandomSampler) or not isinstance(generator, torch.Generator):
        return None
    return generator

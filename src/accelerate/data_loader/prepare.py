# SPDX-License-Identifier: Apache-2.0
"""From a torch loader to a prepared one: which samplers and datasets are replaced, and what cannot be prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ..core.errors import PrepareError
from ..core.imports import is_available
from ..core.messages import warn
from .base import check_loader, loader_class
from .batch_source import altered, is_iterable, is_native, plan_for
from .dispatch import DataLoaderDispatcher, data_shards
from .loader import DataLoaderShard, PreparedLoader, SkipDataLoader
from .order import draw_worker_seed, is_distributed
from .samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    check_divisible,
    get_sampler,
    shuffles_plainly,
    with_sampler,
)
from .split import SplitLoader, check_split, is_split, splits_evenly
from .steps import ShardSplit

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
    dataloader: DataLoader[Any],
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
) -> DataLoader[Any]:
    """Return a loader that reads this process's shard of `dataloader`'s data.

    With several shards, a sampler whose attribute `generator` is None gets a generator that is seeded from
    torch's global generator, except with `exact`, `dispatch_batches` or `use_seedable_sampler`.

    Args:
        dataloader: the loader. A prepared one is returned unchanged.
        device: where batches are put, with `put_on_device`.
        num_processes: the number of shards. Default: the processes of the run, or those of `torch_device_mesh` that
            read different samples.
        process_index: which shard this process reads.
        split_batches: the loader's batch size is the total over all processes.
        put_on_device: move batches to `device`.
        rng_types: see `DataLoaderShard`.
        dispatch_batches: rank 0 reads for all ranks. None: if the dataset is iterable and batches go to a device.
        even_batches: fill the last step with samples from the start of the epoch.
        slice_fn_for_dispatch: slices a dispatched batch. Called as `(batch, slice, process_index=, num_processes=)`.
        use_seedable_sampler: shuffle with a `SeedableRandomSampler`.
        data_seed: the seed of that sampler.
        non_blocking: copy batches asynchronously, on devices without streams.
        use_stateful_dataloader: use torchdata's loader, whose position includes the state of the dataset.
        torch_device_mesh: the device mesh that determines which ranks read different samples.
        exact: each sample is read once in every epoch. A step is `batch_size * num_processes` consecutive samples, of
            which shard r reads the r-th `batch_size`. The last step may be smaller. A shard without samples in it
            reads a placeholder (`batch_weight` 0.0). A custom batch sampler's batches are not changed:
            `num_processes` of them are a step. With `split_batches`, each batch is a step and is split equally.

    Returns:
        The prepared loader, which is an instance of the loader's class.

    Raises:
        PrepareError: the loader is already sharded, lacks a required batch size, or its batches cannot be split. It
            is a ValueError.
        ConfigurationError: `dataloader` is not a DataLoader. It is a ValueError.

    Example:
        loader = prepare_data_loader(DataLoader(dataset, batch_size=8), num_processes=2, process_index=0)
    """
    check_loader(dataloader, "prepare_data_loader")
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    cut = _cut(num_processes, process_index, torch_device_mesh, split_batches, even_batches, exact)
    _check_not_sharded(dataloader, cut)
    if data_seed is not None and not use_seedable_sampler:
        warn(
            "data_seed sets the seed of the seedable sampler: it has no effect without "
            "use_seedable_sampler=True"
        )
    check_split(dataloader.dataset, cut.shards)
    splits_itself = cut.shards > 1 and is_split(dataloader.dataset)
    if splits_itself and (dispatch_batches or split_batches or exact):
        raise PrepareError(
            f"this {type(dataloader.dataset).__name__} is already split between the processes (by "
            "split_dataset_by_node, or by itself), but dispatch_batches, split_batches and exact "
            "need all samples: pass prepare a dataset that is not split"
        )
    if dispatch_batches is None:
        dispatch_batches = is_iterable(dataloader) and put_on_device and not splits_itself
    base = _base(dataloader, use_stateful_dataloader)
    if use_seedable_sampler:
        base = _with_seedable_sampler(base, data_seed)
    target: torch.device | None = None
    if put_on_device and device is not None:
        target = torch.device(device)
    on_xla = target is not None and target.type == "xla" and is_available("torch_xla")
    options: dict[str, Any] = {
        "use_stateful_dataloader": use_stateful_dataloader,
        # torch_xla copies in a thread.
        "device": None if on_xla else target,
        "_non_blocking": non_blocking,
        "_drop_last": base.drop_last,
        "torch_device_mesh": torch_device_mesh,
    }
    if dispatch_batches:
        if cut.shards > 1 and not exact:
            # The API's loader has no generator then: the workers' seeds come from the global one.
            base = altered(base, generator=None)
        return DataLoaderDispatcher.around(base, cut=cut, slice_fn=slice_fn_for_dispatch, **options)
    if slice_fn_for_dispatch is not None and cut.shards > 1:
        warn(
            "slice_fn_for_dispatch slices dispatched batches: it has no effect without dispatch_batches=True"
        )
    options["rng_types"] = rng_types
    if cut.shards > 1 and not (exact or use_seedable_sampler or is_iterable(base)):
        options["_seeded"] = _seed_sampler(base)
    # Each process reads its own shard of the dataset. With `exact`, the order is that of one process.
    reads_shard = cut.shards > 1 and not (split_batches or exact or use_stateful_dataloader)
    if splits_itself:
        loader = SplitLoader.around(base, cut=cut, **options)
    elif reads_shard and splits_evenly(base.dataset, cut.shards):
        shard = altered(base, dataset=base.dataset.shard(num_shards=cut.shards, index=cut.index))
        loader = SplitLoader.around(shard, unsplit=base.dataset, cut=cut, **options)
    else:
        options["synchronized_generator"] = _synchronized_generator(base, cut)
        loader = DataLoaderShard.around(_shard(base, cut), **options)
    if target is not None and on_xla:
        from .xla import MpDeviceLoaderWrapper

        return cast("DataLoader[Any]", MpDeviceLoaderWrapper(loader, target))
    return loader


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that skips the first `num_batches` of every pass, to continue in the middle of an epoch.

    A map-style dataset does not read the skipped samples: only their indices are drawn. An iterable dataset does. If
    a position was loaded into `dataloader`, the new loader continues in that epoch's order, and not before that
    position. A class that wraps a loader can define `without_first(num_batches)` to do this in its own way.

    Args:
        dataloader: a loader, prepared or not.
        num_batches: how many batches to skip.

    Returns:
        The new loader.

    Raises:
        ConfigurationError: `dataloader` is not a DataLoader.

    Example:
        for batch in skip_first_batches(loader, 100): ...
    """
    without_first = getattr(dataloader, "without_first", None)
    if without_first is not None:
        loader: DataLoader[Any] = without_first(num_batches)
        return loader
    check_loader(dataloader, "skip_first_batches")
    kind: Any = type(dataloader)
    if is_available("torch_xla") and hasattr(dataloader, "dataloader"):
        from .xla import MpDeviceLoaderWrapper

        if isinstance(dataloader, MpDeviceLoaderWrapper):
            shorter = skip_first_batches(dataloader.dataloader, num_batches)
            return cast("DataLoader[Any]", MpDeviceLoaderWrapper(shorter, dataloader.device))
    if not isinstance(dataloader, PreparedLoader):
        if is_iterable(dataloader):
            return SkipDataLoader.around(dataloader, skip_batches=num_batches)
        return _without_first(dataloader, num_batches)
    dataloader.loop.before_pass(dataloader)
    options = dataloader.options()
    base = dataloader.base_dataloader
    if is_iterable(base) or kind is not DataLoaderShard:
        options["skip_batches"] += num_batches
    else:
        base = _without_first(base, num_batches)
    following = kind.around(base, **options)
    following.succeed(dataloader, continues=num_batches > 0)
    return cast("DataLoader[Any]", following)


def _without_first(base: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    if base.batch_sampler is None:
        return altered(base, sampler=SkipBatchSampler(base.sampler, num_batches))
    return altered(base, batch_sampler=SkipBatchSampler(base.batch_sampler, num_batches))


def _cut(
    shards: int | None,
    index: int | None,
    mesh: Any,
    split_batches: bool,
    even_batches: bool,
    exact: bool,
) -> ShardSplit:
    if shards is None or index is None:
        shards_of_run, own_index = data_shards(mesh)
        if shards is None:
            shards = shards_of_run
        if index is None:
            index = own_index
    if not 0 <= index < shards:
        raise PrepareError(
            f"process_index={index} is out of range: {shards} processes are numbered from 0"
        )
    return ShardSplit(shards, index, split_batches, even_batches, exact)


def _check_not_sharded(dataloader: DataLoader[Any], cut: ShardSplit) -> None:
    """Raise PrepareError where the loader's sampler splits the data between the processes already."""
    if cut.shards == 1 or is_iterable(dataloader):
        return
    for sampler in (dataloader.sampler, dataloader.batch_sampler, get_sampler(dataloader)):
        replicas = getattr(sampler, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1:
            raise PrepareError(
                f"this loader is already sharded: its {type(sampler).__name__} gives each of "
                f"{replicas} processes a shard of the dataset, and splitting that between "
                f"{cut.shards} processes would drop the rest. `prepare` splits the data, so "
                "remove the sampler (use shuffle=True, or a sampler over the full dataset), or "
                "do not prepare the loader."
            )


def _base(dataloader: DataLoader[Any], stateful: bool) -> Any:
    """A copy of the loader that may be changed: of its class, or of torchdata's with `stateful`."""
    if getattr(dataloader, "next_iter_state", None) is not None:
        raise PrepareError(
            "a position was loaded into this loader before it was prepared: load it into the "
            "prepared loader"
        )
    kind = loader_class(stateful)
    if isinstance(dataloader, kind):
        return altered(dataloader)
    arguments = {name: getattr(dataloader, name) for name in _LOADER_ARGUMENTS}
    if dataloader.batch_sampler is None:
        arguments["batch_size"] = None
        if not is_iterable(dataloader):
            arguments["sampler"] = dataloader.sampler
    elif is_iterable(dataloader):
        arguments["batch_size"] = dataloader.batch_size
        arguments["drop_last"] = dataloader.drop_last
    else:
        arguments["batch_sampler"] = dataloader.batch_sampler
    fresh = kind(dataloader.dataset, **arguments)
    for name in ("sampler", "batch_size", "drop_last"):
        fresh.__dict__[name] = getattr(dataloader, name)
    return fresh


def _with_seedable_sampler(base: Any, data_seed: int | None) -> Any:
    if is_iterable(base):
        return base
    sampler: Any = get_sampler(base)
    if not shuffles_plainly(sampler):
        return base
    num_samples = sampler.num_samples
    if num_samples == len(sampler.data_source):
        num_samples = None
    fresh = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
    fresh.seed_agreed = fresh.seed_agreed or not is_distributed()
    if base.batch_sampler is None:
        return altered(base, sampler=fresh)
    return altered(base, sampler=fresh, batch_sampler=with_sampler(base.batch_sampler, fresh))


def _shard(base: Any, cut: ShardSplit) -> Any:
    """`base` with a sampler or dataset that reads this shard only."""
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
    if not plan.counted:
        check_divisible(None, cut, "prepare_data_loader")
    if base.batch_sampler is not None:
        return altered(base, batch_sampler=BatchSamplerShard(base.batch_sampler, **options))
    return altered(base, sampler=BatchSamplerShard(base.sampler, **options))


def _shard_stream(base: Any, cut: ShardSplit, options: dict[str, Any]) -> Any:
    size = base.batch_size
    if cut.exact and cut.shards > 1:
        _check_counted(base, size is not None)
    check_divisible(size, cut, "prepare_data_loader")
    shard = IterableDatasetShard(base.dataset, size or 1, base.drop_last, **options)
    if cut.split and size is not None:
        size = size // cut.shards
    return altered(base, dataset=shard, batch_size=size)


def _check_counted(base: Any, counted: bool) -> None:
    if not counted:
        raise PrepareError(
            "exact=True counts samples, but this loader has batch_size=None, so the number of "
            "samples in its elements is unknown. Give the DataLoader a batch_size (or a "
            "BatchSampler as its sampler)."
        )
    if not is_native(base):
        why = "it has a custom `__iter__`"
    elif not base.in_order:
        why = "in_order=False returns batches in any order"
    else:
        return
    raise PrepareError(
        f"exact=True must know which samples are in a batch of this {type(base).__name__}, but "
        f"{why}: use a torch DataLoader with in_order=True"
    )


def _seed_sampler(base: Any) -> bool:
    """Give a sampler without a generator one, with a seed from torch's global generator, as the API does.

    The sampler itself is changed and not a copy, so that a script can still change its other attributes.
    """
    sampler = get_sampler(base)
    if getattr(sampler, "generator", False) is not None:
        return False
    sampler.generator = torch.Generator().manual_seed(draw_worker_seed(None))
    return True


def _synchronized_generator(base: Any, cut: ShardSplit) -> torch.Generator | None:
    """The generator of the loader's sampler or dataset, whose state all ranks must share; None where there is none."""
    if cut.shards == 1:
        return None
    sampler = get_sampler(base)
    if is_iterable(base):
        sampler = base.dataset
    generator = getattr(sampler, "generator", None)
    if isinstance(sampler, SeedableRandomSampler) or not isinstance(generator, torch.Generator):
        return None
    return generator

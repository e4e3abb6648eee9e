# SPDX-License-Identifier: Apache-2.0
"""The samplers of this package, and functions that find and replace the sampler of a loader."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from ..core.errors import PrepareError


class SeedableRandomSampler(RandomSampler):
    """Shuffles with the seed `data_seed + epoch`, so the order of an epoch does not depend on earlier draws.

    Without `set_epoch` the epoch increases by one after each complete pass.

    Args:
        *args: those of torch's `RandomSampler`.
        **kwargs: those of torch's `RandomSampler`, and `data_seed` (by default torch's initial seed).

    Example:
        sampler = SeedableRandomSampler(dataset, data_seed=42)
        sampler.set_epoch(3)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch: int = 0
        self.generator: torch.Generator | None
        # All ranks are known to have this seed.
        self.seed_agreed: bool = data_seed is not None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


class SkipBatchSampler(BatchSampler):
    """The batches of `batch_sampler` without the first `skip_batches`, of which only the indices are drawn."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        check_skip(skip_batches)
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield batch

    @property
    def total_length(self) -> int:
        """The number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __getattr__(self, name: str) -> Any:
        # The attributes of the wrapped sampler: batch_size, drop_last, sampler, ...
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def check_skip(skip_batches: int) -> None:
    """Raise PrepareError unless `skip_batches` is an integer from 0 on."""
    if isinstance(skip_batches, bool) or not isinstance(skip_batches, int) or skip_batches < 0:
        raise PrepareError(
            f"the number of batches to skip must be an integer of at least 0, not {skip_batches!r}"
        )


def innermost(batch_sampler: Any) -> Any:
    """The user's batch sampler inside those of this package."""
    while _is_wrapper(batch_sampler):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler


def _is_wrapper(batch_sampler: Any) -> bool:
    return "batch_sampler" in getattr(batch_sampler, "__dict__", {})


def get_sampler(dataloader: Any) -> Any:
    """The sampler (of single indices) at the bottom of a loader, prepared or not; None where there is none."""
    batch_sampler = dataloader.batch_sampler
    if batch_sampler is None:
        return innermost(dataloader.sampler)
    return getattr(innermost(batch_sampler), "sampler", None)


def with_sampler(batch_sampler: Any, sampler: Sampler[int]) -> Any:
    """A copy of `batch_sampler` that draws from `sampler`. The original is not changed."""
    fresh = copy.copy(batch_sampler)
    if _is_wrapper(fresh):
        fresh.batch_sampler = with_sampler(fresh.batch_sampler, sampler)
    else:
        fresh.sampler = sampler
    return fresh


def shuffles_plainly(sampler: Any) -> bool:
    """Whether `sampler` is torch's random sampler, and not a subclass with another order."""
    return (
        isinstance(sampler, RandomSampler)
        and not isinstance(sampler, SeedableRandomSampler)
        and type(sampler).__iter__ is RandomSampler.__iter__
    )


def epoch_listeners(*roots: Any) -> list[Any]:
    """The objects with a `set_epoch` among `roots` and the samplers inside them, each once."""
    objects: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        candidate = waiting.pop(0)
        if candidate is None or id(candidate) in objects:
            continue
        objects[id(candidate)] = candidate
        attributes = getattr(candidate, "__dict__", {})
        waiting.append(attributes.get("batch_sampler"))
        waiting.append(attributes.get("sampler"))
    return [
        candidate
        for candidate in objects.values()
        if callable(getattr(candidate, "set_epoch", None))
    ]


# For samplers and datasets that loaders have told an epoch: which one, and how far their user is ahead of the loader.
_TOLD: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def tell_epoch(listener: Any, epoch: int, overrule: bool = False) -> None:
    """Call `set_epoch` of a sampler or dataset. If its user has set another epoch, that one stays and counts on.

    Args:
        listener: the sampler or dataset. What its user sets is seen if it has an attribute `epoch`.
        epoch: the loader's epoch.
        overrule: replace the user's epoch.
    """
    try:
        told, ahead = _TOLD.get(listener, (0, 0))
    except TypeError:  # neither hashable nor weakly referenced
        listener.set_epoch(epoch)
        return
    present = getattr(listener, "epoch", None)
    if overrule or not isinstance(present, int) or present < 0:
        ahead = 0
    elif present != told:
        ahead = present - epoch
    if ahead == 0 or present == told:
        listener.set_epoch(epoch + ahead)
    _TOLD[listener] = epoch + ahead, ahead

# SPDX-License-Identifier: Apache-2.0
"""Samplers of our own, and how to find and exchange the sampler inside a loader."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from ..core.errors import PrepareError


class SeedableRandomSampler(RandomSampler):
    """Shuffles from (seed + epoch): the same order for an epoch, whatever was drawn before.

    Takes the arguments of torch's `RandomSampler`, and `data_seed` (torch's present seed where it is not given).
    Without `set_epoch` the epoch goes up by one with each pass that is read to its end.

    Example:
        sampler = SeedableRandomSampler(dataset, data_seed=42)
        sampler.set_epoch(3)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0
        # Whether all ranks are known to have this seed.
        self.seed_agreed = data_seed is not None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The epoch to shuffle for."""
        self.epoch = epoch


class SkipBatchSampler(BatchSampler):
    """The batches of `batch_sampler` without the first `skip_batches`: only their indices are drawn."""

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
        """The batches of the sampler, with those that are left out."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __getattr__(self, name: str) -> Any:
        # What the sampler inside knows (batch_size, drop_last, sampler, ...) is asked for here too.
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def check_skip(skip_batches: int) -> None:
    if isinstance(skip_batches, bool) or not isinstance(skip_batches, int) or skip_batches < 0:
        raise PrepareError(f"the number of batches to skip is a whole number from 0 up; it was given {skip_batches!r}")


def innermost(batch_sampler: Any) -> Any:
    """The user's own batch sampler inside those of this package."""
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
    """A copy of `batch_sampler` that draws from `sampler`; the user's own object stays as it was."""
    fresh = copy.copy(batch_sampler)
    if _is_wrapper(fresh):
        fresh.batch_sampler = with_sampler(fresh.batch_sampler, sampler)
    else:
        fresh.sampler = sampler
    return fresh


def seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    """A seedable sampler with the options of `sampler`."""
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )


def shuffles_plainly(sampler: Any) -> bool:
    """Whether `sampler` is torch's own random sampler (a subclass with an order of its own is not)."""
    return (
        isinstance(sampler, RandomSampler)
        and not isinstance(sampler, SeedableRandomSampler)
        and type(sampler).__iter__ is RandomSampler.__iter__
    )


def epoch_listeners(*roots: Any) -> list[Any]:
    """What wants to hear of a new epoch (has `set_epoch`) among `roots` and the samplers inside them, each once."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    seen: set[int] = set()
    while waiting:
        candidate = waiting.pop(0)
        if candidate is None or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if callable(getattr(candidate, "set_epoch", None)):
            found[id(candidate)] = candidate
        waiting += [getattr(candidate, "__dict__", {}).get(name) for name in ("batch_sampler", "sampler")]
    return list(found.values())

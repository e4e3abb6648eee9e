# SPDX-License-Identifier: Apache-2.0
"""What an epoch's order is drawn from: taken down at its start, shared by all ranks, drawn from again on resume."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from ..collectives.objects import broadcast_each
from .samplers import SeedableRandomSampler

# These draw from torch alone. Any other sampler may use Python's or NumPy's generator too.
_TORCH_ONLY = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)

States = dict[str, Any]


class Order:
    """The randomness behind one epoch's order of indices.

    A plain loader draws a seed for its workers and then the order, both from its generator (or torch's global one).
    So does this, in the same sequence: on one process nothing differs. Where the order must be another than this
    process would draw (rank 0's, or the one of the epoch that is being resumed) it is drawn under those states, and
    this process's global generators are left as they were.
    """

    def __init__(self, sampler: Any, generators: Iterable[torch.Generator | None], seeds_workers: bool = True) -> None:
        self.sampler = sampler
        self.generators = list({id(one): one for one in generators if one is not None}.values())
        self.torch_only = type(sampler) in _TORCH_ONLY or isinstance(sampler, SeedableRandomSampler)
        self.resumes = False
        # Whether torch's iterator draws a seed for workers before the order (persistent workers have theirs).
        self.seeds_workers = seeds_workers
        self.states: States = self.capture()
        self.redraw = False

    def resume(self, states: States) -> None:
        """Draw the order of an epoch that was left in its middle, with nothing drawn from this process's states."""
        self.take(states)
        self.resumes = True

    def capture(self) -> States:
        """The present states."""
        states: States = {"seeds_workers": self.seeds_workers}
        if isinstance(self.sampler, SeedableRandomSampler):
            states["seed"] = self.sampler.initial_seed
        elif type(self.sampler) is not SequentialSampler:
            states["torch"] = torch.get_rng_state()
        if self.generators:
            states["generators"] = [generator.get_state() for generator in self.generators]
        if not self.torch_only:
            states["python"] = random.getstate()
            if "numpy" in sys.modules:
                states["numpy"] = sys.modules["numpy"].random.get_state()
        return states

    def as_saved(self) -> States:
        """The states of this order as numbers, lists and byte tensors."""
        return {name: _listed(state) for name, state in self.states.items()}

    def own(self) -> States:
        """The part of the present states that is the loader's: its generators and its sampler's seed."""
        return {key: value for key, value in self.capture().items() if key in ("seed", "generators")}

    def restore_own(self, states: States) -> None:
        """Put back what `own` told."""
        for generator, state in zip(self.generators, states.get("generators", ()), strict=False):
            generator.set_state(state)
        if "seed" in states and isinstance(self.sampler, SeedableRandomSampler):
            self.sampler.initial_seed = states["seed"]

    @property
    def is_fixed(self) -> bool:
        """Whether all ranks have the same order anyway."""
        if isinstance(self.sampler, SeedableRandomSampler):
            return self.sampler.seed_agreed
        return type(self.sampler) is SequentialSampler

    def share(self) -> None:
        """Take the states of rank 0, so that all ranks cut the same order. One message an epoch."""
        if self.is_fixed or not is_distributed():
            return
        shared = broadcast_each(self.states, operation="the start of an epoch of a data loader")
        if not _same(shared, self.states):
            self.take(shared)
        if isinstance(self.sampler, SeedableRandomSampler):
            self.sampler.seed_agreed = True

    def take(self, states: States) -> None:
        """Draw from `states` instead of the present ones."""
        self.states = states
        self.redraw = True
        self.seeds_workers = states["seeds_workers"]

    def open(
        self, start: Callable[[], Iterator[Any]], generator: torch.Generator | None, twice: bool = False
    ) -> Iterator[Any]:
        """The iterator that `start` makes, which draws the order.

        `twice`: torch's iterator with workers asks its sampler for an iterator a second time after it has drawn
        their seed; a redrawn order does the same.
        """
        return self._drawn_again(start, generator, twice) if self.redraw else start()

    def _drawn_again(
        self, start: Callable[[], Iterator[Any]], generator: torch.Generator | None, twice: bool
    ) -> Iterator[Any]:
        with self.applied():
            found = start()
            if self.seeds_workers:
                draw_worker_seed(generator)
                found = start() if twice else found
            # Samplers draw when they are first asked for an index.
            first = list(_one(found))
        yield from first
        yield from found

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What torch draws in the block from its global generator does not count where an epoch is resumed."""
        state = torch.get_rng_state() if self.resumes else None
        yield
        if state is not None:
            torch.set_rng_state(state)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """What is drawn in the block is drawn from `states`, where the order is redrawn."""
        if not self.redraw:
            yield
            return
        own = {**self.capture(), "torch": torch.get_rng_state()}
        _restore(self.states)
        self.restore_own(self.states)
        try:
            yield
        finally:
            # Generators of the loader's own go on from here; the global ones are the process's.
            _restore(own)


def draw_worker_seed(generator: torch.Generator | None) -> int:
    """The number that torch's loader draws at the start of every pass, needed or not."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _one(iterator: Iterator[Any]) -> Iterator[Any]:
    for found in iterator:
        yield found
        return


def _restore(states: States) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states and "numpy" in sys.modules:
        kind, keys, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys, *rest))


def _listed(value: Any) -> Any:
    """Tuples and arrays as lists, which can be written as JSON and compared."""
    if isinstance(value, (tuple, list)):
        return [_listed(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _same(left: Any, right: Any) -> bool:
    left, right = _listed(left), _listed(right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)

# SPDX-License-Identifier: Apache-2.0
"""The order of one epoch: how all ranks have the same one, and how a resumed run has it again.

The order of a seeded sampler (torch's and this package's) or of a stream follows from the states of the generators at
its first element: the ranks share these states, and a position contains them (`ReplayedOrder`). What any other
sampler draws from is not known: rank 0's elements are sent to all ranks, and a position contains the elements
(`RecordedOrder`).
"""

from __future__ import annotations

import array
import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..collectives.objects import broadcast_each
from ..core.errors import CheckpointError
from .samplers import EpochSampler
from .steps import discard

States = dict[str, Any]

# The generators that every process has.
GLOBAL = ("torch", "python", "numpy")


def capture(kinds: Iterable[str] = GLOBAL) -> States:
    """The present states of global generators."""
    states: States = {}
    for kind in kinds:
        if kind == "torch":
            states[kind] = torch.get_rng_state().numpy().tobytes()
        elif kind == "python":
            version, words, gauss = random.getstate()
            states[kind] = [version, array.array("I", words).tobytes(), gauss]
        else:
            name, keys, *others = np.random.get_state()
            states[kind] = [name, np.asarray(keys).tobytes(), *others]
    return states


def restore(states: States) -> None:
    """Set the global generators whose states are among `states`."""
    if "torch" in states:
        torch.set_rng_state(torch_state(states["torch"]))
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(array.array("I", words)), gauss))
    if "numpy" in states:
        name, keys, *others = states["numpy"]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *others))


def torch_state(state: bytes) -> torch.Tensor:
    """The state of a torch generator, as `set_state` takes it."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


@contextlib.contextmanager
def preserved(kinds: Iterable[str] = GLOBAL) -> Iterator[None]:
    """A context that restores the global generators at its end."""
    states = capture(kinds)
    try:
        yield
    finally:
        restore(states)


# How the messages of the start of an epoch are named to ranks that call something else.
_EPOCH_START = "the start of an epoch of a data loader"


def keeps_state(thing: Any) -> bool:
    """Whether `thing` has `state_dict` and `load_state_dict`."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def is_seeded(sampler: Any) -> bool:
    """Whether the order of `sampler` follows from the states of torch's generators at its first index."""
    if isinstance(sampler, EpochSampler):
        return True
    if isinstance(sampler, RandomSampler):
        return type(sampler).__iter__ is RandomSampler.__iter__
    return type(sampler) in (
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
        DistributedSampler,
    )


def is_recorded(states: States) -> bool:
    """Whether the states of a position are those of a `RecordedOrder`."""
    return bool(states.keys() & {"indices", "elements", "endless"})


class OwnGenerators:
    """The randomness that belongs to a loader: torch generators of its sampler or dataset, and a sampler's seed."""

    def __init__(self, generators: Iterable[Any], seedable: EpochSampler | None = None) -> None:
        distinct = dict.fromkeys(
            generator for generator in generators if isinstance(generator, torch.Generator)
        )
        self.generators: list[torch.Generator] = list(distinct)
        self.seedable = seedable

    def capture(self) -> States:
        """The present states."""
        states: States = {}
        if self.generators:
            states["generators"] = [
                generator.get_state().numpy().tobytes() for generator in self.generators
            ]
        if self.seedable is not None:
            states["seed"] = self.seedable.initial_seed
        return states

    def restore(self, states: States) -> None:
        """Set the states that `capture` has returned."""
        for generator, state in zip(self.generators, states.get("generators", ()), strict=False):
            generator.set_state(torch_state(state))
        if "seed" in states and self.seedable is not None:
            self.seedable.initial_seed = states["seed"]


class ReplayedOrder:
    """The order of a seeded sampler, or of a stream: drawn again from the states at its start.

    The first element is drawn under these states, and in a resumed pass all elements that had been drawn when its
    position was saved. Then a process continues with the states of its global generators that it had, unless they are
    those of the order.

    Args:
        own: the loader's own generators.
        kinds: the global generators that the order may be drawn from.
        fixed: all ranks have this order without a message.
        states: for a resumed epoch, the states at its start.
        yielded: what a stream that goes on where it was left has yielded in passes that were left.
    """

    def __init__(
        self,
        own: OwnGenerators,
        kinds: Iterable[str],
        fixed: bool,
        states: States | None = None,
        yielded: int = 0,
    ) -> None:
        self.own = own
        self.kinds: tuple[str, ...] = tuple(kinds)
        self.fixed = fixed
        self.states: States | None = states
        self.resumes: bool = states is not None
        self.drawn: int = 0
        # Elements of the stream before those of this order, and how many more of them are gone already.
        self.lead: int = yielded if states is None else states.get("lead", 0)
        self.gone: int = yielded - self.lead
        # All ranks take rank 0's states.
        self.shared: bool = False

    def open(
        self, start: Callable[[], Iterator[Any]], lazily: bool, consumed: int
    ) -> Iterator[Any]:
        """The elements of the order, of which the caller skips the first `consumed` at once.

        Args:
            start: opens what draws the order.
            lazily: `start` draws nothing before the first element. Otherwise the order is opened now, as torch does,
                and its first element is drawn.
            consumed: the position in a resumed epoch.

        Returns:
            An iterator over all elements.
        """
        parts = self._parts(start, consumed)
        if not (lazily or self.resumes):
            parts = itertools.chain([next(parts)], parts)
        elements = itertools.chain.from_iterable(parts)
        # Of a sampler's draws only the first one uses a global generator.
        if self.kinds == GLOBAL:
            return self._counted(elements)
        return elements

    def _parts(self, start: Callable[[], Iterator[Any]], consumed: int) -> Iterator[Iterable[Any]]:
        states = self.states or {}
        ahead = states.get("drawn", consumed) - consumed
        with self.applied():
            elements = start()
            if self.gone > 0:
                elements = itertools.chain(itertools.repeat(None, self.gone), elements)
            elif self.gone < 0:
                discard(elements, -self.gone)
            if consumed:
                yield itertools.islice(elements, consumed)
            first = list(itertools.islice(elements, max(1, ahead)))
        yield first
        yield elements

    def _counted(self, elements: Iterator[Any]) -> Iterator[Any]:
        for element in elements:
            self.drawn += 1
            yield element

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which draws use the states at the start of the order: rank 0's, or saved ones."""
        present = capture(self.kinds)
        if self.states is None:
            self.states = {**present, **self.own.capture()}
            if self.shared:
                self.states = broadcast_each(self.states, operation=_EPOCH_START)
                if self.own.seedable is not None:
                    self.own.seedable.seed_agreed = True
        put_back: States = {}
        for kind, state in present.items():
            if self.resumes or state != self.states.get(kind):
                put_back[kind] = state
        if self.resumes or self.shared:
            restore(self.states)
            self.own.restore(self.states)
        try:
            yield
        finally:
            restore(put_back)

    def as_saved(self) -> States:
        """The states for a position."""
        states = dict(self.states or {})
        if self.drawn:
            states["drawn"] = self.drawn
        if self.lead:
            states["lead"] = self.lead
        return states

    def repeated(self) -> ReplayedOrder:
        """The same order, to be read once more."""
        return ReplayedOrder(self.own, self.kinds, self.fixed, dict(self.states or {}))


class RecordedOrder:
    """The elements that a sampler of an unknown kind has drawn.

    On one process they are drawn when they are requested, as torch does, and the others when a position is saved. Of
    several ranks each draws the whole epoch at its start, and then takes rank 0's elements.

    Args:
        own: the loader's own generators.
        sampler: the sampler or batch sampler. If it has a `state_dict`, a position contains its state.
        limit: a sampler that yields so many elements is taken to be endless, and its order is not saved.
        states: for a resumed epoch, what `as_saved` returned.
    """

    fixed = False

    def __init__(
        self, own: OwnGenerators, sampler: Any, limit: int, states: States | None = None
    ) -> None:
        self.own = own
        self.sampler = sampler
        self.limit = limit
        self.resumes: bool = states is not None
        # All ranks take rank 0's elements.
        self.shared: bool = False
        # The whole epoch is drawn at its start, as several ranks do.
        self.at_once: bool = False
        self.endless: bool = states is not None and "endless" in states
        self.elements: list[Any] = []
        self._saved = states
        self._complete = False
        self._drawing: Iterator[Any] | None = None
        self._sampler_state: Any = None
        if states is not None and not self.endless and is_recorded(states):
            self.elements = decoded(states)
            self._complete = True

    def open(
        self, start: Callable[[], Iterator[Any]], lazily: bool, consumed: int
    ) -> Iterator[Any]:
        """The elements of the order: see `ReplayedOrder.open`."""
        if self.resumes:
            self._continue(start)
            if self._complete:
                return iter(self.elements)
        if keeps_state(self.sampler):
            self._sampler_state = copy.deepcopy(self.sampler.state_dict())
        if not lazily:
            self._drawing = start()
        return self._read(start)

    def _continue(self, start: Callable[[], Iterator[Any]]) -> None:
        """Bring the generators and the sampler to where they are after this epoch."""
        saved = self._saved
        self._saved = None
        if saved is None:
            return
        if not is_recorded(saved):
            raise CheckpointError(
                "this position is in the middle of an epoch whose order a "
                f"{type(self.sampler).__name__} drew, but does not contain that order. Load a "
                "position that was saved between two epochs, or call set_epoch on this loader to "
                "start a new epoch."
            )
        if "sampler" in saved and keeps_state(self.sampler):
            self.sampler.load_state_dict(copy.deepcopy(saved["sampler"]))
            self._sampler_state = saved["sampler"]
            if not self.endless:
                with preserved():
                    discard(start())
        self.own.restore(saved)

    def _read(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._drawing is None:
            self._drawing = start()
        position = 0
        while True:
            while position < len(self.elements):
                yield self.elements[position]
                position += 1
            if self._complete:
                return
            if self.endless:
                yield from self._draw(self._drawing)
            else:
                self._record(self._drawing)

    def _draw(self, drawing: Iterator[Any]) -> list[Any]:
        count = self.limit if self.shared or self.at_once else 1
        drawn = list(itertools.islice(drawing, count))
        if self.shared:
            drawn = broadcast_each(drawn, operation=_EPOCH_START)
        self._complete = len(drawn) < count
        return drawn

    def _record(self, drawing: Iterator[Any]) -> None:
        self.elements += self._draw(drawing)
        self.endless = len(self.elements) >= self.limit

    def as_saved(self) -> States:
        """The elements for a position. Draws the rest of them."""
        if self._drawing is not None:
            with preserved():
                while not (self._complete or self.endless):
                    self._record(self._drawing)
        states = self.own.capture()
        if self._sampler_state is not None:
            states["sampler"] = self._sampler_state
        if self.endless:
            states["endless"] = True
        elif self._complete:
            states.update(encoded(self.elements))
        return states

    def repeated(self) -> RecordedOrder:
        """The same order, to be read once more."""
        order = RecordedOrder(self.own, self.sampler, self.limit, {})
        order.elements = self.elements
        order._saved = None
        order._complete = True
        return order


Order = ReplayedOrder | RecordedOrder


def encoded(elements: list[Any]) -> States:
    """The elements of an order for a position: indices and lists of indices as tensors of integers."""
    with contextlib.suppress(TypeError, OverflowError):
        return {"indices": _integers(elements)}
    if all(type(element) is list for element in elements):
        with contextlib.suppress(TypeError, OverflowError):
            indices = list(itertools.chain.from_iterable(elements))
            lengths = [len(batch) for batch in elements]
            return {"indices": _integers(indices), "lengths": _integers(lengths)}
    return {"elements": list(elements)}


def _integers(values: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(array.array("q", values)))


def decoded(states: States) -> list[Any]:
    """The elements in what `encoded` returned."""
    if "elements" in states:
        return list(states["elements"])
    indices = iter(states["indices"].tolist())
    if "lengths" not in states:
        return list(indices)
    return [list(itertools.islice(indices, length)) for length in states["lengths"].tolist()]


def draw_worker_seed(generator: torch.Generator | None) -> int:
    """The number that torch's loader draws at the start of every pass, needed or not."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def is_distributed() -> bool:
    """Whether there is a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

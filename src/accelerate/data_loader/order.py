# SPDX-License-Identifier: Apache-2.0
"""The random states that an epoch's order is drawn from: recorded, shared by all ranks, and restored on resume."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..collectives import transport
from ..collectives.objects import broadcast_each
from ..core.errors import CheckpointError, PrepareError
from ..runtime.calls import Call
from ..runtime.channel import signature
from .digest import extended
from .generators import GLOBAL, Generators, States, checksum, derived, differing, equal, listed, packed
from .position import StreamPosition
from .samplers import SeedableRandomSampler
from .steps import FINISHED, ShardStep

# These draw their full order from torch when the first index is requested.
_DRAWN_AT_ONCE = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)

# How often in an epoch states are recorded because the loop has drawn from the sampler's generator in between.
RECORDS = 4096

# How these messages are named to ranks that call something else.
_EPOCH_START = "the start of an epoch of a data loader"
_COMPARISON = Call("the comparison of a data loader's order")

# Passes under way whose sampler draws as it goes.
_under_way: weakref.WeakSet[Order] = weakref.WeakSet()


@dataclass(slots=True)
class History:
    """What the passes of one loader share.

    Fields:
        overtaken: another part of the program has drawn from a generator between two draws of this loader's sampler.
    """

    overtaken: bool = False


def draws_at_once(sampler: Any, private: bool = False) -> bool:
    """Whether `sampler` is known to draw its full order at the first index, and only from torch's generators.

    Args:
        sampler: the sampler.
        private: nothing else draws from its generator.
    """
    if type(sampler) in _DRAWN_AT_ONCE or isinstance(sampler, SeedableRandomSampler):
        return True
    if not isinstance(sampler, RandomSampler) or type(sampler).__iter__ is not RandomSampler.__iter__:
        return False
    # Without a generator it creates one for each pass. Others may draw from a given one in between.
    return (
        private
        or sampler.generator is None
        or not (sampler.replacement or sampler.num_samples > len(sampler.data_source))
    )


class Order:
    """The randomness behind one epoch's order of indices.

    A plain loader draws a seed for its workers and then the order, both from its generator (or torch's global one).
    So does this, in the same sequence: on one process nothing differs. Where the order must be another than this
    process would draw (rank 0's, or the one of the epoch that is being resumed) it is drawn under those states, and
    this process's global generators are left as they were.

    A sampler may draw between its indices. Where the shards of one order depend on it (`isolates`), these draws have
    a stream of random numbers of their own, which no other draw of the program disturbs: it begins with rank 0's
    states at the first index. On rank 0 the global generators follow that stream as long as nobody else draws from
    them, as in a plain loop. In a plain loop of one process the sampler draws from the generators as they are, and
    the states that a repetition cannot know are recorded.

    Args:
        stream: what is iterated: a sampler or a batch sampler. None for an iterable dataset.
        generators: what it may draw from.
        seedable: the seedable sampler inside it, if any.
        stateful: the sampler with a `state_dict` inside it, if any.
        known: it is known to draw at once.
        history: what the passes of the loader share.
    """

    def __init__(
        self,
        stream: Any,
        generators: Generators,
        seedable: SeedableRandomSampler | None = None,
        stateful: Any = None,
        known: bool = False,
        history: History | None = None,
    ) -> None:
        self.stream = stream
        self.generators = generators
        self.seedable = seedable
        self.stateful = stateful
        self.known = known
        self.history: History = History() if history is None else history
        # The states at the start of the order, and the states that were set before later elements were drawn.
        self.states: States = self._opening()
        self.later: list[tuple[int, States]] = []
        self.unrecorded: bool = False
        self.begun: bool = False
        self.resumes: bool = False
        # The start of the pass has drawn its numbers, maybe before the position was saved that it continues from.
        self.opened: bool = False
        self.isolates: bool = False
        self.shared: bool = False
        self.equal_lengths: bool = False
        # The number of elements drawn; those after the position of the last step; that position and its checksum.
        self.drawn: int = 0
        self._ahead: list[Any] = []
        self._place = 0
        self._digest = 0
        self._expected: tuple[int, int | None] = (0, None)
        # The states at the sampler's next draw, where they are known; the kinds of generators that it has used.
        self._next: States | None = None
        self._used: set[str] = set()
        # While a step is drawn: the process's states of the generators that are restored afterwards.
        self._put_back: States = {}
        self._rejoins: set[str] | None = None
        # Checksums of the process's states that were those of an isolated stream when its position was saved.
        self._followed: dict[str, str] = {}
        self._finished = False

    # -- states

    def _opening(self) -> States:
        states: States = {}
        if self.seedable is not None:
            states["seed"] = self.seedable.initial_seed
        if self.stateful is not None:
            states["sampler"] = copy.deepcopy(self.stateful.state_dict())
        if type(self.stream) is SequentialSampler or (self.known and self.seedable is not None):
            return {**states, **self.generators.capture_private()}
        return {**states, **self.generators.capture()}

    def as_saved(self) -> States:
        """The states of this order for a position: numbers, lists and byte tensors."""
        states: States = {name: listed(state) for name, state in self.states.items()}
        later = list(self.later)
        if self._next is not None and self._is_plain:
            # The sampler's next draw begins here, and others may have drawn since its last one.
            present = self.generators.capture()
            later.append((self.drawn, packed({kind: present[kind] for kind in sorted(self._used)})))
        if self._next is not None and self.isolates:
            present = self.generators.capture()
            follow = [kind for kind in GLOBAL if kind in present and equal(present[kind], self._next[kind])]
            states["followed"] = {kind: checksum(present[kind]) for kind in follow}
        if later:
            states["later"] = [[count, listed(found)] for count, found in later]
        if self.history.overtaken:
            states["overtaken"] = True
        if self.unrecorded:
            states["unrecorded"] = True
            warnings.warn(
                f"the {self._name()} of this loader and the loop have drawn from the same generator more than "
                f"{RECORDS} times in turn in this epoch, so a position in the middle of this epoch cannot be resumed "
                "from. Use Accelerator(exact=True), give the sampler its own generator, or save between epochs.",
                stacklevel=3,
            )
        return states

    def own(self) -> States:
        """The present states that belong to the loader: its generators and its sampler's seed."""
        states = self.generators.capture_private()
        if self.seedable is not None:
            states["seed"] = self.seedable.initial_seed
        if self.history.overtaken:
            states["overtaken"] = True
        return {name: listed(state) for name, state in states.items()}

    def restore_own(self, states: States) -> None:
        """Restore what `own` has returned."""
        self.generators.restore({kind: states[kind] for kind in ("generators", "private") if kind in states})
        if "seed" in states and self.seedable is not None:
            self.seedable.initial_seed = states["seed"]
        self.history.overtaken = bool(states.get("overtaken", self.history.overtaken))

    @property
    def is_fixed(self) -> bool:
        """Whether all ranks have the same order without sharing states."""
        if self.known and self.seedable is not None:
            return self.seedable.seed_agreed
        return type(self.stream) is SequentialSampler

    # -- which states count

    def resume(self, states: States, place: StreamPosition) -> None:
        """Draw the order of an epoch that is resumed in its middle, without a draw from this process's states."""
        if states.get("unrecorded"):
            raise CheckpointError(
                "this position was saved in the middle of an epoch in which sampler and loop drew from the same "
                "generator in turn too often to be recorded, so the rest of that epoch is not known. Load a position "
                "that was saved between epochs, or call set_epoch on this loader for a new epoch."
            )
        self.states = dict(states)
        self.later = [(count, found) for count, found in self.states.pop("later", [])]
        self._followed = self.states.pop("followed", {})
        self.history.overtaken = bool(self.states.pop("overtaken", self.history.overtaken))
        self._expected = (place.consumed, place.digest)
        self.resumes = self.begun = True

    def draws_at_start(self) -> bool:
        """Whether the start of the pass has to draw what that of a torch loader draws; once in a pass."""
        draws = not (self.resumes or self.opened)
        self.opened = True
        return draws

    def isolate(self, shared: bool, equal_lengths: bool = False) -> None:
        """Separate the sampler's draws from all others.

        Args:
            shared: the ranks are shards of this order, or read the same samples: rank 0's states are used.
            equal_lengths: all ranks make equally many steps.
        """
        self.isolates = True
        self.shared = shared and is_distributed() and not self.is_fixed
        self.equal_lengths = equal_lengths

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be drawn before the present one is used."""
        return self.known or self.isolates

    @property
    def _is_plain(self) -> bool:
        """Whether the sampler draws from the process's generators, as in a plain loop."""
        return not self.isolates and (not self.resumes or self._rejoins is not None)

    @property
    def _follows(self) -> bool:
        """Whether this rank takes rank 0's states."""
        return self.shared and not self.resumes and dist.get_rank() != 0

    @property
    def _leads(self) -> bool:
        """Whether the process's generators follow the order's stream."""
        return not (self._follows or "rekeyed" in self.states)

    # -- drawing

    def open(self, start: Callable[[], Iterator[Any]], lazily: bool) -> Iterator[Any]:
        """The iterator that `start` makes, which draws the order.

        With `lazily`, `start` draws nothing before the first element. Otherwise it is called at once, as in torch.
        """
        if self.known and not self.resumes and not self.shared:
            if type(self.stream) is not SequentialSampler:
                return itertools.chain.from_iterable(self._recorded(start))
            self.begun = True
            return start()
        found = None
        if not self.resumes and not lazily:
            with self.applied():
                found = start()
        return itertools.chain.from_iterable(self._elements(start, found))

    def _recorded(self, start: Callable[[], Iterator[Any]]) -> Iterator[Iterator[Any]]:
        """The order begins with the states at its first element, and not with those at `open`."""
        self.begun = True
        self.states = self._opening()
        yield start()

    def _elements(self, start: Callable[[], Iterator[Any]], found: Iterator[Any] | None) -> Iterator[Iterable[Any]]:
        own = self.generators.capture()
        self._begin(found is not None)
        self._put_back = self._entered(own)
        if self.resumes and self.stateful is not None and "sampler" in self.states:
            self.stateful.load_state_dict(copy.deepcopy(self.states["sampler"]))
        if not self.known:
            # `paced` restores the process's states after the step.
            yield self._drawn(start() if found is None else found)
            return
        try:
            found = start()
            # These samplers draw when the first index is requested.
            first = list(itertools.islice(found, 1))
        finally:
            # The loader's own generators continue from here.
            self.generators.restore(self._put_back)
        yield first
        yield found

    def _begin(self, opened: bool) -> None:
        """Determine the states at the first element, for all ranks those of rank 0. One message for each epoch."""
        if self.resumes:
            return
        self.begun = True
        present = self._opening()
        if self.isolates and (self.history.overtaken or any(order is not self for order in _under_way)):
            # Others draw from the same generators in between, so these numbers are not used here as well.
            present["rekeyed"] = True
        if self.shared:
            present = broadcast_each(present, operation=_EPOCH_START)
            if self.seedable is not None:
                self.seedable.seed_agreed = True
        if opened:
            self.later = [(0, packed({kind: present[kind] for kind in self.generators.capture()}))]
            if "rekeyed" in present:
                self.states["rekeyed"] = True
        else:
            self.states = present

    def _entered(self, own: States) -> States:
        """Set the states at the first element. Returns the process's states that must be restored."""
        if self.resumes:
            if self.isolates:
                # Follow the stream again, if the process has the states of the saved run.
                same = {kind for kind, found in self._followed.items() if kind in own and checksum(own[kind]) == found}
                self._rejoins = same or None
            self._set(self.states)
            return _global(own)
        if not self._follows:
            return {}
        self._set(dict(self.later)[0] if self.later else self.states)
        moved = differing(own, self.generators.capture())
        return _global({kind: own[kind] for kind in moved})

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which draws use the states at the start of the order: rank 0's, or saved ones.

        The global generators of a rank with other states are restored at its end.
        """
        own = self.generators.capture()
        put_back: States = {}
        if self.resumes:
            self._set(self.states)
            put_back = _global(own)
        else:
            self.begun = True
            self.states = self._opening()
            if self.shared:
                self.states = broadcast_each(self.states, operation=_EPOCH_START)
            if self._follows:
                self._set(self.states)
                put_back = _global({kind: own[kind] for kind in differing(own, self.generators.capture())})
        try:
            yield
        finally:
            self.generators.restore(put_back)

    def _drawn(self, found: Iterator[Any]) -> Iterator[Any]:
        """The elements of an order. Before some of them saved states are set, or the order is verified."""
        self._finished = isinstance(found, FINISHED)
        if not self.resumes and (self._finished or "rekeyed" not in self.states):
            return self._counted(found)
        return self._with_due(found)

    def _with_due(self, found: Iterator[Any]) -> Iterator[Any]:
        due: list[tuple[int, Callable[[], None]]] = []
        if self.resumes:
            due += [(count, self._setter(count, states)) for count, states in self.later]
            due.append((self._expected[0], self._verify))
        if self.states.get("rekeyed") and not self._finished:
            due.append((1, self._rekey))
        for count, act in sorted(due, key=operator.itemgetter(0)):
            yield from self._counted(itertools.islice(found, max(0, count - self.drawn)))
            if self.drawn >= count or act == self._verify:
                act()
        yield from self._counted(found)

    def _counted(self, elements: Iterator[Any]) -> Iterator[Any]:
        if self.stream is None:
            for element in elements:
                self.drawn += 1
                yield element
            return
        keep = self._ahead.append
        for element in elements:
            self.drawn += 1
            keep(element)
            yield element

    def _setter(self, count: int, states: States) -> Callable[[], None]:
        def set_states() -> None:
            self._set(states)
            if count and not self.isolates:
                self._rejoin(states)

        return set_states

    def _rejoin(self, states: States) -> None:
        """Continue as a plain loop if the process's generators have the states of the saved run."""
        present = self.generators.capture()
        kinds = {kind for kind in states if kind in present}
        same = all(equal(self._put_back[kind], present[kind]) for kind in kinds if kind in self._put_back)
        self._rejoins = kinds if kinds and same else None

    def _rekey(self) -> None:
        """From the second element on, use a separate stream of random numbers."""
        present = self.generators.capture()
        self._put_back = {**_global(present), **self._put_back}
        self.generators.restore(derived(present))

    def _set(self, states: States) -> None:
        self.generators.restore(states)
        if "seed" in states and self.seedable is not None:
            self.seedable.initial_seed = states["seed"]

    def _verify(self) -> None:
        """Raise CheckpointError where the order up to the position is not that of the saved run."""
        consumed, digest = self._expected
        if self.stream is None or digest is None:
            return
        if self.drawn < consumed or extended(self._digest, self._ahead[: consumed - self._place]) != digest:
            raise CheckpointError(
                f"the order of this epoch cannot be drawn again: after {consumed} elements the {self._name()} gives "
                "other ones than in the run that saved this position, so samples would be lost or repeated. It draws "
                "from something that is not part of a position (a file, the clock, a generator that it creates "
                "without a seed), or it has changed. Give it a seeded generator as an attribute, or seed it from the "
                "epoch in `set_epoch`. To continue without the rest of this epoch, call set_epoch with the next one "
                "after loading."
            )

    def paced(self, steps: Iterator[ShardStep]) -> Iterator[ShardStep]:
        """`steps` that consist of elements of this order, each drawn with the states of the order."""
        return steps if self.known else self._paced(steps)

    def _paced(self, steps: Iterator[ShardStep]) -> Iterator[ShardStep]:
        _under_way.add(self)
        number = 0
        try:
            while True:
                step = self._next_step(steps)
                number += 1
                if self.shared and (number == 1 or (step is None and self.equal_lengths)):
                    self._compare()
                if step is None:
                    return
                if self.stream is not None:
                    self._place_step(step)
                yield step
        finally:
            _under_way.discard(self)

    def _next_step(self, steps: Iterator[ShardStep]) -> ShardStep | None:
        if self._finished:
            return next(steps, None)
        before = self.generators.capture()
        if not self._is_plain:
            return self._next_isolated(steps, before)
        count = self.drawn
        step = next(steps, None)
        after = self.generators.capture()
        if after is not before or self._next is None:
            self._record(count, before, after)
        return step

    def _record(self, count: int, before: States, after: States) -> None:
        """Record the states before a draw where a resumed run would have other ones."""
        used = differing(before, after)
        self._used.update(used)
        if self._next is None:
            self._next = after
            return
        changed = {kind: before[kind] for kind in used if not equal(before[kind], self._next[kind])}
        if changed and len(self.later) >= RECORDS:
            self.unrecorded = True
        elif changed:
            self.later.append((count, packed(changed)))
        self._next = {**self._next, **{kind: after[kind] for kind in used}}

    def _next_isolated(self, steps: Iterator[ShardStep], before: States) -> ShardStep | None:
        start = self._next
        if start is not None:
            moved = differing(before, start)
            self._put_back = {kind: before[kind] for kind in moved}
            self.generators.restore({kind: start[kind] for kind in moved})
        try:
            return next(steps, None)
        finally:
            self._next = self.generators.capture()
            if start is not None and self._leads and not self.history.overtaken:
                self.history.overtaken = any(kind in self._put_back for kind in differing(start, self._next))
            if self._rejoins is not None:
                self._put_back = {kind: own for kind, own in self._put_back.items() if kind not in self._rejoins}
                self._used |= self._rejoins
                if self.isolates:
                    self._rejoins = None
            self.generators.restore(self._put_back)

    def _place_step(self, step: ShardStep) -> None:
        """Add the checksum of the order up to `step` to its position."""
        assert isinstance(step.position, int)
        count = step.position - self._place
        self._digest = extended(self._digest, self._ahead[:count])
        del self._ahead[:count]
        self._place = step.position
        step.position = StreamPosition(step.position, digest=self._digest)

    def _compare(self) -> None:
        """Raise PrepareError on every rank where the ranks have drawn different orders."""
        if self.stream is None:
            return
        digest = extended(self._digest, self._ahead)
        rows = transport.all_gather_numbers(
            [self.drawn, digest], transport.group_of(None), signature(_COMPARISON.operation), _COMPARISON
        )
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            raise PrepareError(
                f"rank {others[0]} draws another order than rank 0 (within the first {rows[0][0]} elements), although "
                f"both start with rank 0's random states: the {self._name()} draws from something else (a file, the "
                "clock, a generator that it creates without a seed, this process's rank), so samples would be lost or "
                "repeated. Let it draw from the global generators of torch, Python or NumPy, give it a seeded "
                "generator as an attribute, or seed it from the epoch in `set_epoch`. Or let rank 0 draw for all "
                "ranks: dispatch_batches=True."
            )

    def _name(self) -> str:
        return "dataset" if self.stream is None else type(self.stream).__name__

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A context that restores torch's global generator at its end if an epoch is resumed."""
        state = torch.get_rng_state() if self.resumes else None
        yield
        if state is not None:
            torch.set_rng_state(state)


def draw_worker_seed(generator: torch.Generator | None) -> int:
    """The number that torch's loader draws at the start of every pass, needed or not."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def is_distributed() -> bool:
    """Whether there is a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _global(states: States) -> States:
    return {kind: state for kind, state in states.items() if kind in GLOBAL}

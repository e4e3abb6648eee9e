# SPDX-License-Identifier: Apache-2.0
"""`StepExchange`, the one way in which ranks tell each other something inside of a training loop.

It is counted in optimizer steps that synchronize gradients, which all ranks make together, never in local batches.
Three parts of a run use it:

- `items`: at the end of an accumulation window with `num_items`, the sum of the counts.
- `step`: before a step with `non_finite`, whether a rank has a value that is not finite. Where signals stop the run,
  the message has the signal that a rank has received too. Without `non_finite`, signals are exchanged after every few
  steps.
- `stop`: before the save with which a run ends, the time that is left.
- `cause`: when a step is left out, what is not finite on which ranks.

Outside of steps the ranks need not do the same: one may evaluate alone. A signal reaches the other ranks by the thread
of the hang watch there, and `meet_to_stop` finds out whether all ranks are where they can stop together.

As long as all ranks make the same steps, what a step waits for is one collective, and the rest goes through the store.
Inside of a block in which ranks run out of batches (`join_uneven_inputs`), everything goes through the store: a
collective would meet those by which torch's `Join` answers for a rank that has left. A rank announces that it leaves,
and the others do not wait for it any more. What each rank sends does not grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import CommunicationError
from . import hang_watch
from .agreement import Process, Round, StoreLostError, default_connection, pauses

logger: logging.Logger = logging.getLogger(__name__)

# Steps between two exchanges of signals, at most, and the seconds that these steps should take.
INTERVAL, _SECONDS = 8, 0.25
# Seconds that a rank waits for the signals of the others. If one does not come, the next exchange decides.
_PATIENCE = 60.0
# Seconds that a rank waits for a value that its step needs.
_LIMIT = 1800.0

# Seconds that the end of a process takes, and in which a rank learns of the signal of another one.
_ENDING, _SPREAD = 0.3, 5.0

# What a rank has received whose program calls `request_stop`, and its number among those of the signals.
REQUEST, _REQUEST_NUMBER = "request_stop()", 127

# The rounds in the store while all ranks make the same steps. A block in which ranks leave has rounds of its own.
_NAME = "step"

Reduce = Callable[[dict[int, Any]], Any]


class StepExchange:
    """What the ranks of a run exchange in its loops. All ranks make the same calls in the same order.

    Args:
        process: who this process is.
        interval: the largest number of steps between two exchanges of signals.

    Attributes:
        received: the name of a signal that this rank has received, or `REQUEST`.
        agreed: the same of some rank; all ranks know it since the same step.
        is_watching: whether `step` exchanges signals.
        is_uneven: whether the ranks are in a block that they end at different steps.
        is_busy: whether this rank is in an exchange through the store.
        is_spread: whether the other ranks can know of the signal.
        on_spread: called in another thread when they can.
        position: how many blocks in which ranks leave have begun or ended, and the steps since then.
        deadline: when the run has to have ended, in seconds of `time.monotonic`, once there is a signal.
    """

    def __init__(self, process: Process, interval: int = INTERVAL) -> None:
        self.received: str | None = None
        self.agreed: str | None = None
        self.is_watching: bool = False
        self.is_spread: bool = process.num_processes == 1
        self.on_spread: Callable[[], object] | None = None
        self.position: tuple[int, int] = (0, 0)
        self.deadline: float = math.inf
        self.is_busy: bool = False
        self._world = process.num_processes
        self._interval = interval
        self._reductions: dict[str, Reduce] = {"items": _total, "step": _step, "stop": _time}
        # Signals were exchanged with the decision about a step.
        self._has_exchanged = False
        self._steps_left = self._steps_between = 1  # exchanges of signals
        self._last_exchange: float | None = None
        # Where ranks may leave: how many have, before the present round.
        self.is_uneven: bool = False
        self._absent = 0
        self._name = _NAME
        # The rounds in which ranks meet to stop.
        self._stop = ""

    def register(self, subject: str, reduce: Reduce) -> None:
        """Add a subject for `collect`. Every rank does it, also one that never has a value of it."""
        self._reductions[subject] = reduce

    # -- what a step waits for

    def sum_items(
        self, count: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Callable[[], torch.Tensor]:
        """Begin to sum a count over the ranks of a group. Returns a function that waits for the sum."""
        if self.is_uneven:
            return lambda: torch.full_like(count, self._meet("items", float(count)))
        total = count.clone()
        work = dist.all_reduce(total, group=group, async_op=True)

        def wait() -> torch.Tensor:
            if work is not None:
                work.wait()
            return total

        return wait

    def any_rank(self, flag: torch.Tensor) -> bool:
        """Whether the number of some rank is more than 0. The message has the signals too."""
        if self._world == 1:
            return bool(flag.item())
        number = _number(self.received)
        if self.is_uneven:
            largest, number, _ = self._meet("step", [float(flag), number, 1])
        elif self.is_watching:
            message = torch.stack((flag, torch.full_like(flag, number)))
            dist.all_reduce(message, op=dist.ReduceOp.MAX)
            largest, number = message.tolist()
        else:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            largest = flag.item()
        self._has_exchanged = True
        self._agree(int(number))
        return bool(largest)

    def collect(self, subject: str, value: object) -> Any:
        """What the registered reduction makes of {rank: value} on one rank. The values are plain JSON data."""
        if self._world == 1:
            return self._reductions[subject]({0: value})
        return self._meet(subject, value)

    # -- signals

    def watch(self) -> None:
        """Exchange signals from here on. Every rank calls it."""
        self.is_watching = True
        if self._world > 1 and self.spread not in hang_watch.on_glance:
            rounds = default_connection().rounds
            self._stop = f"stop{rounds.get('watch', 0)}"
            rounds["watch"] = rounds.get("watch", 0) + 1
            hang_watch.on_glance.append(self.spread)

    def end_watch(self) -> None:
        """Exchange signals no longer."""
        self.is_watching = False
        if self.spread in hang_watch.on_glance:
            hang_watch.on_glance.remove(self.spread)

    def spread(self, store: dist.Store) -> None:
        """Tell the other ranks of a signal that this one has received, or learn of theirs."""
        if self.is_spread:
            return
        key = f"agree/{self._stop}"
        if not store.check([key]):
            if self.received is not None:
                left = self.deadline - time.monotonic()
                store.set(key, json.dumps([self.received, left, time.time() + left]))
            # The others look meanwhile.
            return
        if self.received is None:
            name, left, end = json.loads(store.get(key))
            by_clock = end - time.time()
            if abs(by_clock - left) < _SPREAD:
                # The ranks end at the same time: none reports that it has lost another one.
                left = by_clock
            self.deadline = time.monotonic() + left
            self.received = name
        self.is_spread = True
        if self.on_spread is not None:
            self.on_spread()

    def meet_to_stop(self, position: list[int], patience: float) -> bool:
        """Whether all ranks have come, at one position of the run: then they have agreed to stop there.

        A rank that has gone on may wait for this one in a collective. So the first rank whose patience ends calls the
        meeting off for all. Where the positions differ, the ranks behind go on, and the others wait for them.

        Args:
            position: numbers that grow during the run.
            patience: seconds.
        """
        if self._world == 1:
            return self.is_agreed
        self.is_busy = True
        try:
            return self._meet_at(position, patience)
        finally:
            self.is_busy = False

    def _meet_at(self, position: list[int], patience: float) -> bool:
        begin = time.monotonic()
        while True:
            meeting = Round(self._stop)
            came = meeting.put([position, _number(self.received)])
            is_called_off = meeting.store.check([meeting.key("outcome")])
            if came == self._world and not is_called_off:
                positions, numbers = zip(*meeting.values(meeting.ranks).values(), strict=True)
                is_same = positions.count(position) == self._world
                meeting.settle({"result": [max(positions), is_same, max(numbers)]})
            limit = begin + patience - time.monotonic()
            for waited in pauses(self._world, limit):
                if meeting.store.check([meeting.key("outcome")]):
                    break
                if waited >= limit:
                    meeting.settle({"absent": "a rank"})
            result = meeting.outcome().result
            if result is not None:
                furthest, is_same, number = result
                if is_same:
                    self.agreed = _name(number)
                    return True
                if position < furthest:
                    return False
            if time.monotonic() >= begin + patience:
                return False

    @property
    def seconds_left(self) -> float:
        """Until the process has to end, so that it has ended at the deadline."""
        return self.deadline - time.monotonic() - _ENDING

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks know of a signal. One process knows it at once."""
        if self._world == 1:
            self.agreed = self.received
        return self.agreed is not None

    def step(self) -> None:
        """Count a step. Every few steps the ranks exchange which of them have received a signal."""
        blocks, steps = self.position
        self.position = blocks, steps + 1
        if self.is_agreed or self._world == 1:
            return
        if self._has_exchanged:
            self._has_exchanged = False
            return
        self._steps_left -= 1
        if self._steps_left:
            return
        now = time.perf_counter()
        interval = 1
        if self._last_exchange is not None:
            seconds = (now - self._last_exchange) / self._steps_between
            interval = max(1, min(self._interval, int(_SECONDS / seconds)))
        result = self._meet("step", [0, _number(self.received), interval], _PATIENCE)
        if result is None:
            interval = self._interval
        else:
            _, number, interval = result
            self._agree(number)
        self._last_exchange = now
        self._steps_left = self._steps_between = interval

    def _agree(self, number: int) -> None:
        # A rank that has left the loop cannot stop at this step.
        if number and not self._absent:
            self.agreed = _name(number)

    # -- unequal numbers of batches

    @contextlib.contextmanager
    def uneven(self, joined: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """A block that ranks end at different steps.

        Args:
            joined: entered around the block. Its end waits for all ranks.
        """
        if self._world == 1:
            with joined:
                yield
            return
        rounds = default_connection().rounds
        block = rounds.get("uneven", 0)
        rounds["uneven"] = block + 1
        self._begin(f"uneven{block}")
        try:
            with joined:
                yield
                self._leave()
        finally:
            self._begin(_NAME)

    def _begin(self, name: str) -> None:
        self._name = name
        self.is_uneven = name != _NAME
        self._absent = 0
        self.position = self.position[0] + 1, 0
        self._has_exchanged = False
        self._steps_left, self._last_exchange = 1, None

    def _leave(self) -> None:
        """Announce that this rank does not come to the next round, nor to any later one of the block."""
        meeting = Round(self._name)
        absent = self._absent + int(meeting.store.add(meeting.key("left"), 1))
        came = int(meeting.store.add(meeting.key("came"), 0))
        if came and came + absent == self._world:
            self._conclude(meeting, absent)

    # -- a round through the store

    def _meet(self, subject: str, value: object, limit: float = _LIMIT) -> Any:
        """Give a value, and wait until all ranks have come that have not left. Returns the reduction of the values.

        None if a rank has not come within the limit of an exchange of signals.
        """
        self.is_busy = True
        meeting = Round(self._name)
        try:
            came, absent = meeting.put([subject, value]), self._absent
            if self.is_uneven:
                absent += int(meeting.store.add(meeting.key("left"), 0))
            if came + absent == self._world:
                # Nobody comes after this rank. If another one leaves at this moment, both conclude, with one result.
                self._conclude(meeting, absent)
            else:
                for _ in meeting.waits(f"the exchange of {subject}", limit):
                    pass
            outcome = meeting.outcome()
        except (RuntimeError, ConnectionError) as error:
            raise StoreLostError(str(error)) from error
        finally:
            self.is_busy = False
        if outcome.refused is not None:
            raise CommunicationError(outcome.refused)
        if outcome.result is None:
            missing = outcome.absent or "a rank"
            if limit != _PATIENCE:
                raise CommunicationError(
                    f"{missing} did not reach the exchange of {subject} in an optimizer step"
                )
            logger.warning(
                "%s did not reach the exchange of signals within %.0f s: the next exchange decides",
                missing,
                outcome.waited,
            )
            return None
        result, self._absent = outcome.result
        return result

    def _conclude(self, meeting: Round, absent: int) -> None:
        """Write what the values of all ranks come to that have not left, unless another rank has."""
        if meeting.store.check([meeting.key("outcome")]):
            return
        ranks = meeting.ranks
        if absent:
            left = set(meeting.absent())
            ranks = [rank for rank in ranks if rank not in left]
        subjects = set()
        values = {}
        for rank, (subject, value) in meeting.values(ranks).items():
            subjects.add(subject)
            values[rank] = value
        if len(subjects) == 1:
            reduce = self._reductions[subjects.pop()]
            meeting.settle({"result": [reduce(values), absent]})
        else:
            words = " and ".join(sorted(subjects))
            meeting.settle({"refused": f"the ranks exchange {words} in the same step"})
        if meeting.number:
            # All ranks that have not left are in this round, so none looks at the one before.
            for name in ("outcome", "came", "left"):
                meeting.store.delete_key(meeting.key(name, back=1))


def _number(name: str | None) -> int:
    if name is None:
        return 0
    if name == REQUEST:
        return _REQUEST_NUMBER
    return int(signal.Signals[name])


def _name(number: int) -> str:
    if number == _REQUEST_NUMBER:
        return REQUEST
    return signal.Signals(number).name


def _total(counts: Mapping[int, float]) -> float:
    return sum(counts.values())


def _step(rows: Mapping[int, list[Any]]) -> list[Any]:
    flags, numbers, intervals = zip(*rows.values(), strict=True)
    return [max(flags), max(numbers), min(intervals)]


def _time(rows: Mapping[int, list[float]]) -> list[float]:
    left, needed, shares = zip(*rows.values(), strict=True)
    return [min(left), max(needed), max(shares)]

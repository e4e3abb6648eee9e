# SPDX-License-Identifier: Apache-2.0
"""Preemption: where a run stops after a signal, what it saves, and what happens when the time is short.

`checkpointing.preemption` records the signals, and `runtime.step_exchange` tells the other ranks.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..checkpointing.preemption import PreemptionWatch
from ..checkpointing.run_state import GlobalGenerators, host_generators, torch_generators
from ..core.errors import ConfigurationError
from ..core.trees import leaves
from ..data_loader.loader import PreparedLoader
from ..gradient_state import GradientState
from ..logging import MultiProcessAdapter, get_logger
from ..runtime import marks
from ..runtime.agreement import Process, pauses
from ..runtime.calls import LEDGER
from ..runtime.step_exchange import REQUEST

if TYPE_CHECKING:
    from .checkpoints import RunCheckpoints

logger: MultiProcessAdapter = get_logger(__name__)

# Seconds that a rank waits for the others when it first can stop in an evaluation: until they know of the signal.
_PATIENCE = 0.5
# The time that has to be left for a save: a multiple of that of the last one, and seconds.
_SAFETY, _LEAST = 1.5, 1.5
# Seconds between two looks at the time that is left.
_LOOK = 0.1
# The most steps between two notes of the generators of Python and NumPy.
_MOST_STEPS = 64


class StepGenerators:
    """The random generators as they were after the last step.

    The states of Python's and NumPy's take 40 us to read, and a training loop seldom uses them. As long as they do not
    change, they are read after few steps: if they still are what was noted, they were so after the last step too.
    """

    def __init__(self) -> None:
        self._torch: dict[str, Any] | None = None
        self._host: dict[str, Any] = {}
        self._interval = self._steps_left = 1

    def note(self) -> None:
        """Note the generators after a step."""
        self._torch = torch_generators()
        self._steps_left -= 1
        if self._steps_left:
            return
        if self._is_unchanged():
            self._interval = min(2 * self._interval, _MOST_STEPS)
        else:
            self._interval = 1
            self._host = host_generators()
        self._steps_left = self._interval

    def forget(self) -> None:
        """The generators after the last step are not noted."""
        self._torch = None

    @property
    def are_known(self) -> bool:
        """Whether they can be restored."""
        if self._torch is None:
            return False
        return self._steps_left == self._interval or self._is_unchanged()

    def restore(self) -> None:
        """Set the generators to what they were after the last step. They have to be known."""
        GlobalGenerators().load_state_dict({**self._host, **(self._torch or {})})

    def _is_unchanged(self) -> bool:
        return pickle.dumps(host_generators()) == pickle.dumps(self._host)


class StopController:
    """Stops a run where its state is whole, if a signal requests it.

    A run stops between two batches of the loaders that it trains on. It also stops at the batches and collectives of
    an evaluation, if all ranks meet there, and before its first step. Where there is only the time for a save left,
    another thread saves the state of the last step from within the present one.

    Args:
        checkpoints: saves the run, and knows its loaders. The reference is weak, so that a run is freed with its last
            reference.
    """

    def __init__(self, checkpoints: RunCheckpoints) -> None:
        self._checkpoints = weakref.ref(checkpoints)
        self._loaders = checkpoints.controller
        self._exchange = checkpoints.exchange
        # Of a run that a signal has stopped; None: 128 plus its number.
        self.exit_code: int | None = None
        self._watch: PreemptionWatch | None = None
        self._is_limited = False
        # Whether a batch to train on was read, and the loop is not done with it. How many steps of optimizers and
        # schedulers there were when it was read, and how many the loop makes in a batch.
        self._is_in_batch = False
        self._steps_at_batch = self._steps_of_batch = 0
        self._is_stopping = False
        # Whether an optimizer steps.
        self.is_in_step: bool = False
        # With a deadline: the generators before the last batch to train on, unless it is within a window.
        self._generators = StepGenerators()
        # The thread that saves from within a step, and whether the main thread waits for it.
        self._saver: threading.Thread | None = None
        self._is_paused = False
        # Whether it has begun to save.
        self.is_interrupting: bool = False
        # When the last meeting in an evaluation has ended.
        self._last_meeting: float | None = None

    # -- signals

    def watch_signals(self, process: Process, signals: Sequence[str]) -> None:
        """From here on the run stops when one of `signals` has reached any process. Not from another thread."""
        if self._watch is not None or threading.current_thread() is not threading.main_thread():
            return
        self._watch = PreemptionWatch(
            process, signals, exchange=self._exchange, on_signal=self._handle
        )
        self._is_limited = self._watch.is_limited
        if self._is_limited:
            threading.Thread(
                target=self._watch_deadline, name="accelerate-deadline", daemon=True
            ).start()

    def request_stop(self) -> None:
        """Stop the run as on a signal to this process."""
        if self._watch is None:
            raise ConfigurationError(
                "request_stop() needs an earlier accelerator.resume() or "
                "Accelerator(resume='auto') on every process, from which the processes agree on "
                "a step"
            )
        self._watch.receive(REQUEST)

    def _handle(self) -> None:
        """Act on a signal. The main thread may be anywhere, as in a compilation."""
        checkpoints = self._checkpoints()
        if checkpoints is None:
            return
        self._end_before_first_step(checkpoints)
        saver = self._saver
        if saver is not None and not self._is_paused:
            self._is_paused = True
            saver.join()
            self._is_paused = False

    def close(self) -> None:
        """Restore the handlers of the signals."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # -- places to stop at

    def record_step(self) -> None:
        """An optimizer steps."""
        checkpoints = self._checkpoints()
        if self._loaders.record_step() and checkpoints is not None:
            self._begin_batch(checkpoints)

    def begin_batch(self, loader: object) -> None:
        """A loader is about to yield a batch."""
        checkpoints = self._checkpoints()
        # Where it is None the run was freed, and one of its loaders is still being read.
        if checkpoints is None:
            return
        self._end_before_first_step(checkpoints)
        if self._loaders.is_trained(loader):
            self._begin_batch(checkpoints)

    def _begin_batch(self, checkpoints: RunCheckpoints) -> None:
        self._is_in_batch = True
        self._steps_at_batch = _count_steps(checkpoints)

    def end_batch(self, loader: object) -> None:
        """The loop is done with a batch of a loader. Stop the run here, if a signal requests it."""
        checkpoints = self._checkpoints()
        if checkpoints is None:
            return
        if not self._loaders.is_trained(loader):
            self.stop_if_whole()
            return
        if self._is_in_batch:
            steps = _count_steps(checkpoints) - self._steps_at_batch
            self._steps_of_batch = max(self._steps_of_batch, steps)
            self._is_in_batch = False
            if checkpoints.accumulation.is_unfinished:
                self._generators.forget()
            elif self._is_limited:
                self._generators.note()
        if self._exchange.is_agreed:
            self._stop(checkpoints)

    def stop_if_whole(self) -> None:
        """Stop the run in an evaluation, if a signal requests it and all ranks are at the same position."""
        checkpoints = self._checkpoints()
        if self._exchange.received is None or self._is_stopping or checkpoints is None:
            return
        position = self._position(checkpoints)
        if position is None:
            return
        # A rank that does not come may wait for this one. The others need about as long from one batch to the next.
        patience = _PATIENCE
        if self._last_meeting is not None:
            patience = time.monotonic() - self._last_meeting
        if self._exchange.meet_to_stop(position, patience):
            self._stop(checkpoints)
        self._last_meeting = time.monotonic()

    def _position(self, checkpoints: RunCheckpoints) -> list[int] | None:
        """Where the run is, if its state is whole outside of its training loop; else None.

        It is whole in an evaluation that follows a step, and between two passes.
        """
        objects = checkpoints.objects
        if any(prepared.inner.training for prepared in objects.models):
            return None
        if any(average.is_applied for average in objects.averages):
            return None
        if self._is_in_batch:
            # All steps of the batch have to be made.
            steps = _count_steps(checkpoints) - self._steps_at_batch
            if steps == 0 or steps < self._steps_of_batch:
                return None
        # Where forwards communicate, the ranks have to have read as many batches.
        batches = 0
        if any(prepared.is_partial for prepared in objects.models):
            batches = marks.batches_read()
        elif self._exchange.is_uneven:
            batches = getattr(GradientState().active_dataloader, "batches_read", 0)
        return [*self._steps_and_calls(checkpoints), batches]

    def _steps_and_calls(self, checkpoints: RunCheckpoints) -> list[int]:
        """Optimizer steps, epoch, and collectives of this package."""
        epoch = int(getattr(checkpoints.controller.main_loader, "iteration", 0))
        return [*self._exchange.position, epoch, LEDGER.count]

    def _end_before_first_step(self, checkpoints: RunCheckpoints) -> None:
        """End this process, if a signal has come and the other ranks know of it, and there is nothing to save."""
        name = self._exchange.received
        if self._loaders.has_stepped or name is None or not self._exchange.is_spread:
            return
        logger.warning(
            f"stop requested by {name} before the first step: there is nothing to save. "
            f"{checkpoints.age_of_newest()}"
        )
        raise SystemExit(self._exit_code(name))

    # -- the end

    def _stop(self, checkpoints: RunCheckpoints) -> None:
        """Save what the time allows, and end this process. Every rank calls it at the same position of the run."""
        self._is_stopping = True
        for loader in GradientState().dataloader_references:
            if isinstance(loader, PreparedLoader) and not self._loaders.is_trained(loader):
                # A resumed run continues after the evaluation.
                loader.leave_out_rest()
        name = self._exchange.agreed
        assert name is not None
        # A save in the background is complete first.
        checkpoints.wait_for_writer()
        left, needed, share = self._exchange.collect(
            "stop",
            [self._exchange.seconds_left, checkpoints.save_seconds, _brief_share(checkpoints)],
        )
        least = needed * share
        if left < least:
            logger.warning(
                f"stop requested by {name}: not saved, because {left:.1f} s are left and a save "
                f"takes {least:.1f} s. {checkpoints.age_of_newest()}"
            )
        else:
            is_brief = left < needed
            with torch.inference_mode(False):
                folder = checkpoints.save(is_numbered=True, is_brief=is_brief)
            without = ""
            if is_brief:
                without = (
                    f" without averages and unfinished gradients, because {left:.1f} s were left "
                    f"and a full save takes {needed:.1f} s"
                )
            logger.warning(f"stop requested by {name}: saved {folder}{without}")
        checkpoints.trackers.finish()
        # A launcher stops the other ranks as soon as one has ended with an error code.
        if self.is_interrupting:
            self._exchange.collect("stop", [0.0, 0.0, 0.0])
            _exit(self._exit_code(name))
        checkpoints.state.wait_for_everyone()
        checkpoints.end_training()
        raise SystemExit(self._exit_code(name))

    def _exit_code(self, name: str) -> int:
        if self.exit_code is not None:
            return self.exit_code
        if name == REQUEST:
            return 128 + signal.SIGTERM
        return 128 + signal.Signals[name]

    # -- a deadline

    def _watch_deadline(self) -> None:
        """Save from within a step where the time is short, and end this process at the deadline. This is a thread."""
        while self._watch is not None:
            left = self._exchange.seconds_left
            name = self._exchange.received
            checkpoints = self._checkpoints()
            if name is not None and checkpoints is not None:
                if left <= 0:
                    what = "the ranks did not reach a point where all of them can save"
                    if self._is_stopping:
                        what = "the save is incomplete"
                    logger.warning(
                        f"stop requested by {name}: time ran out, and {what}. "
                        f"{checkpoints.age_of_newest()}"
                    )
                    # It may be in a collective that no other rank comes to.
                    _exit(self._exit_code(name))
                is_urgent = left <= _SAFETY * checkpoints.save_seconds + _LEAST
                if is_urgent and self._saver is None:
                    # A thread has none of torch's modes that are on in the main one.
                    self._saver = threading.Thread(target=self._save_within_step, daemon=True)
                    self._saver.start()
            del checkpoints
            time.sleep(min(max(left, 0.01), _LOOK))

    def _save_within_step(self) -> None:
        """Save and end the process, if the state is whole on all ranks. This is another thread."""
        checkpoints = self._checkpoints()
        if checkpoints is not None and self._is_interrupted():
            self._save_last_step(checkpoints)
        self._saver = None

    def _is_interrupted(self) -> bool:
        """Interrupt the main thread where it can be."""
        if self._watch is None or not self._watch.notify():
            return False
        # It waits for this thread then. It may also be in a collective for which another rank does not come, and waits
        # as soon as that returns.
        for waited in pauses():
            if self._is_paused or waited > _PATIENCE:
                break
        return not (self._is_stopping or self._exchange.is_busy)

    def _save_last_step(self, checkpoints: RunCheckpoints) -> None:
        if checkpoints.is_saving or not checkpoints.can_interrupt:
            return
        position = self._position(checkpoints)
        loader = None
        if position is None:
            loader = self._batch_loader(checkpoints)
            if loader is None:
                return
            position = [*self._steps_and_calls(checkpoints), loader.batches_read]
        if self._exchange.meet_to_stop(position, self._exchange.seconds_left / 2):
            self.is_interrupting = True
            if loader is not None:
                # The batch is read again.
                self._generators.restore()
                loader.return_batch()
            self._stop(checkpoints)

    def _batch_loader(self, checkpoints: RunCheckpoints) -> PreparedLoader | None:
        """The loader whose batch the loop has, if the state is that of the step before it; else None."""
        has_stepped = self.is_in_step or _count_steps(checkpoints) != self._steps_at_batch
        # Of a run that steps in its backwards, none are seen.
        if has_stepped or not self._steps_of_batch or not self._generators.are_known:
            return None
        loaders = [loader for loader in self._loaders.trained_loaders if loader.is_being_read]
        if self._is_in_batch and len(loaders) == 1 and loaders[0].can_return:
            return loaders[0]
        return None


def _count_steps(checkpoints: RunCheckpoints) -> int:
    """The steps of optimizers and schedulers so far."""
    objects = checkpoints.objects
    steps = sum(optimizer.steps_made for optimizer in objects.optimizers)
    for scheduler in objects.schedulers:
        # Packages add schedulers of torch to the list themselves.
        wrapped = getattr(scheduler, "scheduler", scheduler)
        steps += getattr(wrapped, "last_epoch", 0)
    return steps


def _brief_share(checkpoints: RunCheckpoints) -> float:
    """About what share of a checkpoint is neither averages nor unfinished gradients."""
    objects = checkpoints.objects
    weights = 0
    for prepared in objects.models:
        weights += sum(p.numel() * p.element_size() for p in prepared.inner.parameters())
    kept = weights
    for optimizer in objects.optimizers:
        tensors = [value for value in leaves(dict(optimizer.state)) if torch.is_tensor(value)]
        kept += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    left_out = weights * len(objects.averages)
    if checkpoints.accumulation.is_unfinished:
        left_out += weights
    return kept / max(kept + left_out, 1)


def _exit(code: int) -> NoReturn:
    """End the process from another thread than the main one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

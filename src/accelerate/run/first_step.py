# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's first two optimizer steps: what would train wrongly without an error is logged once.

Only what needs no guess is reported. The observer removes itself with the second step. Between the ranks each one
compares short texts with those of the rank that came first, through the store: no rank waits for another.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..core.errors import PrepareError
from ..core.observers import RunObserver
from ..core.stacks import user_line
from ..core.trees import leaves
from ..logging import MultiProcessAdapter, get_logger
from ..optimizer import AcceleratedOptimizer, parameters_of
from ..parallel.gradients import local
from ..runtime import marks
from ..state import GradientState
from ..torch_internals.compiled import has_compiled_regions, uncompiled
from .checkpoints import RunCheckpoints

logger: MultiProcessAdapter = get_logger(__name__)

# Backwards after which the checks end: to look at a loss waits for the device.
_BACKWARDS = 64
# Elements of each tensor of a batch that are compared between ranks.
_ELEMENTS = 1024
# Steps after which parameters of no prepared model that differ are reported: a script that averages them has done so.
_ALONE = 16
# By how much factors may differ, relative to them, and be the same one.
_FACTOR_TOLERANCE = 1e-2
_UNPREPARED_EFFECT = (
    "so it steps at every batch of an accumulation window and without the fp16 scaler"
)


class FirstStepCheck(RunObserver):
    """Logs a warning for what is wrong in the first steps of a run, each message once in the run.

    Args:
        run: with the prepared objects, the layout and the observers. The reference is weak, since optimizers refer to
            the observers.
    """

    # Those of this process that have not ended. Hooks of torch call them: one before each step of any optimizer, and
    # one before each forward of a prepared model.
    _running: ClassVar[weakref.WeakSet[FirstStepCheck]] = weakref.WeakSet()
    _hook: ClassVar[RemovableHandle | None] = None
    # By how many runs an optimizer was prepared: a step of one that several have may be that of another run.
    _prepared: ClassVar[weakref.WeakKeyDictionary[torch.optim.Optimizer, int]] = (
        weakref.WeakKeyDictionary()
    )
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, run: RunCheckpoints) -> None:
        self._run = weakref.ref(run)
        # All ranks make the same runs in the same order.
        self._key = f"accelerate/first_step/{next(self._numbers)}"
        self._logged: set[str] = set()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        # by the last backward
        self._reached: weakref.WeakSet[AcceleratedOptimizer] = weakref.WeakSet()
        # Elements of an optimizer's gradients after the last backward, and the checksum before its first step of
        # parameters that no prepared model has.
        self._gradients: weakref.WeakKeyDictionary[AcceleratedOptimizer, list[float]] = (
            weakref.WeakKeyDictionary()
        )
        self._foreign: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._backwards = 0
        self._is_in_backward = self._is_in_step = False
        self._stepped_too_early = self._has_infinite_loss = False
        self._batch: int | None = None
        self._forward_hooks: list[RemovableHandle] = []
        self._running.add(self)
        if FirstStepCheck._hook is None:
            FirstStepCheck._hook = register_optimizer_step_pre_hook(_before_any_step)

    # -- the events

    def after_prepare(self, prepared: Any) -> None:
        """Look at the first batches of a prepared model, and count the runs that have an optimizer."""
        if isinstance(prepared, AcceleratedOptimizer):
            self._prepared[prepared.optimizer] = self._prepared.get(prepared.optimizer, 0) + 1
            return
        is_compiled = uncompiled(prepared.module) is not prepared.module
        is_compiled = is_compiled or has_compiled_regions(nn.ModuleList([prepared.module]))
        # A hook on a compiled model would have it compiled again without the hook.
        if self._count_shards() > 1 and not is_compiled:
            handle = prepared.module.register_forward_pre_hook(_before_forward, with_kwargs=True)
            self._forward_hooks.append(handle)

    def before_backward(self, loss: Any, num_items: Any) -> None:
        """Count the backwards, and compare what was trained on in the first of them."""
        self._backwards += 1
        self._is_in_backward, self._stepped_too_early = True, False
        if self._backwards == 1:
            self._compare_items(num_items is not None)
        loader = GradientState().active_dataloader
        if self._backwards == 1 and loader is not None:
            # What the models were called with before, as with dummies, was not the batch.
            self._batch = None
            skipped = getattr(loader, "batches_skipped_twice", 0)
            if skipped:
                self._log(
                    f"{user_line()}: after load_state, the loader continued after the first "
                    f"{skipped} batches of the epoch, but the loop skips {skipped} more, which "
                    "are not trained. Remove the `continue` that skips batches, or use "
                    "accelerator.skip_first_batches, which does not skip twice"
                )
        if self._backwards == 3:
            self._compare_batches()
        self._check_window()
        if self._backwards > _BACKWARDS:
            self.close()

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """Check the loss, note which optimizers have gradients, and refuse a step that was made in the backward."""
        self._is_in_backward = False
        if self._stepped_too_early:
            raise PrepareError(
                "an optimizer stepped inside the backward pass, as in a "
                "register_post_accumulate_grad_hook hook: DDP averages gradients after such "
                "hooks, so each process would train a different model. Step after "
                "accelerator.backward, or set fsdp_version=2, which calls these hooks with "
                "averaged gradients"
            )
        run = self._run()
        if run is None:
            return
        has_value = type(loss) is torch.Tensor and loss.numel() == 1 and not loss.is_meta
        # A mean over no items is NaN, and has no weight.
        has_value &= num_items is None or bool(num_items)
        if has_value and not self._has_infinite_loss and not bool(torch.isfinite(loss.detach())):
            self._has_infinite_loss = True
            self._log(
                f"{user_line()}: the loss of backward {self._backwards} is {loss.item()}. Look "
                "for non-finite values in the data, a division by zero in the loss, or a "
                "learning rate that is too high."
            )
        self._reached.clear()
        for optimizer in run.objects.optimizers:
            if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
                self._reached.add(optimizer)
                if _is_divided(run):
                    self._gradients[optimizer] = _gradient_elements(optimizer)

    def before_step(
        self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None
    ) -> None:
        """Check the first step of a prepared optimizer."""
        self._is_in_step = True
        run = self._run()
        steps = self._steps.get(optimizer, 0)
        if run is not None and steps and optimizer in self._foreign:
            self._compare_foreign(optimizer, run, steps)
        if run is None or steps:
            return
        self._check_next_checkpoint(run)
        self._note_step_in_backward(optimizer, run)
        if self._count_shards() > 1 and dist.is_initialized():
            checksum = _checksum(_foreign_parameters(optimizer, run), None)
            if checksum is not None:
                self._foreign[optimizer] = checksum
        if _is_divided(run):
            self._compare_factors(optimizer, run)
        has_note = self._check_parameters(optimizer, run)
        if not has_note and closure is None and not _keeps_gradients(optimizer, run):
            self._check_gradients(optimizer, run)

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """End the checks when each prepared optimizer has made two steps."""
        self._is_in_step = False
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        run = self._run()
        has_stepped = run is None or all(
            self._steps.get(other, 0) > 1 for other in run.objects.optimizers
        )
        if has_stepped and not self._stepped_too_early and not self._foreign:
            self._compare_batches()
            self.close()

    def close(self) -> None:
        """End the checks. Not to be called from a hook of optimizers, whose list it changes."""
        self._running.discard(self)
        self._end_batches()
        run = self._run()
        if run is not None:
            run.loop.remove(self)
        if not self._running and FirstStepCheck._hook is not None:
            FirstStepCheck._hook.remove()
            FirstStepCheck._hook = None

    @classmethod
    def close_all(cls) -> None:
        """End the checks of this process."""
        for check in tuple(cls._running):
            check.close()

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step, prepared or not, outside of a prepared one."""
        run = self._run()
        if run is None or self._is_in_step:
            return
        self._note_step_in_backward(optimizer, run)
        for prepared in run.objects.optimizers:
            if prepared.optimizer is optimizer:
                # Its gradients are used, and may be cleared.
                self._reached.discard(prepared)
        # A step with learning rate 0 trains nothing: torch makes one to create the state that it loads.
        trains = any(group.get("lr", 1) for group in optimizer.param_groups)
        if self._steps.get(optimizer) or not trains:
            return
        name = f"{user_line()}: this {type(optimizer).__name__}"
        optimizers = run.objects.optimizers
        if any(optimizer is prepared.optimizer for prepared in optimizers):
            if self._prepared[optimizer] == 1 and not _keeps_gradients(optimizer, run):
                self._log(
                    f"{name} was passed to prepare, but this is not the object that prepare returned, "
                    f"{_UNPREPARED_EFFECT}: "
                    "use the objects that accelerator.prepare returned"
                )
            return
        self._steps[optimizer] = 1
        # An optimizer may step another one that has the same parameters, also outside of its own step.
        if _identities(optimizer) & _trained(run) - _identities(*optimizers):
            self._log(
                f"{name} trains a prepared model but was not prepared, {_UNPREPARED_EFFECT}: pass it to "
                "accelerator.prepare"
            )

    def before_forward(self, inputs: Iterable[Any]) -> None:
        """Add to the checksum of what the models get, unless a prepared loader gave it."""
        run = self._run()
        if run is not None and GradientState().active_dataloader is None:
            self._batch = _checksum(inputs, self._batch)

    # -- what is checked on one rank

    def _check_next_checkpoint(self, run: RunCheckpoints) -> None:
        """Log that the first automatically named save is going to fail, which may be hours away."""
        folder = None
        if run.state.is_main_process and not self._steps:
            # What cannot be read now can perhaps be read then.
            with contextlib.suppress(OSError):
                folder = run.foreign_checkpoint()
        if folder is not None:
            self._log(
                f"{folder} already exists, but this run has not loaded it: the first save_state() "
                "will fail. Call load_state() or resume() before the first step, set "
                "ProjectConfiguration.iteration, or use another project_dir"
            )

    def _check_window(self) -> None:
        """Log that gradients are gone which an earlier batch of the present accumulation window has left."""
        run = self._run()
        if run is None or run.accumulation.is_first or run.accumulation.has_backward:
            return
        for optimizer in self._reached:
            is_open = optimizer.stepped_in != run.accumulation.number
            if is_open and all(parameter.grad is None for parameter in parameters_of(optimizer)):
                self._log(
                    f"{user_line()}: the gradients of earlier batches of this accumulation window "
                    f"were cleared, so the {type(optimizer.optimizer).__name__} does not train on "
                    "them: instead of model.zero_grad(), call zero_grad of the prepared "
                    "optimizer, which clears only after a step"
                )

    def _check_parameters(self, optimizer: AcceleratedOptimizer, run: RunCheckpoints) -> bool:
        """Log and return whether a prepared model has gradients that this optimizer should step, and does not."""
        trained = _trained(run)
        stale = [
            parameter
            for parameter in parameters_of(optimizer)
            if isinstance(parameter, nn.Parameter)
            and parameter.grad is None
            and id(parameter) not in trained
        ]
        if not stale:
            return False
        not_stepped = trained - _identities(*run.objects.optimizers)
        for model in run.objects.models:
            for name, parameter in model.inner.named_parameters():
                if parameter.grad is not None and id(parameter) in not_stepped:
                    self._log(
                        f"{user_line()}: no prepared optimizer steps {name}, which has a "
                        f"gradient, and the {type(optimizer.optimizer).__name__} has {len(stale)} "
                        "parameters without a gradient that do not belong to a prepared model. "
                        "Was a module replaced after the optimizer was created? Create the "
                        "optimizer after the last change to the model"
                    )
                    return True
        return False

    def _check_gradients(self, optimizer: AcceleratedOptimizer, run: RunCheckpoints) -> None:
        """Log a step without gradients."""
        # A rank may hold no element of a sharded model.
        parameters = [parameter for parameter in parameters_of(optimizer) if parameter.numel()]
        if not parameters or any(parameter.grad is not None for parameter in parameters):
            return
        if not self._backwards:
            reason = (
                "none of its parameters has a gradient: call accelerator.backward(loss) before it"
            )
        elif all(parameter.is_meta for parameter in parameters):
            reason = (
                "its parameters are offloaded, so nothing is trained: place what you train on a device, with "
                "dispatch_model"
            )
        elif self._has_infinite_loss:
            return
        elif optimizer in self._reached:
            reason = (
                "its gradients were cleared between the backward pass and optimizer.step(), so "
                "nothing is trained: call optimizer.zero_grad() after optimizer.step()"
            )
        elif len(run.objects.optimizers) == 1:
            reason = (
                "accelerator.backward did not compute gradients for its parameters: look for "
                "torch.no_grad() or detach() between the model and the loss"
            )
        else:
            # One of several optimizers may have nothing to do in a step.
            return
        self._log(f"{user_line()}: the {type(optimizer.optimizer).__name__} steps, and {reason}")

    def _note_step_in_backward(self, optimizer: torch.optim.Optimizer, run: RunCheckpoints) -> None:
        """Note a step in a hook of the backward, where DDP has not yet averaged the gradients of its parameters.

        The end of the backward refuses it. A step after a backward that has failed looks alike, and has no such end.
        """
        if self._is_in_backward and self._count_shards() > 1:
            stepped = _identities(optimizer)
            for model in run.objects.models:
                is_replica = hasattr(uncompiled(model.module), "require_backward_grad_sync")
                if is_replica and not stepped.isdisjoint(map(id, model.trained_parameters())):
                    self._stepped_too_early = True

    # -- what is compared between the ranks

    def _count_shards(self) -> int:
        run = self._run()
        if run is None:
            return 1
        return run.strategy.data_shard[1]

    def _compare_items(self, has_items: bool) -> None:
        """Log that only some ranks pass `num_items`, before their different collectives meet."""
        run = self._run()
        if run is None or self._count_shards() == 1:
            return
        rank = run.state.process_index
        first = self._first("items", [rank, has_items])
        if first is None or first[1] == has_items:
            return
        passing, other = rank, first[0]
        if not has_items:
            passing, other = other, rank
        self._log(
            f"{user_line()}: rank {passing} passes num_items to accelerator.backward, and rank {other} does not. "
            "Without it on all ranks, they make different collectives, which can end a process "
            "or never end. A rank without items passes num_items=0"
        )

    def _compare_batches(self) -> None:
        """Report batches that are equal on ranks that are to read different ones."""
        run, batch = self._run(), self._batch
        self._end_batches()
        if batch is None or run is None:
            return
        shard = run.strategy.data_shard[0]
        first = self._first("batch", [shard, batch])
        if first is not None and first[0] != shard and first[1] == batch:
            self._log(
                f"{user_line()}: all processes trained on the same first batch, which did not "
                "come from a prepared loader: pass the DataLoader to accelerator.prepare, or let "
                "each process choose its own samples"
            )

    def _compare_factors(self, optimizer: AcceleratedOptimizer, run: RunCheckpoints) -> None:
        """Log that ranks with parts of a model have multiplied their gradients by different numbers."""
        before = self._gradients.pop(optimizer, [])
        factor = _common_factor(before, _gradient_elements(optimizer))
        if factor is None:
            return
        number = run.objects.optimizers.index(optimizer)
        rank = dist.get_rank()
        first = self._first(f"factor {number}", [rank, factor])
        if first is not None and abs(first[1] - factor) > _FACTOR_TOLERANCE * abs(factor):
            self._log(
                f"{user_line()}: before the step the gradients on rank {rank} were multiplied by "
                f"{factor:.3g}, and those on rank {first[0]} by {first[1]:.3g}. "
                "torch.nn.utils.clip_grad_norm_ computes only the norm of the part of the model "
                f"that a process holds under {run.strategy.name}: call "
                "accelerator.clip_grad_norm_(model.parameters(), max_norm) instead"
            )

    def _compare_foreign(
        self, optimizer: AcceleratedOptimizer, run: RunCheckpoints, steps: int
    ) -> None:
        """Log that parameters of no prepared model were equal on all ranks before the first step, and never since.

        A script may average them itself, every few steps.
        """
        foreign = _foreign_parameters(optimizer, run)
        before, present = self._foreign[optimizer], _checksum(foreign, None)
        number, rank = run.objects.optimizers.index(optimizer), dist.get_rank()
        first = self._first(f"foreign {number} {steps}", [rank, before, present])
        if first is None or first[1] != before or (first[0] != rank and first[2] == present):
            del self._foreign[optimizer]
        elif steps == _ALONE:
            del self._foreign[optimizer]
            if first[0] != rank:
                self._log(
                    f"{user_line()}: the {type(optimizer.optimizer).__name__} trains "
                    f"{len(foreign)} parameters that do not belong to a prepared model. They have "
                    f"differed between processes for {steps} steps, because their gradients are "
                    "not averaged: pass their model to accelerator.prepare"
                )

    def _end_batches(self) -> None:
        self._batch = None
        for handle in self._forward_hooks:
            handle.remove()

    def _first(self, what: str, value: Any) -> Any:
        """The value of the rank that came first, which may be this one; None on one process or without a store."""
        # Of the ranks of a trace, as `accelerate plan` makes one, there is only this one.
        if (
            dist.is_initialized()
            and dist.get_world_size() > 1
            and dist.get_backend() != dist.Backend.FAKE
        ):
            with marks.Tolerant():
                store = marks.run_store()
                return json.loads(store.compare_set(f"{self._key}/{what}", "", json.dumps(value)))
        return None

    def _log(self, note: str) -> None:
        """Log a message, on the first rank that comes with it."""
        if note not in self._logged:
            self._logged.add(note)
            rank = dist.get_rank() if dist.is_initialized() else 0
            if self._first(f"note {zlib.crc32(note.encode())}", rank) in (None, rank):
                logger.warning(
                    f"rank {rank}: {note}" if self._count_shards() > 1 else note,
                    main_process_only=False,
                )


def _before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook of prepared models. A copied or pickled module has it too, where it soon does nothing."""
    if torch.is_grad_enabled():
        for check in tuple(FirstStepCheck._running):
            check.before_forward((args, kwargs))


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for check in tuple(FirstStepCheck._running):
        check.before_any_step(optimizer)


def _keeps_gradients(optimizer: Any, run: RunCheckpoints) -> bool:
    """Whether the gradients are kept elsewhere: by an engine, or by an optimizer that steps in the backward."""
    return not run.strategy.divides_loss or hasattr(
        getattr(optimizer, "optimizer", optimizer), "fused_backward"
    )


def _foreign_parameters(optimizer: AcceleratedOptimizer, run: RunCheckpoints) -> list[torch.Tensor]:
    """The parameters of an optimizer that no prepared model has."""
    trained = _trained(run)
    return [p.detach() for p in parameters_of(optimizer) if id(p) not in trained]


def _is_divided(run: RunCheckpoints) -> bool:
    """Whether each of several processes has a part of the gradients, and their norm is that of all parts."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    if dist.get_backend() == dist.Backend.FAKE:
        return False
    return dist.get_world_size() > 1 and not run.strategy.has_replicas and run.strategy.divides_loss


def _gradient_elements(optimizer: AcceleratedOptimizer) -> list[float]:
    """The first elements of this rank's first gradients."""
    elements: list[float] = []
    gradients = [local(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    for gradient in gradients[:8]:
        if gradient.layout is torch.strided and gradient.is_floating_point():
            elements += gradient.detach().flatten()[:16].tolist()
    return elements


def _common_factor(before: list[float], after: list[float]) -> float | None:
    """The number by which all elements were multiplied; None if there is none, or too few elements show it."""
    if len(before) != len(after):
        return None
    factors = [now / former for former, now in zip(before, after, strict=True) if former]
    if len(factors) < 4:
        return None
    smallest, largest = min(factors), max(factors)
    if largest - smallest > _FACTOR_TOLERANCE * abs(largest):
        return None
    return largest


def _identities(*optimizers: Any) -> set[int]:
    identities: set[int] = set()
    for optimizer in optimizers:
        identities.update(map(id, parameters_of(optimizer)))
    return identities


def _trained(run: RunCheckpoints) -> set[int]:
    """The identities of the parameters of all prepared models."""
    identities: set[int] = set()
    for model in run.objects.models:
        identities.update(map(id, model.trained_parameters()))
    return identities


def _checksum(data: Iterable[Any], start: int | None) -> int | None:
    """A checksum of the first elements of all plain tensors in `data`; `start` where there is none."""
    for tensor in leaves(data):
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        try:
            elements = tensor.detach().flatten()[:_ELEMENTS].cpu().contiguous()
            values = elements.view(torch.uint8).numpy().tobytes()
        except RuntimeError:
            # Inside of a transform of torch.func a tensor has no storage.
            continue
        kind = f"{tensor.shape}{tensor.dtype}"
        start = zlib.crc32(values, zlib.crc32(kind.encode(), start or 0))
    return start

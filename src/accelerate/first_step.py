# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's first two optimizer steps: what would train wrongly without an error is logged once.

The checks end with the second step. From then on a step pays for a test of one attribute.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .core.errors import PrepareError
from .core.modules import is_dtensor
from .data_loader.diagnose import uneven_epoch, uneven_window
from .first_step_ranks import checksum, collect, differences, findings, numbers
from .logging import MultiProcessAdapter, get_logger
from .optimizer import AcceleratedOptimizer
from .parallel.prepared import PreparedModel
from .run_checkpoints import RunCheckpoints
from .run_objects import RunObjects
from .runtime.calls import ranks_in_words, user_line
from .state import GradientState, PartialState

logger: MultiProcessAdapter = get_logger(__name__)

# Steps of any optimizer after which the checks end, and backwards whose loss is checked: that waits for the device.
_STEPS, _LOSSES = 16, 16
# Parameters of an optimizer that get a hook until a backward has reached one of them.
_HOOKED = 8
# Where `accelerator.backward` is, in the stack of a hook.
_BACKWARD = (f"{__package__}.accelerator", ("backward", "lomo_backward"))


class _Watch:
    """What was seen of one optimizer.

    Args:
        is_prepared: `prepare` returned it.

    Attributes:
        steps: its steps so far.
        line: the user's line of the last step.
        sample: one of its parameters for which a backward has computed a gradient.
        has_gradients: a backward has computed gradients since the last step, and they were not cleared.
        is_in_window: that backward did not end an accumulation window.
        cleared_at: the user's line of a `zero_grad` that no backward has followed.
        cleared: gradients were cleared since the last step, or zero at the start of a backward.
        backwards: calls of `accelerator.backward` since the last step.
        is_foreign: other backwards than `accelerator.backward` computed gradients.
        is_bypassed: the parameters take no hook, as those of FSDP1.
        is_hooked: `hook` was called, and `unhook` was not.
        local: digest of the gradient of `sample` as the last backward of this rank left it.
        findings: what is compared between the ranks.
    """

    def __init__(self, is_prepared: bool) -> None:
        self.is_prepared = is_prepared
        self.steps: int = 0
        self.line: str = ""
        self.sample: weakref.ref[torch.Tensor] | None = None
        self.has_gradients: bool = False
        self.is_in_window: bool = False
        self.cleared_at: str | None = None
        self.cleared: bool = False
        self.backwards: int = 0
        self.is_foreign: bool = False
        self.is_bypassed: bool = False
        self.local: list[float] | None = None
        self.findings: dict[str, Any] | None = None
        self.is_hooked: bool = False
        self._handles: list[tuple[weakref.ref[torch.Tensor], RemovableHandle]] = []

    def hook(self, check: FirstStepCheck, parameters: list[torch.Tensor], keeps_local: bool) -> None:
        """Follow the gradients of a few parameters, until `unhook`."""
        self.is_hooked = True
        known = None if self.sample is None else self.sample()
        trained = [one for one in parameters if one.requires_grad and one.is_leaf] if known is None else [known]
        # FSDP1 refuses hooks: its backward computes gradients of other tensors.
        able = [one for one in trained if "register_post_accumulate_grad_hook" not in vars(one)]
        self.is_bypassed = len(able) < len(trained)
        hook = _GradientHook(check, self, keeps_local)
        for parameter in able[:: max(1, len(able) // _HOOKED)][:_HOOKED]:
            self._handles.append((weakref.ref(parameter), parameter.register_post_accumulate_grad_hook(hook)))

    def unhook(self) -> None:
        """Remove the hooks."""
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.is_hooked = False

    def see_gradient(self, parameter: torch.Tensor) -> None:
        """Take the first parameter that gets a gradient as the sample, and remove the hooks of all others."""
        self.has_gradients, self.cleared_at = True, None
        if self.sample is None or self.sample() is None:
            self.sample = weakref.ref(parameter)
            for found, handle in self._handles:
                if found() is not parameter:
                    handle.remove()

    def has_lost_gradients(self) -> bool:
        """Whether gradients were cleared since a backward computed them."""
        sample = None if self.sample is None else self.sample()
        if sample is None or not self.has_gradients or not _is_cleared(sample):
            return False
        # Gradients may be zero without having been cleared.
        return sample.grad is None or self.cleared_at is not None


class FirstStepCheck:
    """Logs a warning for what looks wrong in the first steps of a run, each message once.

    References to the run's objects are weak, since their optimizers refer to this check until their second step.

    Attributes:
        active: whether `before_backward` is to be called.
    """

    # The checks of this process that have not ended: a gradient may have been computed by another accelerator.
    _running: ClassVar[weakref.WeakSet[FirstStepCheck]] = weakref.WeakSet()
    # Calls them before each step of any optimizer, also of one that was not prepared.
    _hook: ClassVar[RemovableHandle | None] = None

    def __init__(self, objects: RunObjects, checkpoints: RunCheckpoints, gradient_state: GradientState) -> None:
        self.active: bool = True
        self._objects = weakref.ref(objects)
        self._checkpoints = weakref.ref(checkpoints)
        self._gradient_state = gradient_state
        self._logged: set[str] = set()
        self._watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watch] = weakref.WeakKeyDictionary()
        self._first_batch: int | None = None
        self._first_forward = ""
        self._batch_hooks: list[RemovableHandle] = []
        self._steps = 0
        self._backwards = 0
        self._has_infinite_loss = False
        self._is_over = False
        self._running.add(self)
        if FirstStepCheck._hook is None:
            FirstStepCheck._hook = register_optimizer_step_pre_hook(_before_any_step)

    # -- the events

    def before_prepare(self) -> None:
        """Remove all hooks from parameters: layouts refuse those of users. The next backward adds them again."""
        for check in self._running:
            for watch in check._watched.values():
                watch.unhook()

    def watch_model(self, prepared: PreparedModel) -> None:
        """Look at the first batch of a prepared model."""
        # A hook on a compiled model would have it compiled again without the hook.
        compiled = prepared.uncompiled is not prepared.module or getattr(prepared.module, "_compiled_call_impl", None)
        if self.active and _shards(self._checkpoints()) > 1 and not compiled:
            hook = _ForwardHook(self)
            self._batch_hooks.append(prepared.module.register_forward_pre_hook(hook, with_kwargs=True))

    def watch_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        """Have a prepared optimizer call this check."""
        optimizer._check_groups = self.check_groups
        optimizer._before_step = self.before_step
        if self.active:
            optimizer._before_zero_grad = self.before_zero_grad

    def before_backward(self, loss: Any) -> None:
        """Check a loss, and whether gradients were cleared since the first step."""
        if self._is_over:
            # Not in a hook of optimizers, whose list this changes.
            self.end()
            return
        for check in tuple(self._running):
            check._see_backward()
        self._check_loss(loss)

    def before_zero_grad(self, optimizer: AcceleratedOptimizer) -> None:
        """Note that the gradients of a prepared optimizer are about to be cleared."""
        if (watch := self._watched.get(optimizer)) is not None:
            watch.cleared_at = user_line()
            watch.cleared = True

    def before_step(self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> None:
        """Check the run before the first and the second step of a prepared optimizer."""
        objects, checkpoints = self._objects(), self._checkpoints()
        if objects is None or checkpoints is None:
            optimizer._before_step = optimizer._before_zero_grad = None
            return
        if optimizer.steps_made == 0:
            _refuse_local_gradients(optimizer, objects)
            checkpoints.check_resumed()
            checkpoints.controller.record_step()
        if self._is_over:
            # Other optimizers have made many steps, and the backwards were not counted.
            optimizer._before_step = optimizer._before_zero_grad = None
            self.end()
            return
        watch = self._watch(optimizer, objects)
        if watch.steps == 0:
            self._check_epoch()
            if not self._check_parameters(optimizer, objects):
                self._check_gradients(optimizer, watch, objects, closure)
        else:
            optimizer._before_step = optimizer._before_zero_grad = None
            self._check_cleared(optimizer, watch)
        self._count_step(optimizer, watch, objects)
        if self._is_complete(objects):
            self._compare_ranks("prepared")
            self.end()

    def check_groups(self, optimizer: AcceleratedOptimizer) -> None:
        """Raise PrepareError for parameters that a prepared model has only since `prepare`."""
        if (objects := self._objects()) is not None:
            objects.refuse_new_parameters(optimizer)

    def check_window(self) -> None:
        """Check the length of the epoch before the first loss is divided by the accumulation steps."""
        loader = self._gradient_state.active_dataloader
        self._log_once(None if loader is None else uneven_window(loader, self._gradient_state.num_steps))

    def before_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step, prepared or not."""
        self._steps += 1
        objects = self._objects()
        if objects is None:
            self._stop()
        elif not _is_inside_step():
            self._check_step(optimizer, objects)
        if not self._is_over and self._steps > _STEPS:
            if objects is not None and (objects.models or objects.optimizers):
                self._compare_ranks("prepared")
            self._stop()

    def end(self) -> None:
        """End the checks. Not to be called from a hook of optimizers, whose list it changes."""
        self._stop()
        self.active = False
        if not self._running and FirstStepCheck._hook is not None:
            FirstStepCheck._hook.remove()
            FirstStepCheck._hook = None

    def _stop(self) -> None:
        """Check nothing more. The next `accelerator.backward` removes the hook of all optimizers."""
        self._is_over = True
        self._running.discard(self)
        for watch in self._watched.values():
            watch.unhook()
        self._watched.clear()
        self._end_batches()

    def _end_batches(self) -> None:
        for handle in self._batch_hooks:
            handle.remove()
        self._batch_hooks.clear()

    # -- what is seen

    def _watch(self, optimizer: torch.optim.Optimizer, objects: RunObjects) -> _Watch:
        watch = self._watched.get(optimizer)
        if watch is None:
            watch = self._watched[optimizer] = _Watch(isinstance(optimizer, AcceleratedOptimizer))
        if not watch.is_hooked:
            own, outside = _parameters(optimizer), []
            if _shards(self._checkpoints()) > 1:
                known = _trained(objects)
                outside = [one for one in own if id(one) not in known]
            watch.hook(self, outside or own, keeps_local=bool(outside))
        return watch

    def _see_backward(self) -> None:
        """Look at all gradients before a backward."""
        self._backwards += 1
        if self._backwards == 1:
            self._end_batches()
            if self._gradient_state.active_dataloader is not None:
                # What the models were called with before, as with dummies, was not the batch.
                self._first_batch = None
        objects = self._objects()
        if objects is not None:
            for optimizer in objects.optimizers:
                if optimizer._before_step is not None:
                    self._watch(optimizer, objects)
        for watch in self._watched.values():
            sample = None if watch.sample is None else watch.sample()
            if sample is not None and _is_cleared(sample):
                if watch.has_gradients and watch.is_in_window:
                    self._check_window_order(watch)
                watch.has_gradients, watch.cleared = False, True
            watch.backwards += 1

    def see_foreign_backward(self, line: str) -> None:
        """Log that gradients were computed by another backward than `accelerator.backward`."""
        self._log_once(
            f"{line}: this backward computes gradients that accelerator.backward did not compute. loss.backward() "
            "neither divides the loss by gradient_accumulation_steps nor scales it for fp16: replace it with "
            "accelerator.backward(loss)"
        )

    def _count_step(self, optimizer: torch.optim.Optimizer, watch: _Watch, objects: RunObjects) -> None:
        watch.steps += 1
        watch.line = user_line()
        if watch.sample is None and (found := next(filter(_has_gradient, _parameters(optimizer)), None)) is not None:
            # Without hooks, as under FSDP1.
            watch.sample = weakref.ref(found)
        if watch.steps == 2:
            watch.findings = self._findings(optimizer, watch, objects)
        watch.has_gradients, watch.cleared, watch.backwards, watch.cleared_at = False, False, 0, None

    def _is_complete(self, objects: RunObjects) -> bool:
        """Whether all optimizers have made two steps."""
        return all(one._before_step is None for one in objects.optimizers) and all(
            watch.steps > 1 for watch in self._watched.values()
        )

    # -- what is checked on one rank

    def _log_once(self, note: str | None) -> None:
        if note is not None and note not in self._logged:
            self._logged.add(note)
            logger.warning(note)

    def _check_epoch(self) -> None:
        loader = self._gradient_state.active_dataloader
        self._log_once(None if loader is None else uneven_epoch(loader))

    def _check_loss(self, loss: Any) -> None:
        if (
            self._has_infinite_loss
            or self._backwards > _LOSSES
            or type(loss) is not torch.Tensor
            or loss.numel() != 1
            or loss.is_meta
        ):
            return
        if not bool(torch.isfinite(loss.detach())):
            self._has_infinite_loss = True
            self._log_once(
                f"{user_line()}: the loss of backward {self._backwards} is {loss.item()}. Look for values in the "
                "data that are not finite, a division by zero in the loss, or a learning rate that is too high."
            )

    def _check_parameters(self, optimizer: AcceleratedOptimizer, objects: RunObjects) -> bool:
        """Look for parameters that no prepared model has. Returns whether a warning was logged."""
        name, own = type(optimizer.optimizer).__name__, _parameters(optimizer)
        if not objects.models and any(map(is_dtensor, own)):
            self._log_once(
                f"{user_line()}: the {name} steps on DTensors, and no model was given to prepare. It "
                "is then unknown which processes have to read the same samples: prepared loaders give each process "
                "different ones, which is wrong under tensor parallelism. Give the model to prepare as well"
            )
            return True
        known = _trained(objects)
        stale = [one for one in own if id(one) not in known and isinstance(one, nn.Parameter) and one.grad is None]
        if not objects.models or not stale:
            return False
        if len(stale) == len(own):
            self._log_once(
                f"{user_line()}: the {name} steps on parameters that belong to no prepared model and have no "
                "gradient. Was the model replaced after the optimizer was made, or never given to prepare?"
            )
            return True
        stepped = {id(one) for found in objects.optimizers for one in _parameters(found)}
        for model in objects.models:
            for lost, parameter in model.inner.named_parameters():
                if parameter.grad is not None and id(parameter) not in stepped and id(parameter) in known:
                    self._log_once(
                        f"{user_line()}: no prepared optimizer steps {lost}, which has a gradient, and the {name} has "
                        f"{len(stale)} parameters without a gradient that belong to no prepared model. Was a module "
                        "replaced after the optimizer was made? Make the optimizer after the last change of the model"
                    )
                    return True
        return False

    def _check_gradients(
        self,
        optimizer: AcceleratedOptimizer,
        watch: _Watch,
        objects: RunObjects,
        closure: Callable[[], Any] | None,
    ) -> None:
        name = type(optimizer.optimizer).__name__
        if closure is not None:
            return
        if self._backwards and self._has_no_gradients(optimizer):
            return
        if watch.has_lost_gradients():
            self._log_once(
                f"{watch.cleared_at or user_line()}: the gradients of the {name} were cleared between the backward "
                "and optimizer.step(), so nothing is trained: call optimizer.zero_grad() after optimizer.step()"
            )
        elif all(parameter.grad is None for parameter in _parameters(optimizer)):
            if not self._backwards:
                self._log_once(
                    f"{user_line()}: the {name} steps, and none of its parameters has a gradient: call "
                    "accelerator.backward(loss) before optimizer.step()"
                )
            elif len(objects.optimizers) == 1:
                # One of several optimizers may have nothing to do in a step.
                self._log_once(
                    f"{user_line()}: the {name} steps, and accelerator.backward has computed no gradient for its "
                    "parameters: look for torch.no_grad() or detach() between the model and the loss, and for "
                    "gradients that were cleared before the step"
                )
        elif not self._backwards and (watch.is_bypassed or optimizer.scaler is not None):
            # Without a hook, or before an error of the scaler.
            self._log_once(
                f"{user_line()}: the {name} steps with gradients that accelerator.backward did not compute. "
                "loss.backward() neither divides the loss by gradient_accumulation_steps nor scales it for fp16: "
                "replace it with accelerator.backward(loss)"
            )

    def _has_no_gradients(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether the gradients are kept elsewhere: by an engine, or by an optimizer that steps in the backward."""
        checkpoints = self._checkpoints()
        engine = checkpoints is not None and not checkpoints.strategy.divides_loss
        return engine or hasattr(optimizer.optimizer, "fused_backward")

    def _check_cleared(self, optimizer: AcceleratedOptimizer, watch: _Watch) -> None:
        if watch.sample is not None and watch.backwards and not watch.cleared and not watch.is_foreign:
            self._log_once(
                f"{user_line()}: the gradients of the {type(optimizer.optimizer).__name__} were not cleared since "
                "its last step, so each step uses those of all former batches: call optimizer.zero_grad() after "
                "optimizer.step()"
            )

    def _check_window_order(self, watch: _Watch) -> None:
        """Gradients were cleared between two backwards of one accumulation window."""
        objects = self._objects()
        # With several optimizers that may be intended.
        if objects is not None and len(objects.optimizers) == 1:
            self._log_once(
                f"{watch.cleared_at or user_line()}: gradients were cleared in the middle of an accumulation window, "
                "so only its last batches count: call the zero_grad() of the prepared optimizer after "
                "optimizer.step(), not before the backward"
            )

    def _check_step(self, optimizer: torch.optim.Optimizer, objects: RunObjects) -> None:
        """Check an optimizer that steps outside of a prepared one."""
        name = type(optimizer).__name__
        effect = "so it steps at every batch of an accumulation window and without the scaler of fp16"
        if (known := next((one for one in objects.optimizers if optimizer is one.optimizer), None)) is not None:
            if (watch := self._watched.get(known)) is not None:
                watch.has_gradients = False
            checkpoints = self._checkpoints()
            if checkpoints is not None and checkpoints.strategy.divides_loss:
                self._log_once(
                    f"{user_line()}: this {name} was given to prepare, but is not what prepare returned, {effect}: "
                    "use the objects that accelerator.prepare returned"
                )
            return
        _refuse_local_gradients(optimizer, objects)
        own = [one for one in _parameters(optimizer) if isinstance(one, nn.Parameter)]
        trained = _trained(objects)
        if any(id(one) in trained for one in own):
            # An optimizer may step another one that has the same parameters, also outside of its own step.
            stepped = {id(one) for found in objects.optimizers for one in _parameters(found)}
            if not any(id(one) in stepped for one in own):
                self._log_once(
                    f"{user_line()}: this {name} trains a prepared model and was not prepared, {effect}: pass it to "
                    "accelerator.prepare"
                )
        elif not own or not PartialState().use_distributed:
            return
        watch = self._watch(optimizer, objects)
        self._count_step(optimizer, watch, objects)
        if not self._is_complete(objects):
            return
        if objects.models:
            self._compare_ranks("prepared")
            self._stop()
        elif any(one.findings is not None for one in self._watched.values()):
            self._compare_ranks("plain")

    def see_forward(self, inputs: Iterable[Any]) -> None:
        """Add to the checksum of what the models get before the first backward, unless a prepared loader gave it."""
        if self._gradient_state.active_dataloader is None:
            self._first_forward = self._first_forward or user_line()
            self._first_batch = checksum(inputs, self._first_batch or 0)

    # -- what is compared between the ranks

    def _findings(self, optimizer: torch.optim.Optimizer, watch: _Watch, objects: RunObjects) -> dict[str, Any] | None:
        """What the ranks must have in common at a step of an optimizer; None where they need not."""
        if (
            not dist.is_initialized()
            or _shards(self._checkpoints()) != dist.get_world_size()
            or dist.get_world_size() == 1
        ):
            return None
        plain = getattr(optimizer, "optimizer", optimizer)
        about = {"at": watch.line, "optimizer": type(plain).__name__, "is_prepared": watch.is_prepared}
        others = [parameter for one in self._watched for parameter in _parameters(one)]
        return about | findings(objects.models, _parameters(optimizer), others) | {"local": watch.local}

    def _compare_ranks(self, which: str) -> None:
        """Compare what was found since the last time. Some ranks may train plain models that others do not."""
        checkpoints = self._checkpoints()
        if checkpoints is None or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        rows = [watch.findings for watch in self._watched.values() if watch.findings is not None]
        for watch in self._watched.values():
            watch.findings = None
        value = {"shard": checkpoints.strategy.data_shard[0], "batch": self._first_batch, "findings": rows}
        try:
            found = collect(which, {**value, "notes": sorted(self._logged)})
        except (RuntimeError, ConnectionError):
            # The store is gone. What the run does next reports that.
            return
        batches = {row["shard"]: row["batch"] for row in found.values()}
        if len(batches) > 1 and None not in batches.values() and len(set(batches.values())) == 1:
            self._log_once(
                f"{self._first_forward}: all processes trained on the same first batch, and no prepared loader gave "
                "it: pass the DataLoader to accelerator.prepare, or let each process choose its own samples"
            )
        for note in differences({rank: row["findings"] for rank, row in found.items()}):
            self._log_once(note)
        others: dict[str, list[int]] = {}
        for rank, row in found.items():
            for note in row["notes"]:
                others.setdefault(note, []).append(rank)
        for note, ranks in others.items():
            if note not in self._logged:
                self._log_once(f"on {ranks_in_words(ranks)}: {note}")


class _GradientHook:
    """A hook of parameters, called when a backward has added to the gradient."""

    def __init__(self, check: FirstStepCheck, watch: _Watch, keeps_local: bool) -> None:
        self._check = weakref.ref(check)
        self._watch = weakref.ref(watch)
        self._keeps_local = keeps_local

    def __call__(self, parameter: torch.Tensor) -> None:
        check, watch = self._check(), self._watch()
        if check is None or watch is None:
            return
        watch.see_gradient(parameter)
        watch.is_in_window = not check._gradient_state.sync_gradients
        if watch.is_prepared and (line := _foreign_backward(sys._getframe())) is not None:
            watch.is_foreign = True
            check.see_foreign_backward(line)
        if self._keeps_local and _has_gradient(parameter):
            watch.local = numbers([parameter.grad])[0]


class _ForwardHook:
    """A forward pre-hook of a prepared model. In a copied or pickled module it is a hook that does nothing."""

    def __init__(self, check: FirstStepCheck) -> None:
        self._check = weakref.ref(check)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        check = self._check()
        if check is not None and torch.is_grad_enabled():
            check.see_forward((args, kwargs))

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *args: Any) -> None:
        pass


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for check in tuple(FirstStepCheck._running):
        check.before_other_step(optimizer)


def _foreign_backward(frame: FrameType) -> str | None:
    """The user's line of a backward that `accelerator.backward` does not make; None for one that it makes.

    `frame`: that of a hook which the backward has called.
    """
    if frame.f_back is None:
        # A thread of autograd, for a device: the backward waits in another one.
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main, frame) if main is not None else frame
    present: FrameType | None = frame
    while present is not None:
        if present.f_code.co_name in _BACKWARD[1] and present.f_globals.get("__name__") == _BACKWARD[0]:
            return None
        present = present.f_back
    return user_line(frame)


def _refuse_local_gradients(optimizer: Any, objects: RunObjects) -> None:
    """Raise PrepareError for a step in a hook of the backward, where DDP has not yet averaged the gradients."""
    if torch._C._current_graph_task_id() == -1 or not PartialState().use_distributed:
        return
    own = {id(parameter) for parameter in _parameters(optimizer)}
    for model in objects.models:
        # Torch's own optimizers in the backward wait for DDP.
        if hasattr(model.uncompiled, "require_backward_grad_sync") and any(
            id(parameter) in own and not hasattr(parameter, "_in_backward_optimizers")
            for parameter in model.trained_parameters()
        ):
            raise PrepareError(
                "an optimizer stepped inside of the backward, as in a hook of register_post_accumulate_grad_hook: DDP "
                "averages gradients after such hooks, so each process would train another model. Step after "
                "accelerator.backward, or set fsdp_version=2, which calls these hooks with averaged gradients"
            )


def _is_inside_step() -> bool:
    """Whether a prepared optimizer is stepping, one that steps others inside."""
    frame = sys._getframe(1)
    code = AcceleratedOptimizer.step.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _shards(checkpoints: RunCheckpoints | None) -> int:
    return 1 if checkpoints is None else checkpoints.strategy.data_shard[1]


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _trained(objects: RunObjects) -> set[int]:
    """The identities of the parameters of all prepared models."""
    return {id(parameter) for model in objects.models for parameter in model.trained_parameters()}


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.strided and not parameter.grad.is_meta


def _is_cleared(parameter: torch.Tensor) -> bool:
    if parameter.grad is None:
        return True
    # Of a DTensor, this rank's shard: `any` of the DTensor would communicate.
    gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
    # A fake tensor, as of a traced step, has no values.
    return type(gradient) is not torch.Tensor or not bool(gradient.any())

# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's first two optimizer steps: what would train wrongly without an error is logged once.

The checks end with the second step. From then on a step pays for a test of one attribute.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .core.errors import PrepareError
from .core.modules import is_dtensor
from .core.trees import leaves
from .data_loader.diagnose import uneven_epoch, uneven_window
from .logging import MultiProcessAdapter, get_logger
from .optimizer import AcceleratedOptimizer
from .parallel.prepared import PreparedModel
from .run_checkpoints import RunCheckpoints
from .run_objects import RunObjects
from .runtime.agreement import Round, pauses
from .runtime.calls import ranks_in_words, user_line
from .state import GradientState, PartialState

logger: MultiProcessAdapter = get_logger(__name__)

# Steps of any optimizer after which the checks end, and backwards whose loss is checked: that waits for the device.
_STEPS, _LOSSES = 16, 2
# What is compared between the ranks: parameters of an optimizer, and elements of each tensor.
_PARAMETERS, _ELEMENTS = 32, 1024
# Parameters that are equal on all ranks differ by no more than rounding on different devices.
_TOLERANCE = 1e-5
# Seconds that rank 0 waits for the other ranks' values.
_PATIENCE = 2.0


@dataclasses.dataclass
class _Stepped:
    """A prepared optimizer that has stepped once.

    Fields:
        sample: one of its parameters that had a gradient; None where none had.
        cleared: the gradient of `sample` was zero, or None, at the start of a later backward.
        backwards: the backwards since its first step.
    """

    sample: weakref.ref[torch.Tensor] | None
    cleared: bool = False
    backwards: int = 0


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
        self._stepped: weakref.WeakKeyDictionary[AcceleratedOptimizer, _Stepped] = weakref.WeakKeyDictionary()
        self._first_batch: int | None = None
        self._steps = 0
        self._backwards = 0
        self._running.add(self)
        if FirstStepCheck._hook is None:
            FirstStepCheck._hook = register_optimizer_step_pre_hook(_before_any_step)

    # -- the events

    def watch_model(self, prepared: PreparedModel) -> None:
        """Look at the first batch of a prepared model."""
        # A hook on a compiled model would have it compiled again without the hook.
        compiled = prepared.uncompiled is not prepared.module or getattr(prepared.module, "_compiled_call_impl", None)
        if self.active and _shards(self._checkpoints()) > 1 and not compiled:
            _FirstBatchHook(self, prepared.module)

    def before_backward(self, loss: Any) -> None:
        """Check a loss, and whether gradients were cleared since the first step."""
        for check in self._running:
            check._backwards += 1
        if self._backwards <= _LOSSES and type(loss) is torch.Tensor and loss.numel() == 1 and not loss.is_meta:
            value = loss.item()
            if not math.isfinite(value):
                self._log_once(
                    f"{user_line()}: the loss of backward {self._backwards} is {value}. Look for values in the data "
                    "that are not finite, a division by zero in the loss, or a learning rate that is too high."
                )
        for stepped in self._stepped.values():
            sample = None if stepped.sample is None else stepped.sample()
            if sample is not None and _is_cleared(sample):
                if stepped.backwards and not stepped.cleared and self._gradient_state.num_steps > 1:
                    self._check_window_order()
                stepped.cleared = True
            stepped.backwards += 1

    def before_step(self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> None:
        """Check the run before the first and the second step of a prepared optimizer."""
        objects, checkpoints = self._objects(), self._checkpoints()
        if objects is None or checkpoints is None:
            optimizer._before_step = None
        elif optimizer not in self._stepped:
            _refuse_local_gradients(optimizer, objects)
            checkpoints.check_resumed()
            checkpoints.controller.record_step()
            if not self.active:
                # Other optimizers have made many steps, and the backwards were not counted.
                optimizer._before_step = None
                self.end()
                return
            self._check_epoch()
            self._check_parameters(optimizer, objects)
            sample = next(filter(_has_gradient, _parameters(optimizer)), None)
            if not self._backwards and closure is None:
                self._check_backward(optimizer, sample)
            self._stepped[optimizer] = _Stepped(None if sample is None else weakref.ref(sample))
        else:
            optimizer._before_step = None
            stepped = self._stepped[optimizer]
            if stepped.sample is not None and stepped.backwards and not stepped.cleared:
                self._log_once(
                    f"{user_line()}: the gradients of the {type(optimizer.optimizer).__name__} were not cleared since "
                    "its last step, so each step uses those of all former batches: call optimizer.zero_grad() after "
                    "optimizer.step()"
                )
            if all(other._before_step is None for other in objects.optimizers):
                self._compare_ranks(optimizer, objects)
                self.end()

    def check_groups(self, optimizer: AcceleratedOptimizer) -> None:
        """Raise PrepareError for parameters that a prepared model has only since `prepare`."""
        if (objects := self._objects()) is not None:
            objects.refuse_new_parameters(optimizer)

    def check_window(self) -> None:
        """Check the length of the epoch before the first loss is divided by the accumulation steps."""
        loader = self._gradient_state.active_dataloader
        self._log_once(None if loader is None else uneven_window(loader, self._gradient_state.num_steps))

    def end(self) -> None:
        """End the checks. Not to be called from a hook of optimizers, whose list it changes."""
        self._stop()
        if not self._running and FirstStepCheck._hook is not None:
            FirstStepCheck._hook.remove()
            FirstStepCheck._hook = None

    def _stop(self) -> None:
        self.active = False
        self._running.discard(self)
        self._stepped.clear()

    def before_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step, prepared or not."""
        self._steps += 1
        objects = self._objects()
        if objects is None or self._steps > _STEPS:
            self._stop()
        elif not any(optimizer in (known, known.optimizer) for known in objects.optimizers) and not _is_inside_step():
            _refuse_local_gradients(optimizer, objects)
            self._check_unprepared(optimizer, objects)

    # -- what is checked on one rank

    def _log_once(self, note: str | None) -> None:
        if note is not None and note not in self._logged:
            self._logged.add(note)
            logger.warning(note)

    def _check_epoch(self) -> None:
        loader = self._gradient_state.active_dataloader
        self._log_once(None if loader is None else uneven_epoch(loader))

    def _check_parameters(self, optimizer: AcceleratedOptimizer, objects: RunObjects) -> None:
        if objects.models and _trains(optimizer, objects) is False:
            self._log_once(
                f"the {type(optimizer.optimizer).__name__} steps on parameters that belong to no prepared model"
                + (": their gradients are not averaged over the processes" if PartialState().use_distributed else "")
                + ". Was the model replaced after the optimizer was made, or never given to prepare?"
            )
        elif not objects.models and any(map(is_dtensor, _parameters(optimizer))):
            self._log_once(
                f"the {type(optimizer.optimizer).__name__} steps on DTensors, and no model was given to prepare. It "
                "is then unknown which processes have to read the same samples: prepared loaders give each process "
                "different ones, which is wrong under tensor parallelism. Give the model to prepare as well"
            )

    def _check_backward(self, optimizer: AcceleratedOptimizer, sample: torch.Tensor | None) -> None:
        name = type(optimizer.optimizer).__name__
        if sample is None:
            self._log_once(
                f"{user_line()}: the {name} steps, and none of its parameters has a gradient: call "
                "accelerator.backward(loss) before optimizer.step()"
            )
        else:
            self._log_once(
                f"{user_line()}: the {name} steps with gradients that accelerator.backward did not compute. "
                "loss.backward() neither divides the loss by gradient_accumulation_steps nor scales it for fp16: "
                "replace it with accelerator.backward(loss)"
            )

    def _check_window_order(self) -> None:
        """Gradients were cleared between two backwards of one accumulation window."""
        objects = self._objects()
        # With several models, or losses of one batch, that may be intended.
        if objects is not None and len(objects.models) == len(objects.optimizers) == 1:
            self._log_once(
                f"{user_line()}: gradients were cleared in the middle of an accumulation window, so only its last "
                "batches count: call optimizer.zero_grad() after optimizer.step(), not before the backward"
            )

    def _check_unprepared(self, optimizer: torch.optim.Optimizer, objects: RunObjects) -> None:
        name, trains = type(optimizer).__name__, _trains(optimizer, objects)
        # Engines step an optimizer of their own next to the prepared one.
        if trains and not objects.optimizers:
            self._log_once(
                f"{user_line()}: this {name} trains a prepared model and was not prepared, so it steps at every batch "
                "of an accumulation window and without the scaler of fp16: pass it to accelerator.prepare"
            )
        elif not objects.models and trains is False and PartialState().use_distributed and not _has_wrapper():
            self._log_once(
                f"{user_line()}: this {name} and its model were not prepared: each process trains its own copy, and "
                "gradients are not averaged. Pass both to accelerator.prepare"
            )

    def _see_first_batch(self, inputs: Iterable[Any]) -> None:
        """Keep a checksum of the first batch, unless a prepared loader gave it."""
        if self._gradient_state.active_dataloader is None and self._first_batch is None:
            self._first_batch = _checksum(inputs)

    # -- what is compared between the ranks

    def _compare_ranks(self, optimizer: AcceleratedOptimizer, objects: RunObjects) -> None:
        checkpoints = self._checkpoints()
        if checkpoints is None or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        shard, shards = checkpoints.strategy.data_shard
        compared = _replicated(optimizer, objects) if shards == dist.get_world_size() else {}
        values = {name: _digest(parameter) for name, parameter in compared.items()}
        try:
            found = _collect({"shard": shard, "batch": self._first_batch, "parameters": values})
        except (RuntimeError, ConnectionError):
            # The store is gone. What the run does next reports that.
            return
        batches = {row["shard"]: row["batch"] for row in found.values()}
        if len(batches) > 1 and None not in batches.values() and len(set(batches.values())) == 1:
            self._log_once(
                "all processes trained on the same first batch, and no prepared loader gave it: pass the DataLoader "
                "to accelerator.prepare, or let each process choose its own samples"
            )
        for name in found.get(0, {"parameters": {}})["parameters"]:
            rows = {rank: row["parameters"].get(name) for rank, row in found.items()}
            odd = [rank for rank, row in rows.items() if not _is_close(row, rows[0])]
            if odd:
                self._log_once(
                    f"parameter {name} has other values on {ranks_in_words(odd)} than on rank 0 after the first step. "
                    "It was changed on some processes only, or its gradient was not averaged: look for code that runs "
                    "on one rank between prepare and the step, for two backwards of one forward without "
                    "accelerator.backward, of which DDP averages the first only (add the losses), for a module "
                    "used twice in checkpoints with use_reentrant=True (set it to False), or for an nn.Embedding "
                    "with max_norm, whose forward changes the rows that its process reads"
                )
                break


class _FirstBatchHook:
    """A forward pre-hook that removes itself. In a copied or pickled module it is a hook that does nothing."""

    def __init__(self, check: FirstStepCheck, module: torch.nn.Module) -> None:
        self._check = weakref.ref(check)
        self._handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._handle.remove()
            check = self._check()
            if check is not None and check.active:
                check._see_first_batch((args, kwargs))

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *args: Any) -> None:
        pass


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for check in tuple(FirstStepCheck._running):
        check.before_other_step(optimizer)


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


def _trains(optimizer: Any, objects: RunObjects) -> bool | None:
    """Whether parameters of an optimizer belong to a prepared model; None where it has no parameters."""
    prepared = {id(parameter) for model in objects.models for parameter in model.trained_parameters()}
    own = _parameters(optimizer)
    return any(id(parameter) in prepared for parameter in own) if own else None


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.strided and not parameter.grad.is_meta


def _is_cleared(parameter: torch.Tensor) -> bool:
    if parameter.grad is None:
        return True
    # Of a DTensor, this rank's shard: `any` of the DTensor would communicate.
    gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
    # A fake tensor, as of a traced step, has no values.
    return type(gradient) is not torch.Tensor or not bool(gradient.any())


def _has_wrapper() -> bool:
    """Whether the user has wrapped a model in DistributedDataParallel."""
    # By `type`: `isinstance` runs the `__class__` of lazy objects.
    return any(issubclass(type(found), torch.nn.parallel.DistributedDataParallel) for found in gc.get_objects())


def _checksum(inputs: Iterable[Any]) -> int:
    """A checksum of the shapes and first elements of all tensors in a model's arguments."""
    found = 0
    for tensor in leaves(inputs):
        found = zlib.crc32(f"{tensor.shape}{tensor.dtype}".encode(), found)
        # A tensor inside of a transform of torch.func has no storage.
        plain = type(tensor) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if plain and tensor.layout is torch.strided and tensor.device.type != "meta":
            first = tensor.detach().flatten()[:_ELEMENTS].cpu().contiguous()
            found = zlib.crc32(first.view(torch.uint8).numpy().tobytes(), found)
    return found


def _replicated(optimizer: AcceleratedOptimizer, objects: RunObjects) -> dict[str, torch.Tensor]:
    """Some parameters of an optimizer by name, where every rank has the same ones in full; else none."""
    model = objects.find_trained(optimizer)
    if model is None or model.is_partial or model.saves_shards:
        return {}
    # Without synchronization, as under LocalSGD, the ranks' parameters differ.
    if not getattr(model.uncompiled, "require_backward_grad_sync", False):
        return {}
    own = {id(parameter) for parameter in _parameters(optimizer)}
    names = {
        name: parameter
        for name, parameter in model.inner.named_parameters()
        if id(parameter) in own and type(parameter) is torch.nn.Parameter and parameter.device.type != "meta"
    }
    every = max(1, len(names) // _PARAMETERS)
    return dict(list(names.items())[::every])


def _digest(parameter: torch.Tensor) -> list[float]:
    values = parameter.detach().flatten()[:_ELEMENTS]
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.double()
    return [values.sum().item(), values.abs().sum().item()]


def _is_close(row: list[float] | None, reference: list[float] | None) -> bool:
    if row is None or reference is None:
        return row is reference
    scale = _TOLERANCE * max(abs(row[1]), abs(reference[1]))
    return all(not abs(one - other) > scale for one, other in zip(row, reference, strict=True))


def _collect(value: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """On rank 0 the values of all ranks, empty where one does not come; the other ranks do not wait."""
    exchange = Round("first step")
    exchange.put(value)
    if exchange.rank != 0:
        return {}
    for waited in pauses():
        if exchange.is_complete():
            return exchange.values()
        if waited > _PATIENCE:
            break
    return {}

# SPDX-License-Identifier: Apache-2.0
"""The prepared optimizer: it steps at the end of an accumulation window, and through the gradient scaler of fp16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .core.lazy import public_names
from .core.objects import computed, forwarded
from .core.observers import NO_LOOP, RunLoop
from .core.trees import send_to_device
from .state import AcceleratorState, GradientState
from .torch_internals.grad_scaler import SCALER_CHECKS, has_overflowed


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A prepared optimizer. In an accumulation window it keeps gradients, and steps at the end.

    `Accelerator.prepare` creates it. Every other attribute is that of the wrapped optimizer.

    Args:
        optimizer: the wrapped optimizer.
        device_placement: move its state to the devices of the parameters.
        scaler: the gradient scaler of fp16 training.
        average_loss: averages a closure's loss over the processes, for optimizers that use it.

    Example:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        optimizer.step()
    """

    _is_accelerate_prepared = True

    # That of the run that has prepared this optimizer.
    loop: RunLoop = NO_LOOP
    left_out: int = 0  # steps in a row
    stepped_in: int = -1  # the accumulation window of its last step
    awaits_scale: bool = False  # it has stepped since the loss scale was updated

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        average_loss: Callable[[Any], Any] | None = None,
    ) -> None:
        # No super().__init__(): the parameters stay with the wrapped optimizer.
        self.optimizer: Any = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state: GradientState = GradientState()
        self._is_overflow = False
        self._unscaled = False
        self._has_used_gradients = False  # and has not cleared them
        self.steps_made: int = 0  # by this process, including steps that were skipped
        self.has_new_groups: bool = True  # since its last step
        self.average_loss = average_loss
        if device_placement:
            self._place_state()

    def _place_state(self) -> None:
        """Move state that was loaded before `prepare` to its parameter's device; `step` counters stay."""
        for parameter, state in self.optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):
                continue
            for name, value in state.items():
                has_elements = isinstance(value, torch.Tensor) and value.dim() > 0
                if has_elements and value.device != parameter.device:
                    state[name] = send_to_device(value, parameter.device)

    accelerator_state: AcceleratorState = computed(
        lambda self: AcceleratorState(), "The shared options of the run."
    )
    state: Any = forwarded("optimizer.state", "The state of each parameter.", settable=True)
    param_groups: Any = forwarded(
        "optimizer.param_groups", "The parameters in groups with options.", settable=True
    )
    defaults: Any = forwarded(
        "optimizer.defaults", "The options that a new group gets.", settable=True
    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options, as `torch.optim.Optimizer.add_param_group` does."""
        self.optimizer.add_param_group(param_group)
        self.has_new_groups = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients that a step has used.

        In an accumulation window it does nothing before the step, so that a loop may call it before its backward or
        after its step.

        Args:
            set_to_none: as in `torch.optim.Optimizer.zero_grad`; None leaves it to the wrapped optimizer.
        """
        if self._has_used_gradients:
            self._has_used_gradients = False
        elif not self.gradient_state.sync_gradients or self.loop.keeps_gradients(self):
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        self.loop.after_zero_grad(self)

    def train(self) -> None:
        """Use the training weights of a schedule-free optimizer, which keeps two sets of weights."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

    def eval(self) -> None:
        """Use the evaluation weights of a schedule-free optimizer, which keeps two sets of weights."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, at the end of an accumulation window only.

        Args:
            closure: computes the loss again, for optimizers that call it (LBFGS).

        Returns:
            The closure's loss where one is given.
        """
        if not self.gradient_state.sync_gradients:
            return None
        may_step = self.loop.before_step(self, closure)
        self.has_new_groups = False
        if closure is not None and self.average_loss is not None:
            closure = partial(_averaged, self.average_loss, self.loop.weighted, closure)
        if not may_step:
            result, self._is_overflow = None, True
            if self.scaler is not None:
                # This step ends for the scaler too.
                self.unscale()
                self._unscaled = False
                self.loop.after_scaled_step(self)
        elif self.scaler is None:
            self._is_overflow = False
            if closure is None:
                result = self.optimizer.step()
            else:
                result = self.optimizer.step(closure)
        else:
            result = self._scaled_step(closure)
        self.steps_made += 1
        self._has_used_gradients = True
        self.loop.after_step(self)
        return result

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        scaler: Any = self.scaler
        if self.awaits_scale:
            self.loop.update_scale()
        before = scaler.get_scale()
        if closure is None:
            result = scaler.step(self.optimizer)
        else:
            result = scaler.step(self.optimizer, closure)
        self._is_overflow = has_overflowed(scaler, self.optimizer)
        self._unscaled = False
        self.loop.after_scaled_step(self)
        if not SCALER_CHECKS.is_on:
            # The scale is reduced exactly when gradients were not finite and the step was skipped.
            self._is_overflow = scaler.get_scale() < before
        return result

    def unscale(self) -> None:
        """Divide the gradients by the loss scale. Further calls before the next step do nothing."""
        if self.scaler is not None and not self._unscaled:
            if self.awaits_scale:
                self.loop.update_scale()
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        return self._is_overflow

    def __getattr__(self, name: str) -> Any:
        # Called for what this class does not have: `fused_backward`, what schedule-free optimizers add, user's hooks.
        if name in ("optimizer", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"average_loss": None}
        state.pop("loop", None)
        state.pop("step", None)  # there if a learning-rate scheduler has replaced it
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def is_optimizer(obj: object) -> bool:
    """Whether an object is an optimizer, or has the same interface, such as the schedulefree wrapper."""
    if isinstance(obj, torch.optim.Optimizer):
        return True
    names = ("param_groups", "state", "step", "zero_grad", "state_dict", "load_state_dict")
    return all(hasattr(obj, name) for name in names)


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a prepared optimizer; other optimizers are returned unchanged."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer.optimizer
    return optimizer


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of all groups of an optimizer, prepared or not."""
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _averaged(
    average: Callable[[Any], Any], weighted: Callable[[Any], Any], closure: Callable[[], Any]
) -> Any:
    return average(weighted(closure()))


# The API's name for the function that moves a state.
move_to_device = send_to_device

if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

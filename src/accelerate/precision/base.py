# SPDX-License-Identifier: Apache-2.0
"""Full precision, the base class of all others: forward, backward and step without any cast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.objects import NullContext

if TYPE_CHECKING:
    from ..config.precision import AutocastKwargs


# Makes optimizers step converted parameters: takes pairs of (former, present).
Repoint = Callable[[Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]], None]


class Precision:
    """What models compute in. This base is fp32 and works as it is."""

    name = "no"
    scaler: torch.amp.GradScaler | None = None
    native_amp = False
    # What modules compute in that do not compute as the rest of a model.
    modules: Mapping[str, torch.dtype] = {}
    # As text, for `explain`.
    computes_in = "the parameters' dtype"

    def autocast(
        self, options: AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context in which operations run in the lower precision; here it does nothing."""
        return NullContext()

    def convert(self, model: torch.nn.Module, repoint: Repoint) -> None:
        """Replace layers of a model before it is laid out; `repoint` takes the (former, present) parameters."""

    def wrap_forward(self, model: torch.nn.Module, full_outputs: bool = True) -> torch.nn.Module:
        """The model, computing its forward in this precision. Outputs are fp32 with `full_outputs`."""
        return model

    def wrap_method(self, model: torch.nn.Module, name: str) -> None:
        """Have a method of a model compute in this precision, as its forward does."""

    def cast_parameters(self, model: torch.nn.Module) -> bool:
        """Cast the parameters of a model that is laid out, before its first forward; whether some were cast."""
        return False

    def after_layout(self, model: torch.nn.Module) -> None:
        """Have a model that is laid out do what its forwards need in this precision."""

    def master_weights(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The fp32 master weights of a model whose parameters were cast."""
        return []

    def attach_master_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer step the master weights of its parameters, if there are any."""

    def swap_in_master_weights(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        contexts: Iterable[contextlib.AbstractContextManager[None]],
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which models and optimizers have master weights instead of parameters.

        At its end the parameters get the values of the master weights. Gradients stay at the parameters.

        Args:
            models: prepared modules.
            optimizers: their plain optimizers.
            contexts: entered first; they make the models swappable (`PreparedModel.swappable`).
        """
        return contextlib.nullcontext()

# SPDX-License-Identifier: Apache-2.0
"""bf16 parameters with fp32 master weights: the model computes with the former, optimizers step the latter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import PrepareError
from . import master_step
from .amp import MixedPrecision

_CAST_FROM = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class MasterPrecision(MixedPrecision):
    """bf16 autocast over bf16 parameters. Each parameter that trains has an fp32 master weight, in the same layout.

    During its step an optimizer's groups and state have the master weights (`master_step.MasterStep`), otherwise the
    model's parameters. Under `swap_in_master_weights` both model and optimizer have the master weights: a
    checkpoint is that of an fp32 run.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # parameter -> its master weight; None for one that has been frozen so far.
        self._master_of: Any = WeakTensorKeyDictionary()
        self._is_swapped_in = False
        self.changes: int = 0  # the number of entries so far

    @torch.no_grad()
    def cast_parameters(self, model: nn.Module) -> bool:
        """Cast parameters to bf16, and keep fp32 master weights of those that train."""
        _refuse_sparse(model)
        before = self.changes
        for parameter, owners in _places(model):
            if parameter in self._master_of or not _can_be_cast(parameter):
                continue
            # Not detach(): that would share the version counter with the parameter.
            full = parameter.data
            cast = full.to(self.dtype)
            if hasattr(parameter, "device_mesh"):
                # A DTensor's dtype cannot be changed; the layout reads the parameter again before the first forward.
                present = nn.Parameter(cast, requires_grad=parameter.requires_grad)
                present.__dict__.update(parameter.__dict__)
                for module, name in owners:
                    module._parameters[name] = present
                parameter = present
            else:
                parameter.data = cast
            self._note(parameter, full if parameter.requires_grad else None)
        return self.changes != before

    def _note(self, parameter: nn.Parameter, full: torch.Tensor | None) -> None:
        self._master_of[parameter] = None if full is None else nn.Parameter(full.to(torch.float32))
        self.changes += 1

    def master_weights(self, model: nn.Module) -> list[torch.Tensor]:
        """The master weights of a model."""
        found = [self._master_of.get(parameter) for parameter in model.parameters()]
        return [master for master in found if master is not None]

    def find(self, parameter: nn.Parameter) -> tuple[bool, nn.Parameter | None]:
        """(whether a parameter was cast, its master weight or None if it has been frozen so far)."""
        return parameter in self._master_of, self._master_of.get(parameter)

    @torch.no_grad()
    def add_master(self, parameter: nn.Parameter) -> None:
        """Add the master weight of a parameter that was frozen and trains from now on."""
        self._note(parameter, parameter.data)

    def attach_master_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer step master weights, once."""
        if master_step.master_step_of(optimizer) is None:
            master_step.attach(optimizer, self)

    @contextlib.contextmanager
    def swap_in_master_weights(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        contexts: Iterable[contextlib.AbstractContextManager[None]],
    ) -> Iterator[None]:
        """A context in which models and optimizers have master weights; nested ones do nothing."""
        if self._is_swapped_in:
            yield
            return
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            stack.enter_context(self._in_place(models, optimizers))
            self._is_swapped_in = True
            stack.callback(setattr, self, "_is_swapped_in", False)
            yield

    @contextlib.contextmanager
    def _in_place(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        places = [
            (module, name, parameter, master)
            for model in models
            for parameter, owners in _places(model)
            if (master := self._master_of.get(parameter)) is not None
            for module, name in owners
        ]
        pairs = list({id(parameter): (parameter, master) for _, _, parameter, master in places}.values())
        master_step.refresh(pairs)
        attached = [(found, one) for one in optimizers if (found := master_step.master_step_of(one)) is not None]
        for found, optimizer in attached:
            found.enter(optimizer)
        for module, name, _, master in places:
            module._parameters[name] = master
        try:
            yield
        finally:
            for module, name, parameter, _ in places:
                module._parameters[name] = parameter
            master_step.copy_back(pairs)
            for found, optimizer in attached:
                found.leave(optimizer)


def _places(model: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Each parameter of a model, with the modules and names that refer to it."""
    found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    return list(found.values())


def _can_be_cast(parameter: nn.Parameter) -> bool:
    """Whether a parameter has plain values: it is neither another stage's placeholder nor quantized."""
    is_plain = type(parameter.data) is torch.Tensor or hasattr(parameter, "device_mesh")
    return is_plain and not parameter.is_meta and parameter.dtype in _CAST_FROM


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise PrepareError(
                f"MasterWeightsKwargs: {name} ({type(module).__name__}) gives sparse gradients, which fp32 master "
                "weights do not support. Build it with sparse=False, or leave MasterWeightsKwargs out"
            )

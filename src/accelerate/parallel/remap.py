# SPDX-License-Identifier: Apache-2.0
"""Optimizers that were made before their model was laid out: their parameters are replaced, by identity."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import PrepareError
from ..torch_internals.dtensor import as_dtensor
from .materialize import local_shard


class ParameterPlaces:
    """Which module has which parameter, recorded before a layout replaces them."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def replaced(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(former, present) of each parameter that was replaced."""
        now = [(former, getattr(module, name, None)) for module, name, former in self._places]
        return [
            (former, present)
            for former, present in now
            if isinstance(present, nn.Parameter) and present is not former
        ]

    def shared(self) -> list[list[tuple[nn.Module, str]]]:
        """The places of each parameter that had several."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, name, former in self._places:
            places.setdefault(id(former), []).append((module, name))
        return [found for found in places.values() if len(found) > 1]


class Replacements:
    """All replacements of a run. A former parameter is referenced weakly: only its optimizer needs its memory."""

    def __init__(self) -> None:
        self._present = WeakTensorKeyDictionary()

    def add(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Record pairs of (former, present)."""
        for former, present in pairs:
            self._present[former] = present

    def __contains__(self, former: torch.Tensor) -> bool:
        return former in self._present

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The present parameter, after any number of replacements."""
        while (found := self._present.get(parameter)) is not None:
            parameter = found
        return parameter

    def repoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer train the present parameters; its state is laid out as they are."""
        for group in optimizer.param_groups:
            for position, former in enumerate(group["params"]):
                present = self.of(former)
                if present is former:
                    continue
                group["params"][position] = present
                if former in optimizer.state:
                    optimizer.state[present] = lay_out_state(
                        optimizer.state.pop(former), former, present
                    )


def lay_out_state(
    state: dict[str, object], former: torch.Tensor, present: torch.Tensor
) -> dict[str, object]:
    """State of a parameter, each tensor of the parameter's shape in the layout of the present one."""
    if not isinstance(present, DTensor):
        return state

    def move(value: object) -> object:
        if (
            not isinstance(value, torch.Tensor)
            or value.shape != former.shape
            or isinstance(value, DTensor)
        ):
            return value
        shard = local_shard(value, present).to(present.to_local().device).clone()
        return as_dtensor(shard, present)

    return {name: move(value) for name, value in state.items()}


def repoint_all(
    optimizers: Iterable[torch.optim.Optimizer], pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]
) -> None:
    """Make optimizers train the second parameter of each pair instead of the first."""
    replacements = Replacements()
    replacements.add(pairs)
    for optimizer in optimizers:
        replacements.repoint(optimizer)


def check_trains(optimizer: torch.optim.Optimizer, known: set[int]) -> None:
    """Raise PrepareError for an optimizer without a parameter whose id is in `known`: those of prepared models."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if known and stepped and not stepped & known:
        raise trains_nothing(optimizer)


def trains_nothing(optimizer: torch.optim.Optimizer) -> PrepareError:
    """Return the error for an optimizer without parameters of a prepared model."""
    return PrepareError(
        f"no parameter of {type(optimizer).__name__} belongs to a prepared model: it would train nothing. Make the "
        "optimizer from the model's parameters, and prepare both together."
    )

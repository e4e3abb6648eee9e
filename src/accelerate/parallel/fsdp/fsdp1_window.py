# SPDX-License-Identifier: Apache-2.0
"""The gradients of an FSDP1 model in the middle of an accumulation window, to save and to restore them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...core.errors import CheckpointError
from ..materialize import canonical_name
from .fsdp1_unused import ParameterUsage


class FlatGradients:
    """The gradients on this rank: of flattened units, unsharded where none was reduced yet, and of other parameters.

    Args:
        model: the module, sharded or not.
        usage: which parameters of the units have received a gradient; None if the module has no units.
    """

    def __init__(self, model: nn.Module, usage: ParameterUsage | None) -> None:
        self.usage = usage
        self._units = [] if usage is None else usage.units
        inside = {id(p) for unit in self._units for p in (unit.flat, *unit.originals)}
        self._plain = {canonical_name(name): p for name, p in model.named_parameters() if id(p) not in inside}

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients by the position of their unit, or by the name of a parameter outside of the units."""
        found: dict[str, Any] = {name: p.grad for name, p in self._plain.items() if p.grad is not None}
        for number, unit in enumerate(self._units):
            if unit.flat.grad is not None:
                found[f"unit {number}"] = {
                    "gradient": unit.flat.grad,
                    "fresh": unit.fresh,
                    "present": unit.present,
                    "unreduced": unit.unreduced,
                }
        return found

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where a gradient has another size than its unit or parameter."""
        for name, parameter in self._plain.items():
            saved = state.get(name)
            if saved is not None and saved.shape != parameter.shape:
                raise _mismatch(name, list(saved.shape), list(parameter.shape))
        for number, unit in enumerate(self._units):
            saved = state.get(f"unit {number}")
            # Before the first forward it is the shard itself.
            shard = getattr(unit.flat, "_local_shard", unit.flat)
            sizes = (unit.flat._unpadded_unsharded_size.numel(), shard.numel())
            if saved is not None and saved["gradient"].numel() not in sizes:
                raise _mismatch(", ".join(unit.names[:3]), saved["gradient"].numel(), " or ".join(map(str, sizes)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all gradients by those of `state_dict`. Raises what `check_state_dict` raises."""
        self.check_state_dict(state)
        for name, parameter in self._plain.items():
            saved = state.get(name)
            parameter.grad = None if saved is None else saved.to(parameter.device, parameter.dtype)
        for number, unit in enumerate(self._units):
            _restore(unit, state.get(f"unit {number}"))


def _restore(unit: Any, saved: Mapping[str, Any] | None) -> None:
    flat, count = unit.flat, len(unit.fresh)
    unit.fresh = [False] * count if saved is None else list(saved["fresh"])
    unit.present = [False] * count if saved is None else list(saved["present"])
    flat.grad = None
    unit.unreduced = False
    if saved is None:
        for parameter in unit.originals:
            parameter.grad = None
        return
    unit.unreduced = saved.get("unreduced", True)
    gradient = saved["gradient"].to(flat.device)
    # An unsharded gradient has another size than the shard: torch's FSDP1 sets it in this way too.
    flat.grad = torch.empty_like(flat)
    flat.grad.data = gradient
    if not unit.keeps_originals:
        return
    handle = unit.handle
    if handle.uses_sharded_strategy and gradient.shape == flat._local_shard.shape:
        handle._use_sharded_grad_views()
    else:
        handle._use_unsharded_grad_views()


def _mismatch(name: str, saved: object, expected: object) -> CheckpointError:
    return CheckpointError(f"the saved gradient of {name} has size {saved}, here it is {expected}")

# SPDX-License-Identifier: Apache-2.0
"""A forward that writes parameters: under FSDP2 it writes gathered copies, which are freed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...core.errors import PrepareError


def refuse_writes(model: nn.Module) -> None:
    """Have the first training forward of each FSDP2 unit raise PrepareError if it changes a parameter."""
    if dist.get_backend() == dist.Backend.FAKE:
        # A trace has no values.
        return
    plain = {p for p in model.parameters() if not isinstance(p, DTensor)}
    units = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    for name, unit in units.items():
        assert isinstance(unit, nn.Module)
        _FirstForward(name, unit, plain)


class _FirstForward:
    """Compares the parameters of a unit before and after its first training forward.

    Args:
        name: the unit's.
        unit: has the hooks until then.
        unsharded: parameters of the model that are not gathered.
    """

    def __init__(self, name: str, unit: nn.Module, unsharded: set[nn.Parameter]) -> None:
        self.name = name
        self.unsharded = unsharded
        self.before: dict[str, torch.Tensor] = {}
        # FSDP2's hooks gather before the first, and reshard after the second.
        self.handles = [
            unit.register_forward_pre_hook(self._before_forward),
            unit.register_forward_hook(self._after_forward, prepend=True),
        ]

    def _sums(self, unit: nn.Module) -> dict[str, torch.Tensor]:
        sums = {}
        for name, parameter in unit.named_parameters():
            # Those of units inside are sharded; quantized ones have classes of their own.
            is_gathered = type(parameter) is nn.Parameter and parameter not in self.unsharded
            if is_gathered and parameter.is_floating_point():
                sums[name] = parameter.detach().sum(dtype=torch.float32).nan_to_num()
        return sums

    def _before_forward(self, unit: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled():
            self.before = self._sums(unit)

    def _after_forward(self, unit: nn.Module, *_: object) -> None:
        if not self.before:
            return
        after = self._sums(unit)
        for handle in self.handles:
            handle.remove()
        for name, total in self.before.items():
            if name in after and not torch.equal(after[name], total):
                where = f"{self.name}.{name}" if self.name else name
                raise PrepareError(
                    f"the forward of {type(unit).__name__} changes the parameter {where}. Under FSDP2 it has a copy "
                    "of it, gathered for the forward, and the change is lost. Change it after optimizer.step(), or "
                    "put the module that has it into ignored_modules"
                )

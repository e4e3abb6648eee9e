# SPDX-License-Identifier: Apache-2.0
"""Prepared models of DeepSpeed: an engine, or a model without one that does not train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...precision.base import Precision
from ..prepared import GroupShapes, PreparedModel
from .state import EngineState

if TYPE_CHECKING:
    from .engine import Engine


class EngineModel(PreparedModel):
    """A DeepSpeed engine. `state` takes and loads its full state."""

    is_partial = True

    module: Engine

    def __init__(self, engine: Engine, precision: Precision, state: EngineState) -> None:
        super().__init__(engine, precision)
        self.state = state

    @property
    def inner(self) -> nn.Module:
        """The module inside of the engine."""
        return self.module.module

    @property
    def template(self) -> nn.Module:
        """The user's names and shapes, which ZeRO's parameters do not have."""
        return self.state.skeleton

    def state_dict(self) -> dict[str, Any]:
        """The weights that the engine computes with. Raises ValueError if stage 3 is not configured to gather them."""
        return self.state.computing_weights()

    def checkpoint_state_dict(self) -> dict[str, Any]:
        """The full state with the optimizer's fp32 weights: on the host of rank 0, empty on the other ranks."""
        return self.state.model_state()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which every rank has."""
        self.state.load_model_state(state, strict)

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the engine made this optimizer."""
        return getattr(self.module, "optimizer", None) is optimizer

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state as that of a single process: on rank 0, empty on the other ranks."""
        return self.state.optimizer_state()

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load the optimizer state of a single process, which every rank has."""
        self.state.load_optimizer_state(state)

    def optimizer_group_shapes(self, optimizer: torch.optim.Optimizer) -> GroupShapes:
        """Names and shapes in each group, as the optimizer had them before ZeRO."""
        return self.state.groups()

    def release(self) -> None:
        """Free the engine's memory and hooks."""
        self.module.destroy()


class UntrainedModel(PreparedModel):
    """A model that does not train, next to an engine: each process has all of it, and sends nothing for it."""

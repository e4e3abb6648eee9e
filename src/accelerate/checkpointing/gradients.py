# SPDX-License-Identifier: Apache-2.0
"""Gradients of an accumulation window that is not complete: each rank's own, so that a resumed window adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.errors import CheckpointError


class OpenWindow:
    """What an accumulation window that is not complete holds on this rank: its gradients, and its count of items."""

    def __init__(self, gradients: PendingGradients, items: Any) -> None:
        self.gradients = gradients
        self.items = items

    def state_dict(self) -> dict[str, Any]:
        return {"gradients": self.gradients.state_dict(), "items": self.items.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gradients.load_state_dict(state["gradients"])
        self.items.load_state_dict(state["items"])


class PendingGradients:
    """The gradients of models in the middle of a window: the `rank_state` of a `RunState`.

    `pending` says whether there is such a window now; at the end of one nothing is saved. Not for sharded models.
    """

    def __init__(self, models: Sequence[torch.nn.Module], pending: Callable[[], bool]) -> None:
        self.models = list(models)
        self.pending = pending

    def state_dict(self) -> dict[str, Any]:
        if not self.pending():
            return {}
        return {
            f"{index}.{name}": parameter.grad
            for index, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put the gradients back; parameters that had none lose theirs. Raises CheckpointError for another shape."""
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                saved = state.get(f"{index}.{name}")
                if saved is not None and saved.shape != parameter.shape:
                    raise CheckpointError(
                        f"the saved gradient of {name} has shape {list(saved.shape)}, the parameter "
                        f"{list(parameter.shape)}"
                    )
                parameter.grad = None if saved is None else saved.to(parameter.device, parameter.dtype)

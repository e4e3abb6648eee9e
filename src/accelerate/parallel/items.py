# SPDX-License-Identifier: Apache-2.0
"""Losses that are means: the gradient of an accumulation window is the mean over all its items, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import AccelerateError, ConfigurationError
from ..runtime.step_exchange import StepExchange
from .base import Strategy


class ItemWindow:
    """Weighs each backward of an accumulation window by its items (tokens, samples).

    A loss that is a mean over n items is multiplied by n, so that gradients accumulate sums. At the step that
    synchronizes, the number of items of the window is summed over the ranks that average gradients while the backward
    runs, and one fused multiply turns sums into the mean over all items of the window on all of them. No look-ahead
    is needed.

    Counts are divided by a reference (the first batch's mean count over those ranks), which keeps the gradients in the
    range that they have without counts: fp16 scaling and compressed reductions depend on it.

    Args:
        strategy: the layout, which averages the gradients.
        exchange: sums the counts of the ranks.

    Attributes:
        spent: the gradients are those of a whole window. The step that uses them sets it to False.
    """

    def __init__(self, strategy: Strategy, exchange: StepExchange) -> None:
        self.strategy = strategy
        self.exchange = exchange
        self.reference: torch.Tensor | None = None
        self.count: torch.Tensor | None = None
        self.spent: bool = False
        exchange.register("reference", _first)

    def backward(
        self,
        loss: torch.Tensor,
        num_items: int | float | torch.Tensor,
        sync: bool,
        models: Iterable[torch.nn.Module],
        **kwargs: Any,
    ) -> None:
        """Backward of a mean over `num_items` (0 for none at all); scales the gradients of `models` where `sync`."""
        if self.spent:
            raise AccelerateError(
                "backward(loss, num_items=...) was called twice for one optimizer step, but its "
                "gradients are already a mean over the window's items. Add up the losses and "
                "call backward once per batch."
            )
        items = self._as_count(num_items, loss.device)
        if self.reference is None:
            self.reference = self._agree(items)
        self.count = items if self.count is None else self.count + items
        weighted = loss * (items / self.reference).to(loss.dtype)
        if not sync:
            self.strategy.backward_items(weighted, **kwargs)
            return
        reference = self.reference
        wait_for_total = self._sum(self.count)

        def factor() -> torch.Tensor:
            total = wait_for_total()
            # A window without items has no gradient; what it accumulated is zero.
            return torch.where(total > 0, reference * self.strategy.gradient_ranks / total, 0.0)

        self.strategy.backward_items(weighted, factor, models, **kwargs)
        self.count, self.spent = None, True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The open window's count of this rank, and the reference that the run's gradients are divided by."""
        window = {"count": self.count, "reference": self.reference}
        return {name: value for name, value in window.items() if value is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.reference = state.get("count"), state.get("reference")
        self.spent = False

    def share_reference(self) -> None:
        """Have the reference of the other ranks after a loop in which this one may have had no batch."""
        reference = None if self.reference is None else float(self.reference)
        shared = self.exchange.collect("reference", reference)
        if self.reference is None and shared is not None:
            self.reference = self._as_count(shared, self.strategy.device)

    def _sum(self, count: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum `count` over the ranks that average gradients. Returns a function that waits for the sum."""
        if self.strategy.gradient_ranks == 1:
            return lambda: count
        return self.exchange.sum_items(count, self.strategy.gradient_group)

    def _agree(self, items: torch.Tensor) -> torch.Tensor:
        total = self._sum(items)()
        return (total / self.strategy.gradient_ranks).clamp(min=1.0)

    @staticmethod
    def _as_count(num_items: int | float | torch.Tensor, device: torch.device) -> torch.Tensor:
        # Counts of tokens pass 2**24 in a window: double precision wherever the device has it.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if isinstance(num_items, torch.Tensor):
            if num_items.numel() != 1:
                raise ConfigurationError(
                    "backward(loss, num_items=...) takes one number, and num_items is a tensor of "
                    f"shape {list(num_items.shape)}: pass its sum"
                )
            return num_items.detach().reshape(()).to(device=device, dtype=dtype)
        count = float(num_items)
        if not 0 <= count < math.inf:
            raise ConfigurationError(
                "backward(loss, num_items=...) takes the number of items that the loss is a mean "
                f"over, which {num_items} cannot be"
            )
        return torch.tensor(count, device=device, dtype=dtype)


def _first(references: Mapping[int, float | None]) -> float | None:
    for reference in references.values():
        if reference is not None:
            return reference
    return None


def global_loss(
    strategy: Strategy, loss: torch.Tensor | float | None
) -> torch.Tensor | float | None:
    """The mean of each rank's loss over the ranks that average gradients; None stays None."""
    if loss is None or strategy.gradient_ranks == 1:
        return loss
    mean = torch.as_tensor(loss, device=strategy.device).detach().clone()
    dist.all_reduce(mean, group=strategy.gradient_group)
    mean /= strategy.gradient_ranks
    if isinstance(loss, torch.Tensor):
        return mean
    return mean.item()

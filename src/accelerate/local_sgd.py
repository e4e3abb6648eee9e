# SPDX-License-Identifier: Apache-2.0
"""Local SGD: each process trains separately, and parameters are averaged at intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import collectives
from .core.lazy import public_names


class LocalSGD:
    """A context in which gradients are not synchronized. Parameters are averaged at intervals.

    Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019).

    Args:
        accelerator: the accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: calls of `step` between two averages. In an accumulation window each batch makes one.
        enabled: False turns the context off.

    Raises:
        ValueError: `local_sgd_steps` is less than 1.
        NotImplementedError: the strategy does not keep a full replica of the model on each process.

    Example:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    local_sgd.step()
    """

    def __init__(
        self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps={local_sgd_steps} must be at least 1")
        self.enabled: bool = enabled and accelerator.use_distributed
        if self.enabled and not accelerator.strategy.has_replicas:
            raise NotImplementedError(
                "LocalSGD averages full replicas of the model, but with "
                f"{accelerator.strategy.name} a process does not hold one: use DDP, or train "
                "without LocalSGD"
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps: int = 0
        self._no_sync: Any = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            if error[0] is None:
                self._average()
            self._no_sync.__exit__(*error)

    def step(self) -> None:
        """Count a batch, and average the parameters after every `local_sgd_steps` of them."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        accelerator = self.accelerator
        accelerator.wait_for_everyone()
        contexts = [accelerator.prepared_model(self.model).swappable()]
        with (
            torch.no_grad(),
            accelerator.precision.swap_in_master_weights([self.model], [], contexts),
        ):
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            means = collectives.reduce([p.data for p in parameters], "mean")
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.data.copy_(mean)


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

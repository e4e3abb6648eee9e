# SPDX-License-Identifier: Apache-2.0
"""What both versions of FSDP share: the mixed-precision policy, checks, and parameters that FSDP does not shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...core.errors import ConfigurationError, PrepareError
from ...precision.base import Precision
from ..base import Strategy
from ..prepared import CommunicationVolume
from .units import find_modules


def fill_policy(plugin: FullyShardedDataParallelPlugin, version: int, precision: Precision) -> bool:
    """Set the run's mixed-precision policy on a plugin without one; returns whether outputs are converted to fp32.

    They are, as under the other strategies, unless the user gave a policy.
    Raises ConfigurationError for a plugin of the other version.
    """
    if plugin.fsdp_version != version:
        raise ConfigurationError(f"fsdp_version={plugin.fsdp_version} is not FSDP{version}")
    full_outputs = precision.native_amp and (plugin.mixed_precision_policy is None or plugin.policy_is_filled)
    if precision.native_amp and plugin.mixed_precision_policy is None:
        plugin.set_mixed_precision(precision.name)
        plugin.policy_is_filled = True
    return full_outputs


def refuse_unshardable(model: torch.nn.Module, layout: str, ignored: Any) -> None:
    """Raise PrepareError for parameters that torch's FSDP cannot shard, or whose gradients it cannot reduce."""
    skipped = {id(parameter) for module in find_modules(model, ignored) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and id(parameter) not in skipped:
            raise PrepareError(
                f"{name} is a scalar (a parameter without dimensions), which {layout} does not shard. Give it one "
                "dimension of one element (torch.tensor([value])), or put its module into ignored_modules"
            )
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or not module.sparse:
            continue
        if module.weight.requires_grad:
            raise PrepareError(
                f"{name} ({type(module).__name__}) gives sparse gradients, which {layout} does not reduce. Build it "
                "with sparse=False"
            )


class UnshardedParameters:
    """A model's trainable parameters that FSDP does not shard: averages their gradients over `group` (None: all)."""

    def __init__(self, group: dist.ProcessGroup | None, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.group = group
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_deferred = False

    def communication_volume(self) -> list[CommunicationVolume]:
        """What averaging sends in an optimizer step: a message a parameter."""
        if not self.parameters:
            return []
        sent = sum(parameter.nbytes for parameter in self.parameters)
        return [CommunicationVolume("all-reduce of gradients of unsharded parameters", len(self.parameters), sent)]

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A block whose backwards leave the gradients of these parameters as they are."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def average(self) -> None:
        """Average the gradients over the group, unless they are deferred."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self._is_deferred or not gradients:
            return
        ranks = dist.get_world_size(self.group)
        if ranks == 1:
            return
        pending = [dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in gradients]
        for work in pending:
            work.wait()
        torch._foreach_div_(gradients, float(ranks))


class AveragesUnsharded(Strategy):
    """Averages the gradients of parameters that FSDP leaves unsharded (`PreparedModel.unsharded`) after a backward."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The backward, and then the average of gradients that FSDP does not reduce."""
        super().backward(loss, **kwargs)
        for prepared in self.prepared:
            unsharded: UnshardedParameters | None = getattr(prepared, "unsharded", None)
            if unsharded is not None:
                unsharded.average()

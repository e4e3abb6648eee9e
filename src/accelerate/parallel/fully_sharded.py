# SPDX-License-Identifier: Apache-2.0
"""What both versions of fully sharded data parallelism have in common: the plugin's precision, what stays whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..config.fsdp import FullyShardedDataParallelPlugin
from ..core.errors import ConfigurationError, PrepareError
from ..parallelism_config import ParallelismConfig
from ..precision.base import Precision
from .base import Strategy, Traffic
from .units import find_modules
from .whole import WholeParameters


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


class FullySharded(Strategy):
    """A first base, before the strategy that lays parameters out.

    `plugin` is this strategy's own: its policy of precision is filled in where it has none.
    """

    version = 2
    whole: WholeParameters
    # The ranks that average gradients with each other; None for all.
    copies: dist.ProcessGroup | None = None

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        if plugin.fsdp_version != self.version:
            raise ConfigurationError(f"fsdp_version={plugin.fsdp_version} is not FSDP{self.version}")
        self.plugin = plugin
        # The whole model's output, as under the other strategies, is fp32 unless the user's own policy says else.
        self.full_outputs = precision.native_amp and (plugin.mixed_precision_policy is None or plugin.policy_is_filled)
        if precision.native_amp and plugin.mixed_precision_policy is None:
            plugin.set_mixed_precision(precision.name)
            plugin.policy_is_filled = True
        self.spread(device, precision, parallelism)

    def spread(self, device: torch.device, precision: Precision, parallelism: ParallelismConfig | None) -> None:
        """Find the ranks that a model lies on: the rest of the constructor. Raises ConfigurationError."""
        super().__init__(device, precision)
        self.whole = WholeParameters(self.copies)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        self.whole.average()

    def traffic(self, model: torch.nn.Module, backwards: int) -> list[Traffic]:
        return [*(super().traffic(model, backwards) or []), *self.whole.traffic(self.unwrap(model))]

    def reduce_items(self, count: torch.Tensor) -> Any:
        return dist.all_reduce(count, group=self.copies, async_op=True)

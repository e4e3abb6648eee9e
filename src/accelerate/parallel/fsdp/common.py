# SPDX-License-Identifier: Apache-2.0
"""What both versions of fully sharded data parallelism share: the plugin's mixed precision, unsharded parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...core.errors import ConfigurationError, PrepareError
from ...precision.base import Precision
from ..base import Strategy
from .units import find_modules
from .unsharded import UnshardedParameters


def fill_policy(plugin: FullyShardedDataParallelPlugin, version: int, precision: Precision) -> bool:
    """Give a plugin without a mixed-precision policy that of the run; whether the model's output is to be fp32.

    The output is fp32 as under the other strategies, unless the user gave a policy that says otherwise. Raises
    ConfigurationError for a plugin of the other version.
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


class AveragesUnsharded(Strategy):
    """Averages the gradients of parameters that FSDP leaves unsharded (`PreparedModel.unsharded`) after a backward."""

    # The ranks that average gradients with each other; None for all.
    replica_group: dist.ProcessGroup | None = None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        for prepared in self.prepared:
            unsharded: UnshardedParameters | None = getattr(prepared, "unsharded", None)
            if unsharded is not None:
                unsharded.average()

    def reduce_items(self, count: torch.Tensor) -> Any:
        return dist.all_reduce(count, group=self.replica_group, async_op=True)

# SPDX-License-Identifier: Apache-2.0
"""`zero_grad` of a model that FSDP2 shards, between a forward and its backward: the shards have the gradients.

torch keeps the outermost unit unsharded between them, so `parameters()` are then other tensors than the optimizer's.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..report.communication import shard_groups


def clear_shards(model: nn.Module) -> None:
    """Let `zero_grad` of the FSDP2 units of a model clear the gradients of shards, too."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            kind: Any = type(module)
            kind.zero_grad = _zero_grad


def _zero_grad(unit: Any, set_to_none: bool = True) -> None:
    super(FSDPModule, unit).zero_grad(set_to_none)
    for _, group, _ in shard_groups(unit):
        for shard in group.fsdp_params:
            gradient = shard.sharded_param.grad
            if set_to_none:
                shard.sharded_param.grad = None
            elif gradient is not None:
                gradient.detach_().zero_()

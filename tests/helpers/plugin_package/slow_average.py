# SPDX-License-Identifier: Apache-2.0
"""A package of somebody else's: a strategy, a transform and a precision that it registers by entry points."""

import torch
import torch.distributed as dist

from accelerate.parallel.base import Strategy
from accelerate.precision.base import Precision


class SlowAverage(Strategy):
    """Each process trains on its own part of the data; parameters are averaged after every optimizer step."""

    name = "slow average"

    def __init__(self, device, precision):
        super().__init__(device, precision)
        self.after_step = (self.average,)

    @property
    def data_shard(self):
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def average(self):
        if self.data_shard[1] == 1:
            return
        for parameter in (p for model in self.prepared for p in model.module.parameters()):
            dist.all_reduce(parameter.data)
            parameter.data /= self.data_shard[1]


class FreezeEmbeddings:
    """Embeddings are not trained."""

    before_layout = True

    def apply(self, model):
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.requires_grad_(False)
        return model


class Double(Precision):
    """Everything in float64."""

    name = "double"

    def __init__(self, device):
        self.device = device

    def wrap_forward(self, model):
        return model.double()

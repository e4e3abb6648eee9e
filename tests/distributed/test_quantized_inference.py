# SPDX-License-Identifier: Apache-2.0
"""Weights quantized by torchao under FSDP2: whole for evaluation, refused by name where they would be sharded."""

import copy

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate import Accelerator, PartialState
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.core.errors import PrepareError
from accelerate.core.imports import is_available

PRELOADED = ("torchao.float8",)
pytestmark = pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")


@on_ranks(2)
def test_quantized_weights_under_fsdp2():
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).eval()
    quantize_(model[0], Int8WeightOnlyConfig())
    quantize_(model[1], Float8WeightOnlyConfig())
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = model(x)
    whole, partly = copy.deepcopy(model), copy.deepcopy(model)
    if PartialState(cpu=True).process_index:
        # What is not sharded gets the values of rank 0 all the same.
        partly[0].weight.qdata.zero_()
        partly[1].weight.scale.zero_()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="0|1")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    evaluated = accelerator.prepare_model(whole, evaluation_mode=True)
    sharded = accelerator.prepare_model(partly)
    assert isinstance(sharded[2].weight, DTensor)
    with torch.no_grad():
        assert torch.equal(evaluated(x), expected)
        assert torch.equal(sharded(x), expected)
    quantize_(model[2], Int8WeightOnlyConfig())
    with pytest.raises(PrepareError, match=r"2\.weight is a Int8Tensor, .*torchao.* FSDP2"):
        accelerator.prepare_model(model)

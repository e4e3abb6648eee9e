# SPDX-License-Identifier: Apache-2.0
"""Weights quantized by torchao under FSDP2: whole for evaluation, refused by name where they would be sharded."""

import copy

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.core.errors import PrepareError
from accelerate.core.imports import is_available

PRELOADED = ("torchao.quantization",)
pytestmark = pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")


@on_ranks(2)
def test_quantized_weights_under_fsdp2():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    quantize_(model[0], Int8WeightOnlyConfig())
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = model(x)
    whole, partly = copy.deepcopy(model), copy.deepcopy(model)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=[partly[0]])
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    evaluated = accelerator.prepare_model(whole, evaluation_mode=True)
    sharded = accelerator.prepare_model(partly)
    with torch.no_grad():
        assert torch.equal(evaluated(x), expected)
        torch.testing.assert_close(sharded(x), expected, rtol=0, atol=0)
    with pytest.raises(PrepareError, match=r"0\.weight is a Int8Tensor, quantized by torchao, which FSDP2 does not"):
        accelerator.prepare_model(model)

# SPDX-License-Identifier: Apache-2.0
"""What `explain` reports of an engine: its stage, its parameters, and their memory."""

import contextlib
import io

import pytest
import torch
from deepspeed_runs import LATE_IMPORTS, config, fresh, needs_deepspeed, on_engine_ranks
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.parallel.report.models import memory_usage

PRELOADED = LATE_IMPORTS
pytestmark = needs_deepspeed


@on_engine_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_report_of_a_stage(stage):
    plugin = DeepSpeedPlugin(
        hf_ds_config=config(stage, train_micro_batch_size_per_gpu=2, bf16={"enabled": True})
    )
    accelerator = fresh(plugin)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 8))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum())
    with contextlib.redirect_stdout(io.StringIO()):
        report = accelerator.explain()
    assert report.find("model: Sequential", "(model)") == f"DeepSpeed engine, ZeRO stage {stage}"
    assert report.find("model: Sequential", "parameters").startswith(f"{numbers:,} in bfloat16")
    usage = memory_usage([accelerator.prepared_model(model)], [optimizer.optimizer], windows=False)
    # Each rank steps one half in fp32; DeepSpeed aligns the halves.
    assert 4 * numbers / 2 <= usage["master weights"] <= 4 * numbers / 2 + 64
    accelerator.free_memory()

# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines of every ZeRO stage against the plain loop, in float32."""

import pytest
import torch
from deepspeed_runs import (
    ADAMW,
    LATE_IMPORTS,
    config,
    import_deepspeed,
    needs_deepspeed,
    on_engine_ranks,
)
from torch import nn
from windows import ACCUMULATION, CLIP, squared_error, train_by_hand

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.core.errors import PrepareError
from accelerate.parallel.deepspeed import requirements
from accelerate.parallel.deepspeed.engine import DeepSpeedEngineWrapper, start_engine
from accelerate.parallel.deepspeed.requirements import EngineRequest
from accelerate.parallel.placeholders import DummyOptim, DummyScheduler
from accelerate.state import PartialState

GLOBAL_BATCH, STEPS = 8, 10
PRELOADED = LATE_IMPORTS
pytestmark = needs_deepspeed


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS * ACCUMULATION):
        yield (
            torch.randn(GLOBAL_BATCH, 4, generator=generator),
            torch.randn(GLOBAL_BATCH, 2, generator=generator),
        )


def settings_of(stage, from_config):
    settings = config(stage, CLIP, {"reduce_bucket_size": 1000}, zero_allow_untested_optimizer=True)
    if from_config:
        settings["optimizer"] = ADAMW
        warmup = {"warmup_min_lr": 0.01, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        settings["scheduler"] = {"type": "WarmupLR", "params": warmup}
    return settings


@on_engine_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_matches_single_process(stage):
    deepspeed, state = import_deepspeed(), PartialState(cpu=True)
    deepspeed.init_distributed("gloo")
    reference = make()
    by_hand = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.01)
    states, norms = train_by_hand(reference, by_hand, batches(), squared_error)
    from_config = stage % 2 == 1
    plugin = DeepSpeedPlugin(hf_ds_config=settings_of(stage, from_config), zero3_init_flag=False)
    model = make()
    if from_config:
        optimizer = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.01)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=5)
    else:
        optimizer, scheduler = (
            torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01),
            None,
        )
    world = state.num_processes
    engine, optimizer, scheduler = start_engine(
        plugin, model, optimizer, scheduler, micro_batch_size=GLOBAL_BATCH // world,
        gradient_accumulation_steps=ACCUMULATION, world_size=world,
    )  # fmt: skip
    assert plugin.get_value("train_batch_size") == GLOBAL_BATCH * ACCUMULATION
    driver = DeepSpeedEngineWrapper(engine)
    for number, (x, y) in enumerate(batches()):
        x, y = x.chunk(world)[state.process_index], y.chunk(world)[state.process_index]
        driver.backward(
            nn.functional.mse_loss(engine(x), y), sync_gradients=number % ACCUMULATION == 1
        )
        optimizer.step()
        optimizer.zero_grad()
        # Without ZeRO the engine reports no norm.
        if number % ACCUMULATION and stage:
            expected = float(norms[number // ACCUMULATION])
            torch.testing.assert_close(driver.get_global_grad_norm(), expected, rtol=1e-4, atol=0)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        torch.testing.assert_close(dict(model.named_parameters()), states[-1], rtol=0, atol=1e-5)
    assert not optimizer.step_was_skipped
    engine.destroy()


def test_a_placeholder_without_a_config_is_refused():
    with pytest.raises(PrepareError, match="DummyOptim stands for"):
        requirements.check(EngineRequest(DeepSpeedPlugin(), [make()], [DummyOptim([])], [], [1]))

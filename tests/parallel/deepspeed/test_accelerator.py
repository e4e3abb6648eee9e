# SPDX-License-Identifier: Apache-2.0
"""A run through the ZeRO stages, each resuming what the last one saved, against the plain loop in float32."""

import deepspeed_runs
import pytest
import torch
from deepspeed_runs import ADAMW, LATE_IMPORTS, fresh, needs_deepspeed, on_engine_ranks
from layouts import compare
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from windows import ACCUMULATION, CLIP, squared_error, train_by_hand

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.core.errors import PrepareError
from accelerate.parallel.placeholders import DummyOptim, DummyScheduler

STEPS, GLOBAL_BATCH = 10, 8
# (ZeRO stage or None for plain DDP, whether the file has the optimizer, whether ZeRO 3 gathers 16-bit weights to save)
PARTS = [
    (0, False, False),
    (1, True, False),
    (2, False, False),
    (3, False, True),
    (3, True, False),
    (None, False, 0),
]
PRELOADED = LATE_IMPORTS
pytestmark = needs_deepspeed


class Model(nn.Module):
    """Ends that are tied, a buffer, shapes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 7)
        self.last = nn.Linear(5, 7, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return nn.functional.linear(self.scale * self.middle(x), self.last.weight.t())


def make_model():
    torch.manual_seed(0)
    return Model()


def data(part):
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(STEPS * ACCUMULATION * GLOBAL_BATCH, 5, generator=generator)
    return TensorDataset(x, torch.randn(len(x), 5, generator=generator))


def groups(model):
    weights, biases = (
        [p for p in model.parameters() if (p.dim() < 2) is vector] for vector in (False, True)
    )
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


def make_optimizer(model):
    return torch.optim.AdamW(groups(model), lr=0.01, weight_decay=0.01)


def reference(parts):
    model = make_model()
    optimizer = make_optimizer(model)
    loaders = [DataLoader(data(part), GLOBAL_BATCH) for part in range(parts)]
    runs = [train_by_hand(model, optimizer, loader, squared_error) for loader in loaders]
    return [(states[-1], norms) for states, norms in runs]


def config(stage, zero=None, **others):
    return deepspeed_runs.config(
        stage, CLIP, {"reduce_bucket_size": 1000, **(zero or {})}, **others
    )


def make_accelerator(plugin, **others):
    return fresh(plugin, gradient_accumulation_steps=ACCUMULATION, **others)


def run(part, settings, folder, expected):
    """One part of the run; the stage of its plugin is None for plain DDP."""
    stage, dummy, gather = settings
    zero = {"stage3_gather_16bit_weights_on_model_save": gather}
    others = {"optimizer": ADAMW} if dummy else {}
    plugin = (
        None if stage is None else DeepSpeedPlugin(hf_ds_config=config(stage, zero=zero, **others))
    )
    accelerator = make_accelerator(plugin)
    model = make_model()
    optimizer = (
        DummyOptim(groups(model), lr=0.01, weight_decay=0.01) if dummy else make_optimizer(model)
    )
    loader = DataLoader(data(part), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if part:
        accelerator.load_state(folder / f"part{part - 1}")
    weights, norms = expected[part]
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(squared_error(model, batch))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                if stage != 0:  # without ZeRO the engine reports no norm
                    torch.testing.assert_close(
                        float(norm), float(norms[number // ACCUMULATION]), rtol=1e-3, atol=0
                    )
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(folder / f"part{part}")
    compare(
        accelerator.prepared_model(model).checkpoint_state_dict(), weights, 1e-5, f"stage {stage}"
    )
    if stage == 3 and not gather:
        with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save"):
            accelerator.get_state_dict(model)
    elif stage is not None:
        state = accelerator.get_state_dict(model)
        assert stage == 3 or set(state) == set(weights)
        accelerator.save_model(model, folder / f"weights{part}")
    assert type(accelerator.unwrap_model(model)) is Model
    accelerator.free_memory()
    assert accelerator.deepspeed_engine_wrapped is None


@on_engine_ranks(2, thorough=[1])
def test_a_run_resumes_through_all_stages(tmp_path):
    expected = reference(len(PARTS))
    for number, part in enumerate(PARTS):
        run(number, part, tmp_path, expected)


@on_engine_ranks(2)
def test_the_selected_plugin_makes_the_engine_and_a_schedule_moves_with_it():
    plugins = {
        name: DeepSpeedPlugin(hf_ds_config=config(stage)) for name, stage in (("a", 2), ("b", 1))
    }
    accelerator = make_accelerator(plugins)
    assert accelerator.deepspeed_plugin is plugins["a"]
    accelerator.state.select_deepspeed_plugin("b")
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data(0), batch_size=2)
    with pytest.raises(PrepareError, match="2 models"):
        accelerator.prepare(model, make_model(), optimizer, loader)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert model.zero_optimization_stage() == 1
    for _, batch in zip(range(4), loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(squared_error(model, batch))
            optimizer.step()
            scheduler.step()
    # As with any other layout the schedule of one process moves once for each process.
    assert scheduler.get_last_lr() == pytest.approx(
        [0.01 / (1 + 2 * accelerator.num_processes)] * 2
    )
    accelerator.free_memory()

    warmup = {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    }
    accelerator = make_accelerator(
        DeepSpeedPlugin(hf_ds_config=config(2, optimizer=ADAMW, scheduler=warmup))
    )
    model = make_model()
    optimizer = DummyOptim(model.parameters(), lr=0.01)
    prepared = accelerator.prepare(
        model, optimizer, DummyScheduler(optimizer, warmup_num_steps=10), loader
    )
    assert [type(obj).__name__ for obj in prepared[:3]] == [
        "DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper",
    ]  # fmt: skip
    accelerator.free_memory()


@on_engine_ranks(2)
def test_zero3_init_is_on_inside_its_context_alone():
    fresh()
    plugin = DeepSpeedPlugin(hf_ds_config=config(3), zero3_init_flag=True)
    for enable in (False, True):
        with plugin.zero3_init_context_manager(enable=enable):
            assert hasattr(nn.Linear(4, 4).weight, "ds_id") is enable is plugin.zero3_init_flag
    assert plugin.zero3_init_flag


@on_engine_ranks(2)
def test_the_precision_is_the_files_and_what_contradicts_the_file_is_refused():
    accelerator = make_accelerator(DeepSpeedPlugin(hf_ds_config=config(1, bf16={"enabled": True})))
    assert accelerator.mixed_precision == "bf16"
    loader = DataLoader(data(0), batch_size=2)
    for options, objects, message in (
        (
            {"gradient_accumulation_steps": 4},
            3,
            "gradient_accumulation_steps=4, but Accelerator has 2",
        ),
        (
            {"train_micro_batch_size_per_gpu": 3},
            3,
            "train_micro_batch_size_per_gpu=3, but the loaders have batches of 2",
        ),
        ({"train_batch_size": 7}, 3, "train_batch_size=7 vs arg"),
        ({}, 2, "requires you to pass at least one"),
        ({}, 1, "ZeRO stage 2 needs an optimizer"),
    ):
        accelerator = make_accelerator(DeepSpeedPlugin(hf_ds_config={**config(2), **options}))
        model = make_model()
        listed = (
            [model, make_optimizer(model), loader][:objects] if objects > 1 else [model, loader]
        )
        with pytest.raises(ValueError, match=message):
            accelerator.prepare(*listed)


@on_engine_ranks(2)
@pytest.mark.parametrize("check", [None, True])
def test_bf16_gradients_that_overflow_skip_the_step_where_the_file_says_so(check):
    bf16 = {"enabled": True, **({} if check is None else {"check_grad_overflow": check})}
    accelerator = fresh(DeepSpeedPlugin(hf_ds_config=config(1, bf16=bf16)))
    model = nn.Linear(5, 5)
    loader = DataLoader(data(0), batch_size=2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), loader
    )
    x, y = (item.bfloat16() for item in next(iter(loader)))
    accelerator.backward(nn.functional.mse_loss(model(x), y) * float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped is (check is True)
    assert torch.isfinite(model.module.weight).all().item() is (check is True)

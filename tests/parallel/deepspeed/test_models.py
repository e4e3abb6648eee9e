# SPDX-License-Identifier: Apache-2.0
"""Two models that train and one that does not, schedules by a callable, transformers under ZeRO 3."""

import functools
import json

import layouts
import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import (
    ADAMW,
    LATE_IMPORTS,
    config,
    fresh,
    import_deepspeed,
    needs_deepspeed,
    on_engine_ranks,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.parallel.placeholders import DummyOptim, DummyScheduler
from accelerate.state import PartialState

GLOBAL_BATCH, STEPS, CLIP = 8, 6, 0.1
PRELOADED = (*LATE_IMPORTS, "transformers.models.llama.modeling_llama")
pytestmark = needs_deepspeed


def make(seed, width=7):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)


def samples():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(STEPS * GLOBAL_BATCH, 5, generator=generator))


config = functools.partial(config, clip=CLIP)


def compare(accelerator, model, expected, what):
    layouts.compare(accelerator.prepared_model(model).checkpoint_state_dict(), expected, 1e-5, what)


@on_engine_ranks(2)
def test_two_models_train_and_a_third_answers():
    """Each follows its teacher's answers and the other's; a third model, partitioned, only answers."""
    teacher, first, second = make(2), make(0), make(1, 9)
    optimizers = [adamw(first), adamw(second)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
    for (x,) in DataLoader(samples(), batch_size=GLOBAL_BATCH):
        aim = teacher(x).detach()
        for model, optimizer, target in (
            (first, optimizers[0], aim),
            (second, optimizers[1], first(x).detach()),
        ):
            nn.functional.mse_loss(model(x), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if model is first:
                schedule.step()

    offloaded = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    plugins = {
        "first": DeepSpeedPlugin(hf_ds_config=config(2, optimizer=ADAMW)),
        "second": DeepSpeedPlugin(
            hf_ds_config=config(3, zero={**offloaded, "stage3_param_persistence_threshold": 0})
        ),
        "teacher": DeepSpeedPlugin(hf_ds_config=config(3)),
    }
    one = fresh(plugins)
    # Another of the same run: it takes the plugins that are known.
    two = Accelerator(cpu=True)
    model = make(0)
    dummy = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.01)
    # The engine's optimizer exists only now: a callable makes the schedule for it.
    by_callable = DummyScheduler(
        dummy, lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
    )
    loader = DataLoader(samples(), batch_size=GLOBAL_BATCH // one.num_processes)
    a, a_optimizer, a_schedule, loader = one.prepare(model, dummy, by_callable, loader)
    two.state.select_deepspeed_plugin("second")
    plugins["second"].deepspeed_config["train_micro_batch_size_per_gpu"] = (
        GLOBAL_BATCH // one.num_processes
    )
    model = make(1, 9)
    b, b_optimizer = two.prepare(model, adamw(model))
    two.state.select_deepspeed_plugin("teacher")
    plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = (
        GLOBAL_BATCH // one.num_processes
    )
    answering = one.prepare(make(2))
    assert [engine.zero_optimization_stage() for engine in (a, b, answering)] == [2, 3, 3]
    assert one.deepspeed_engine_wrapped.engine is a and two.deepspeed_engine_wrapped.engine is b
    for (x,) in loader:
        with torch.no_grad():
            aim = answering(x)
        target = a(x).detach()
        one.backward(nn.functional.mse_loss(a(x), aim))
        a_optimizer.step()
        a_schedule.step()
        a_optimizer.zero_grad()
        two.backward(nn.functional.mse_loss(b(x), target))
        b_optimizer.step()
        b_optimizer.zero_grad()
    compare(one, a, first.state_dict(), "first")
    compare(two, b, second.state_dict(), "second")
    compare(one, answering, teacher.state_dict(), "teacher")
    for accelerator in (one, two):
        accelerator.free_memory()


@on_engine_ranks(2)
def test_a_model_of_transformers_is_loaded_in_shards(tmp_path):
    """A model of transformers is loaded in parts, each rank its own, and trains from a file's configuration."""
    import_deepspeed()
    PartialState(cpu=True)
    transformers = pytest.importorskip("transformers")
    LlamaConfig, LlamaForCausalLM = transformers.LlamaConfig, transformers.LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(shape)
    if PartialState().is_main_process:
        plain.save_pretrained(tmp_path / "llama")
        (tmp_path / "ds.json").write_text(json.dumps(config(3, zero={
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True,
        })))  # fmt: skip
    dist.barrier()
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    torch.manual_seed(3)
    ids = torch.randint(0, 32, (4, GLOBAL_BATCH, 6))
    optimizer = adamw(plain)
    for batch in ids:
        plain(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    plugin = DeepSpeedPlugin(hf_ds_config=str(tmp_path / "ds.json"))
    assert plugin.is_zero3_init_enabled()
    accelerator = fresh(plugin)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    assert all(hasattr(p, "ds_id") and p.ds_tensor.numel() < p.ds_numel for p in model.parameters())
    mine = GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(TensorDataset(ids.flatten(0, 1)), batch_size=mine)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    filled = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
    assert (filled["reduce_bucket_size"], filled["stage3_param_persistence_threshold"]) == (
        16 * 16,
        10 * 16,
    )
    for (batch,) in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    compare(accelerator, model, plain.state_dict(), "transformers")
    accelerator.free_memory()

# SPDX-License-Identifier: Apache-2.0
"""The facade on one process: what it hands out, and what it refuses."""

import copy
import functools
import inspect
import os
import pickle
from collections import OrderedDict

import pytest
import torch
from rank_pool import on_ranks
from safetensors.torch import load_file
from states import reset_states
from torch.utils.data import DataLoader, TensorDataset

import accelerate.accelerator
from accelerate import (
    Accelerator,
    AutocastKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    cpu_offload,
    find_executable_batch_size,
)
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.utils import ProjectConfiguration, set_seed


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def test_order_and_unknown_objects(accelerator):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    found = accelerator.prepare(scheduler, "as it is", loader, optimizer, model)
    assert [type(obj).__name__ for obj in found[:2]] == ["AcceleratedScheduler", "str"]
    assert found[0].optimizers == [found[3]]
    assert isinstance(found[2], DataLoader)
    assert found[4] is model
    assert accelerator.prepare(found[3]) is found[3]
    assert accelerator.prepare(found[2]) is found[2]
    assert accelerator.prepare(found[0]) is found[0]
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert not accelerator._models and not accelerator._dataloaders


@pytest.mark.parametrize(
    ("name", "argument", "error"),
    [
        ("prepare_model", 3, AttributeError),
        ("prepare_optimizer", "adam", AttributeError),
        ("prepare_data_loader", [1, 2], ValueError),
    ],
)
def test_wrong_types(accelerator, name, argument, error):
    with pytest.raises(error):
        getattr(accelerator, name)(argument)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda accelerator, model: set_seed(-1), "Seed must be between"),
        (
            lambda accelerator, model: Accelerator(deepspeed_plugin={}, deepspeed_plugins={}),
            "pass only one of them",
        ),
        (lambda accelerator, model: find_executable_batch_size(8), "takes a function, not 8"),
    ],
)
def test_wrong_arguments(accelerator, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(accelerator, accelerator.prepare(torch.nn.Linear(1, 1)))


def test_placement_flags(accelerator):
    with pytest.raises(PrepareError, match="1 elements"):
        accelerator.prepare(torch.nn.Linear(1, 1), device_placement=[True, False])
    with pytest.raises(PrepareError, match="without arguments"):
        accelerator.prepare()


def test_a_foreign_optimizer_is_said_once(accelerator, caplog):
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "do not belong to a prepared model" in caplog.text


def test_whole_state_of_an_offloaded_model(accelerator, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = copy.deepcopy(model.state_dict())
    offloaded = cpu_offload(model)
    assert next(offloaded.parameters()).device.type == "meta"
    accelerator.save_model(offloaded, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_named_numbers():
    """Eight samples, weight from zero: one step of the mean gradient, with and without accumulation."""
    x = torch.arange(1.0, 9.0)
    for steps in (1, 4):
        reset_states()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        loader = DataLoader(TensorDataset(x[:, None]), batch_size=8 // steps)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.02), loader
        )
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), 2 * inputs))
                optimizer.step()
                optimizer.zero_grad()
        assert model.weight.item() == pytest.approx(2.04, abs=1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
def test_tokens_count_alike(by_hand):
    """Sequences 1..i for i in 1..8, odd tokens of class 1: sums scaled by hand, and means with `num_items`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 2, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.08))
    samples = [torch.arange(1.0, length + 1) for length in range(1, 9)]
    items = sum(len(sample) for sample in samples)
    for sample in samples:
        with accelerator.accumulate(model):
            scores, classes = model(sample[:, None]), (sample % 2).long()
            if by_hand:
                loss = (
                    torch.nn.functional.cross_entropy(scores, classes, reduction="sum") * 8 / items
                )
                accelerator.backward(loss)
            else:
                loss = torch.nn.functional.cross_entropy(scores, classes)
                accelerator.backward(loss, num_items=len(sample))
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.flatten().tolist() == pytest.approx([0.0953, 0.4337], abs=1e-4)


def test_a_window_without_items_has_no_gradient(caplog):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 2, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.08))
    before = model.weight.detach().clone()
    loss = torch.nn.functional.cross_entropy(model(torch.ones(3, 1)), torch.full((3,), -100))
    assert loss.isnan()  # a mean over nothing
    accelerator.backward(loss, num_items=0)
    optimizer.step()
    assert torch.equal(model.weight, before) and not caplog.records


def test_a_pickled_accelerator_has_the_process_and_the_options(accelerator):
    """As for a spawned worker or an actor: without the group and what was prepared."""
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    copied = pickle.loads(pickle.dumps(accelerator))
    assert (copied.device, copied.process_index, copied.is_main_process) == (
        accelerator.device,
        0,
        True,
    )
    assert (
        copied.plan.values() == accelerator.plan.values() and copied._models == [] and repr(copied)
    )
    assert accelerator._models == [model] and copied.unwrap_model(model) is model
    assert copied.on_main_process(lambda: "run")() == "run"
    copied.backward(copied.prepare(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum())


# What the public methods of the API reach through `self`, found by overriding all of them there.
REACHED = {
    "prepare": {
        "prepare_model",
        "prepare_optimizer",
        "prepare_scheduler",
        "prepare_data_loader",
        "verify_device_map",
    },
    "prepare_model": {"verify_device_map"},
    "accumulate": {"no_sync"},
    "check_trigger": {"reduce"},
    "clear": {"free_memory"},
    "clip_grad_norm_": {"unscale_gradients"},
    "clip_grad_value_": {"unscale_gradients"},
    "gather_for_metrics": {"gather"},
    "get_state_dict": {"unwrap_model"},
    "save_model": {"get_state_dict", "save"},
    "save_state": {"get_state_dict"},
}


def recorder(reached, callers):
    """A subclass that overrides every public method, and records which one calls which."""

    def recording(name, method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            for caller in callers:
                reached.setdefault(caller, set()).add(name)
            callers.append(name)
            try:
                return method(*args, **kwargs)
            finally:
                callers.pop()

        return call

    members = {}
    for name in dir(Accelerator):
        method = inspect.getattr_static(Accelerator, name)
        if inspect.isfunction(method) and not name.startswith("_"):
            members[name] = recording(name, method)
    return type("Recorder", (Accelerator,), members)


@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_public_methods_reach_each_other_through_self(tmp_path, mixed_precision):
    reached, callers = {}, []
    accelerator = recorder(reached, callers)(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.prepare_model(torch.nn.Linear(2, 1))
    for (inputs,) in loader:
        context = accelerator.accumulate(model)
        callers.append("accumulate")
        context.__enter__()
        callers.clear()
        loss = model(inputs).sum()
        accelerator.backward(loss)
        context.__exit__(None, None, None)
        optimizer.step()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    accelerator.check_trigger()
    accelerator.gather_for_metrics(loss.detach())
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"weight", "bias"}
    accelerator.clear(model)
    for caller, methods in REACHED.items():
        assert methods <= reached.get(caller, set()), caller


def test_a_state_dict_of_ones_own_is_saved(tmp_path):
    class Trained(Accelerator):
        def get_state_dict(self, model, unwrap=True):
            state = super().get_state_dict(model, unwrap)
            return {name: state[name] for name, p in model.named_parameters() if p.requires_grad}

    accelerator = Trained(cpu=True)
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    model = accelerator.prepare(model)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    for folder in ("state", "model"):
        assert load_file(tmp_path / folder / "model.safetensors").keys() == {"weight"}
    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "state", strict=False)
    assert torch.equal(model.weight, expected)


def test_methods_that_are_assigned_later_are_called(accelerator, monkeypatch, tmp_path):
    model = torch.nn.Linear(2, 1)
    prepared, saved = [], []
    original = Accelerator.prepare_model

    def prepare_model(self, model, **kwargs):
        prepared.append(model)
        return original(self, model, **kwargs)

    monkeypatch.setattr(Accelerator, "prepare_model", prepare_model)
    accelerator.save = lambda state, path, safe_serialization: saved.append((path, set(state)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    assert prepared == [model]
    accelerator.save_model(model, tmp_path)
    assert saved == [(str(tmp_path / "model.safetensors"), {"weight", "bias"})]


@on_ranks(2)
@pytest.mark.parametrize("version", [0, 2])
def test_an_overridden_prepare_model_trains_the_same(version):
    """Two models with an optimizer each: each is laid out with its optimizer, as without the override."""

    class Own(Accelerator):
        def prepare_model(self, model, *args, **kwargs):
            return super().prepare_model(model, *args, **kwargs)

    results = []
    for kind in (Accelerator, Own):
        reset_states()
        options = {}
        if version:
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=version)
        accelerator = kind(cpu=True, **options)
        set_seed(0)
        models = [torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
        first, second, *optimizers = accelerator.prepare(*models, *optimizers)
        inputs = torch.randn(2, 4, dtype=torch.float64)[accelerator.process_index]
        accelerator.backward(second(first(inputs)).square().sum())
        for optimizer in optimizers:
            optimizer.step()
        results.append(list(accelerator.get_state_dict(first).values()))
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


@on_ranks(2)
def test_functions_and_methods_that_packages_replace_lay_out_models():
    """The replaced function of FSDP2 and the replaced method of `prepare` are called, and train as without them."""
    calls = []
    results = []
    original = accelerate.accelerator.fsdp2_prepare_model

    class Own(Accelerator):
        def _prepare_fsdp2(self, *args):
            calls.append("method")
            return super()._prepare_fsdp2(*args)

    def shard(accelerator, model):
        calls.append("function")
        return original(accelerator, model)

    for kind in (Accelerator, Own):
        reset_states()
        accelerator = kind(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        set_seed(0)
        model = torch.nn.Linear(4, 4, dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        inputs = torch.randn(2, 4, dtype=torch.float64)[accelerator.process_index]
        accelerator.backward(model(inputs).square().sum())
        optimizer.step()
        results.append(list(accelerator.get_state_dict(model).values()))
        accelerate.accelerator.fsdp2_prepare_model = shard
    assert calls == ["method", "function"]
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


def test_a_replaced_wait_comes_before_a_numbered_save(tmp_path):
    """Without one no rank waits, since rank 0 may save alone."""
    calls = []

    class Waiting(Accelerator):
        def wait_for_everyone(self):
            calls.append(sorted(os.listdir(tmp_path)))
            super().wait_for_everyone()

    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    accelerator = Waiting(cpu=True, project_config=project)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state()
    assert calls == [[]] and os.listdir(tmp_path) == ["checkpoints"]


def test_a_replaced_function_that_is_not_called_is_named(monkeypatch, caplog):
    refuse = "_refuse_recurrent_layers_under_sequence_parallelism"
    for path in (f"accelerator.{refuse}", f"big_modeling.{refuse}"):
        with monkeypatch.context() as patch:
            patch.setattr(f"accelerate.{path}", lambda model: None, raising=False)
            Accelerator(cpu=True).prepare(torch.nn.Linear(2, 1))
        accelerate.accelerator._warn_of_replaced.cache_clear()
    assert caplog.text.count(refuse) == 2
    monkeypatch.setattr("accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict", print)
    for _ in range(2):
        Accelerator(cpu=True).prepare(torch.nn.Linear(2, 1))
    assert caplog.text.count("fsdp2_load_full_state_dict") == 1
    caplog.clear()
    accelerate.accelerator._warn_of_replaced.cache_clear()
    monkeypatch.undo()
    Accelerator(cpu=True).prepare(torch.nn.Linear(2, 1))
    assert not caplog.text


def test_contexts_decorate_functions(accelerator):
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    calls = []
    for context in (
        accelerator.accumulate(model),
        accelerator.autocast(),
        accelerator.no_sync(model),
        accelerator.join_uneven_inputs([model]),
        accelerator.maybe_context_parallel(),
    ):
        function = context(lambda: calls.append(accelerator.sync_gradients))
        function()
        function()
    assert calls == [True] * 10


def test_attributes_that_scripts_assign(accelerator):
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    handlers = ("init", "profile", "scaler", "fp8_recipe", "ao_recipe", "te_recipe", "msamp_recipe")
    for name in (f"{kind}_handler" for kind in handlers):
        value = object()
        setattr(accelerator, name, value)
        assert getattr(accelerator, name) is value
    for name in ("has_lomo_optimizer", "has_fp8_handler"):
        setattr(accelerator, name, True)
        assert getattr(accelerator, name) is True
    hooks = OrderedDict()
    for name in ("_save_model_state_pre_hook", "_load_model_state_pre_hook"):
        setattr(accelerator, name, hooks)
        assert getattr(accelerator, name) is hooks
    accelerator.state.fork_launched = True
    assert PartialState().fork_launched
    loader.gradient_state = accelerator.gradient_state
    assert loader.gradient_state is accelerator.gradient_state
    accelerator.fp8_enabled = True
    assert accelerator.fp8_enabled is True
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    optimizer.accelerator_state = state = object()
    assert optimizer.accelerator_state is state
    accelerator.gradient_state.dataloader_references = [None, loader]
    assert accelerator.gradient_state.active_dataloader is loader
    accelerator.gradient_state.dataloader_references = [None]
    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_autocast_follows_assigned_attributes(mixed_precision):
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = accelerator.prepare(torch.nn.Linear(2, 2))

    def computes_in():
        with accelerator.autocast():
            return torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype

    assert (computes_in() is torch.bfloat16) == (mixed_precision == "bf16")
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    assert computes_in() is torch.float32
    accelerator.autocast_handler = None
    accelerator.native_amp = False
    assert computes_in() is torch.float32
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_an_assigned_scaler_trains_as_without_it():
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        reset_states()
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = scaler
        set_seed(0)
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)


def test_the_older_spelling_of_fp16():
    assert Accelerator(cpu=True, fp16=True).mixed_precision == "fp16"
    with pytest.raises(ConfigurationError, match="bf16"):
        Accelerator(cpu=True, fp16=True, mixed_precision="bf16")


@on_ranks(2)
def test_a_replaced_preparation_of_context_parallelism_splits_sequences_itself():
    class Own(Accelerator):
        def _prepare_cp(self, *args):
            return args

    accelerator = Own(
        cpu=True,
        parallelism_config=ParallelismConfig(cp_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    set_seed(0)
    model = accelerator.prepare(torch.nn.Linear(4, 1, dtype=torch.float64))
    tokens = torch.ones(2, 8, 4, dtype=torch.float64)
    with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
        assert tokens.shape == (2, 8, 4)
        accelerator.backward(model(tokens).sum())
    expected = torch.full((1, 4), 16.0, dtype=torch.float64)
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected)

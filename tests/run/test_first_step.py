# SPDX-License-Identifier: Apache-2.0
"""The checks of a run's first steps: each mistake is logged once, and a correct run logs nothing."""

import copy
import inspect
import itertools
import logging
import pickle
from pathlib import Path

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.local_sgd import LocalSGD
from accelerate.run.first_step import FirstStepCheck
from accelerate.utils import ParallelismConfig, ProjectConfiguration, gather_object


def build(rate=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=4)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), loader


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def only(caplog, *words):
    """The one warning that was logged has all these words."""
    found = warnings(caplog)
    assert len(found) == 1 and all(word in found[0] for word in words), found
    return True


def nothing_is_left(accelerator, *modules):
    """No hook of the checks is on a path of the next steps."""
    hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    return (
        FirstStepCheck._hook is None
        and not any(isinstance(observer, FirstStepCheck) for observer in accelerator._loop.active)
        and not any(hook.__module__ == FirstStepCheck.__module__ for hook in hooks)
    )


def train(accelerator, model, optimizer, loader, **changes):
    """The usual loop, with what `changes` replaces."""
    backward = changes.get("backward", accelerator.backward)
    clear = changes.get("clear", lambda: optimizer.zero_grad())
    for batch in loader:
        inputs, targets = (item.to(accelerator.device) for item in batch)
        with accelerator.accumulate(model):
            changes.get("clear_before", lambda: None)()
            backward(changes.get("loss", nn.functional.mse_loss)(model(inputs), targets))
            optimizer.step()
            clear()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_correct_loop_logs_nothing(steps, caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(*build())
    train(accelerator, model, optimizer, loader)
    assert not warnings(caplog) and nothing_is_left(accelerator, model)


@pytest.mark.parametrize("steps", [1, 2])
def test_loss_backward(steps, caplog):
    # The script may divide the loss itself.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    train(
        accelerator, *accelerator.prepare(*build()), backward=lambda loss: (loss / steps).backward()
    )
    assert not warnings(caplog)


def test_no_backward(caplog):
    accelerator = Accelerator(cpu=True)
    train(accelerator, *accelerator.prepare(*build()), backward=lambda loss: None)
    only(caplog, "test_first_step.py:", "none of its parameters has a gradient")


def here(offset):
    """The place of a line of the caller, so many lines after this call."""
    frame = inspect.currentframe().f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno + offset}: "


def two_models(accelerator):
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    return (*accelerator.prepare(first, second, *optimizers),)


def test_gradients_that_are_set_by_hand(caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(*build())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    assert not warnings(caplog)


@pytest.mark.parametrize("clear", ["none", "model"])
def test_gradients_that_are_cleared_before_the_step(clear, caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(*build())
    for _ in range(3):
        accelerator.backward(model(torch.randn(2, 4)).square().mean())
        model.zero_grad() if clear == "model" else optimizer.zero_grad()
        optimizer.step()
    only(
        caplog, "test_first_step.py:", "were cleared between the backward pass and optimizer.step()"
    )


def test_gradients_of_a_window_that_the_model_clears(caplog):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*build())
    train(accelerator, model, optimizer, loader, clear_before=model.zero_grad)
    assert only(caplog, "SGD", "accumulation window", "zero_grad")


def test_a_backward_that_does_not_reach_the_optimizer(caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(*build())
    head = nn.Linear(1, 1)
    for _ in range(3):
        accelerator.backward(head(model(torch.randn(2, 4)).detach()).square().mean())
        line = here(1)
        optimizer.step()
    only(caplog, line, "did not compute gradients for its parameters", "detach()")


def test_optimizers_that_take_turns(caplog):
    accelerator = Accelerator(cpu=True)
    first, second, *optimizers = two_models(accelerator)
    for number in range(4):
        accelerator.backward((second if number % 2 else first)(torch.randn(2, 4)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not warnings(caplog)


def test_a_module_that_is_replaced_after_the_optimizer_was_made(caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = build()
    model[2] = nn.Linear(8, 1)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))
    only(
        caplog,
        "test_first_step.py:",
        "no prepared optimizer steps 2.weight",
        "2 parameters without a gradient",
    )


def test_a_parameter_outside_of_any_model(caplog):
    # As the temperature of soft actor-critic: one process needs not prepare it.
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = build()
    temperature = torch.zeros(1, requires_grad=True)
    model, optimizer, other = accelerator.prepare(
        model, optimizer, torch.optim.SGD([temperature], lr=0.1)
    )
    for _ in range(3):
        accelerator.backward((model(torch.randn(2, 4)) * temperature.exp()).square().mean())
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert not warnings(caplog)


def test_gradients_that_are_zero_in_a_window(caplog):
    # As those of layers before one that is initialized with zeros.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = build()
    nn.init.zeros_(model[2].requires_grad_(False).weight)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    train(accelerator, model, optimizer, loader)
    assert not warnings(caplog)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(value, caplog):
    accelerator = Accelerator(cpu=True)
    train(
        accelerator,
        *accelerator.prepare(*build()),
        loss=lambda output, target: output.sum() * 0 + value,
    )
    found = warnings(caplog)
    assert "test_first_step.py:" in found[0] and f"the loss of backward 1 is {value}" in found[0]


def test_a_loss_that_is_not_finite_late_in_a_window(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(*build())
    losses = iter([1.0, 1.0, float("nan")] + [1.0] * 9)
    train(
        accelerator,
        model,
        optimizer,
        loader,
        loss=lambda output, target: output.sum() * next(losses),
    )
    # All later losses are NaN as well: one message.
    only(caplog, "test_first_step.py:", "the loss of backward 3 is nan")


def test_one_of_two_optimizers_was_not_prepared(caplog):
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    first, second, optimizer = accelerator.prepare(
        first, second, torch.optim.SGD(first.parameters(), lr=0.1)
    )
    for _ in range(3):
        accelerator.backward(second(first(torch.randn(2, 4))).square().mean())
        optimizer.step()
        line = here(1)
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    only(caplog, line, "this SGD trains a prepared model but was not prepared")
    assert nothing_is_left(accelerator, first, second)


def test_the_plain_optimizer_steps_instead_of_the_prepared_one(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, plain, loader = build()
    model, _, loader = accelerator.prepare(model, plain, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            line = here(1)
            plain.step()
            plain.zero_grad()
    only(caplog, line, "is not the object that prepare returned")


def test_an_optimizer_that_was_not_prepared(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = build()
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader)
    assert (
        "test_first_step.py:" in warnings(caplog)[0]
        and "this SGD trains a prepared model" in warnings(caplog)[0]
    )
    assert sum("this SGD" in text for text in warnings(caplog)) == 1


class Lookahead(torch.optim.SGD):
    """An optimizer that steps another one."""

    def step(self, closure=None):
        torch.optim.SGD(self.param_groups[0]["params"], lr=0.1).step()


def test_an_optimizer_inside_a_prepared_one(caplog):
    accelerator = Accelerator(cpu=True)
    model, _, loader = build()
    model, optimizer, loader = accelerator.prepare(
        model, Lookahead(model.parameters(), lr=0.1), loader
    )
    train(accelerator, model, optimizer, loader)
    assert not warnings(caplog)


def test_a_closure_computes_the_gradients(caplog):
    accelerator = Accelerator(cpu=True)
    model, _, loader = build()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.LBFGS(model.parameters(), max_iter=2), loader
    )
    for inputs, targets in loader:

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    assert not warnings(caplog)


@pytest.mark.parametrize("wrap", [list, tuple, lambda objects: dict(enumerate(objects))])
def test_containers_are_not_prepared(wrap):
    with pytest.raises(
        PrepareError,
        match=r"a (list|tuple|dict) .*\(Sequential, SGD, DataLoader\).*\*objects",
    ):
        Accelerator(cpu=True).prepare(wrap(build()))


def test_names_are_not_prepared():
    with pytest.raises(PrepareError, match=r"not their names: prepare\(model\)"):
        Accelerator(cpu=True).prepare("model")
    # The API returns any other object unchanged.
    assert Accelerator(cpu=True).prepare(None, "name", [1, 2], {}) == (None, "name", [1, 2], {})


def test_log_before_init_trackers(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.log({"loss": 1.0}, step=1)
    only(caplog, "test_first_step.py:", "before accelerator.init_trackers")


# -- several processes


class Recorded(logging.Handler):
    """As pytest's `caplog`, which a rank does not have."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def once(logged, *words):
    """One rank has logged one warning, and it has these words."""
    found = gather_object(warnings(logged))
    assert len(found) == 1 and all(word in found[0] for word in words), found


def recorded():
    handler = Recorded()
    logging.getLogger("accelerate").addHandler(handler)
    return handler


@on_ranks(2)
def test_ranks_that_train_correctly_log_nothing():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build())
    copied, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model.module))
    train(accelerator, model, optimizer, loader)
    train(accelerator, model, optimizer, loader)
    assert not warnings(logged)
    copied(torch.randn(2, 4)), stored(torch.randn(2, 4))
    assert nothing_is_left(accelerator, model)


@on_ranks(2)
def test_a_loader_that_was_not_prepared():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = build()
    train(accelerator, *accelerator.prepare(model, optimizer), loader)
    once(logged, "trained on the same first batch")


@on_ranks(2)
def test_a_number_of_items_on_one_rank():
    logged = recorded()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, _ = accelerator.prepare(*build())
    with accelerator.accumulate(model):
        loss = model(torch.randn(2, 4)).mean()
        if accelerator.is_main_process:
            accelerator.backward(loss)
            # Another collective here would end the process.
            torch.distributed.all_reduce(torch.zeros((), dtype=torch.float64))
        else:
            accelerator.backward(loss, num_items=2)
    once(logged, "rank 1 passes num_items", "rank 0 does not")


@on_ranks(2)
def test_samples_that_each_process_chooses():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = build()
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    train(accelerator, model, optimizer, [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)])
    assert not warnings(logged)


@on_ranks(2)
def test_parameters_of_local_sgd_may_differ():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local:
        for inputs, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    assert not warnings(logged)


@on_ranks(2)
def test_processes_that_train_alone_and_average_parameters():
    """DiLoCo by hand: an inner optimizer of each process, an outer one of the averaged changes."""
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, inner, loader = build()
    outer = torch.optim.SGD(
        [parameter.detach().clone() for parameter in model.parameters()],
        lr=0.7,
        nesterov=True,
        momentum=0.9,
    )
    inner, loader = accelerator.prepare(inner, loader)
    for number, (inputs, targets) in enumerate(loader):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        inner.step()
        inner.zero_grad()
        if number % 3 == 2:
            for start, parameter in zip(
                outer.param_groups[0]["params"], model.parameters(), strict=True
            ):
                start.grad = accelerator.reduce(start - parameter.detach(), "mean")
            outer.step()
            for start, parameter in zip(
                outer.param_groups[0]["params"], model.parameters(), strict=True
            ):
                parameter.data.copy_(start)
    assert not warnings(logged)


@on_ranks(2)
def test_what_another_rank_finds():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build(0.001))
    losses = iter([1.0 if accelerator.is_main_process else float("inf")] + [1.0] * 11)
    train(
        accelerator,
        model,
        optimizer,
        loader,
        loss=lambda output, target: output.sum() * next(losses),
    )
    found = gather_object(warnings(logged))
    assert any("rank 1: " in text and "backward 1 is inf" in text for text in found), found


@on_ranks(2)
def test_sharded_models():
    logged = recorded()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model, optimizer, loader = accelerator.prepare(*build())
    train(accelerator, model, optimizer, loader)
    assert not warnings(logged) and nothing_is_left(accelerator, model)


@pytest.mark.parametrize("way", ["continue", "skip_first_batches", "none"])
def test_batches_that_are_skipped_again_after_load_state(way, tmp_path, caplog):
    def run(folder=None, skipped=0, stop=None):
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(*build())
        if folder:
            accelerator.load_state(folder)
        if skipped and way == "skip_first_batches":
            loader, skipped = accelerator.skip_first_batches(loader, skipped), 0
        for number, (inputs, targets) in enumerate(loader):
            if way == "continue" and number < skipped:
                continue
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if number + 1 == stop:
                return accelerator.save_state(tmp_path / "saved")

    run(skipped=3, folder=run(stop=3))
    assert (
        only(caplog, "test_first_step.py:", "first 3 batches", "skip_first_batches")
        if way == "continue"
        else True
    )
    assert way == "continue" or not warnings(caplog)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2", "pipeline"])
@pytest.mark.parametrize("clip", ["torch", "accelerator"])
def test_clipping_by_the_norm_of_a_part_of_the_gradients(layout, clip):
    recorder = recorded()
    options = {
        "ddp": {},
        "fsdp1": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
        "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        "pipeline": {"parallelism_config": ParallelismConfig(pp_size=2)},
    }[layout]
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    clips = {"torch": nn.utils.clip_grad_norm_, "accelerator": accelerator.clip_grad_norm_}
    for _ in range(3):
        rows = torch.ones(4, 4) * (1 + accelerator.strategy.data_shard[0])
        accelerator.backward(model(rows).square().mean())
        clips[clip](model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    logged = gather_object(warnings(recorder))
    if clip == "torch" and layout in ("fsdp1", "pipeline"):
        assert len(logged) == 1 and "accelerator.clip_grad_norm_" in logged[0]
    else:
        assert not logged


@on_ranks(2)
@pytest.mark.parametrize("averages", [False, True])
def test_a_model_that_was_not_prepared_beside_its_optimizer(averages):
    recorder = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = build()
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for inputs, targets in itertools.chain(loader, loader, loader):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        if averages:
            for parameter in model.parameters():
                parameter.grad = accelerator.reduce(parameter.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()
    logged = gather_object(warnings(recorder))
    assert len(logged) == (0 if averages else 1)
    assert all("4 parameters" in text and "prepare" in text for text in logged)


@pytest.mark.parametrize("place", ["folder", "memory://first-step/run"])
def test_a_checkpoint_of_another_run_has_the_next_number(place, caplog, tmp_path):
    if place == "folder":
        place = str(tmp_path)
    else:
        pytest.importorskip("obstore")

    def step(**options):
        project = ProjectConfiguration(place, automatic_checkpoint_naming=True, **options)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if "iteration" not in options:
            accelerator.resume(signals=())
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        return accelerator

    for _ in range(2):
        accelerator = step()
        accelerator.save_state()
        accelerator.end_training()
    step(iteration=2).end_training()
    assert warnings(caplog) == []
    accelerator = step(iteration=1)
    only(caplog, f"{place}/checkpoints/checkpoint_1", "resume()")
    with pytest.raises(ConfigurationError, match="checkpoint_1"):
        accelerator.save_state()
    accelerator.end_training()

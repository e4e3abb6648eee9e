# SPDX-License-Identifier: Apache-2.0
"""The checks of a run's first steps: each mistake is logged once, and a correct run logs nothing."""

import copy
import inspect
import logging
import pickle

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.core.errors import PrepareError
from accelerate.first_step import FirstStepCheck
from accelerate.local_sgd import LocalSGD


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
    for module in modules:
        for parameter in module.parameters():
            hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return (
        not accelerator._first_step.active
        and FirstStepCheck._hook is None
        and all(one._before_step is one._before_zero_grad is None for one in accelerator._optimizers)
        and not any(type(hook).__module__ == FirstStepCheck.__module__ for hook in hooks)
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


def test_loss_backward(caplog):
    accelerator = Accelerator(cpu=True)
    train(accelerator, *accelerator.prepare(*build()), backward=torch.Tensor.backward)
    only(caplog, "test_first_step.py:", "accelerator.backward did not compute", "gradient_accumulation_steps")


def test_no_backward(caplog):
    accelerator = Accelerator(cpu=True)
    train(accelerator, *accelerator.prepare(*build()), backward=lambda loss: None)
    only(caplog, "test_first_step.py:", "none of its parameters has a gradient")


def test_no_zero_grad(caplog):
    accelerator = Accelerator(cpu=True)
    train(accelerator, *accelerator.prepare(*build(0.001)), clear=lambda: None)
    only(caplog, "test_first_step.py:", "were not cleared", "optimizer.zero_grad()")


def here(offset):
    """The place of a line of the caller, so many lines after this call."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno + offset}: "


def two_models(accelerator):
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    return (*accelerator.prepare(first, second, *optimizers),)


def test_loss_backward_for_one_of_two_optimizers(caplog):
    accelerator = Accelerator(cpu=True)
    first, second, first_optimizer, second_optimizer = two_models(accelerator)
    for _ in range(3):
        first_optimizer.zero_grad()
        accelerator.backward(first(torch.randn(2, 4)).square().mean())
        first_optimizer.step()
        second_optimizer.zero_grad()
        line = here(1)
        second(torch.randn(2, 4)).square().mean().backward()
        second_optimizer.step()
    only(caplog, line, "accelerator.backward did not compute")


@pytest.mark.parametrize("search", [False, True])
def test_a_closure_that_calls_loss_backward_or_clears_nothing(search, caplog):
    accelerator = Accelerator(cpu=True)
    model, _, _ = build()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2))

    def closure():
        loss = model(torch.ones(2, 4)).square().mean()
        if search:
            optimizer.zero_grad()
            loss.backward()
        else:
            accelerator.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    only(caplog, "test_first_step.py:", "accelerator.backward did not compute" if search else "were not cleared")


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


@pytest.mark.parametrize("clear", ["none", "zero", "model"])
def test_gradients_that_are_cleared_before_the_step(clear, caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(*build())
    for _ in range(3):
        accelerator.backward(model(torch.randn(2, 4)).square().mean())
        model.zero_grad() if clear == "model" else optimizer.zero_grad(set_to_none=clear == "none")
        optimizer.step()
    only(caplog, "test_first_step.py:", "were cleared between the backward and optimizer.step()")


def test_gradients_that_were_cleared_and_set_again(caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(*build())
    for _ in range(3):
        accelerator.backward(model(torch.randn(2, 4)).square().mean())
        kept = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient / 2
        optimizer.step()
    assert not warnings(caplog)


def test_a_backward_that_does_not_reach_the_optimizer(caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(*build())
    head = nn.Linear(1, 1)
    for _ in range(3):
        accelerator.backward(head(model(torch.randn(2, 4)).detach()).square().mean())
        line = here(1)
        optimizer.step()
    only(caplog, line, "has computed no gradient for its parameters", "detach()")


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
    only(caplog, "test_first_step.py:", "no prepared optimizer steps 2.weight", "2 parameters without a gradient")


def test_a_parameter_outside_of_any_model(caplog):
    # As the temperature of soft actor-critic: one process needs not prepare it.
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = build()
    temperature = torch.zeros(1, requires_grad=True)
    model, optimizer, other = accelerator.prepare(model, optimizer, torch.optim.SGD([temperature], lr=0.1))
    for _ in range(3):
        accelerator.backward((model(torch.randn(2, 4)) * temperature.exp()).square().mean())
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert not warnings(caplog)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_model_clears(to_none, caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build())
    train(accelerator, model, optimizer, loader, clear=lambda: model.zero_grad(set_to_none=to_none))
    assert not warnings(caplog)


def test_two_models_whose_losses_share_gradients(caplog):
    # As in adversarial training: the backward of one loss adds to the gradients of the other model.
    accelerator = Accelerator(cpu=True)
    first, first_optimizer, loader = build()
    second, second_optimizer, _ = build()
    first, second, first_optimizer, second_optimizer, loader = accelerator.prepare(
        first, second, first_optimizer, second_optimizer, loader
    )
    for inputs, _ in loader:
        first_optimizer.zero_grad()
        accelerator.backward(first(inputs).square().mean())
        first_optimizer.step()
        second_optimizer.zero_grad()
        accelerator.backward((second(inputs) * first(inputs)).mean())
        second_optimizer.step()
    assert not warnings(caplog)


def test_zero_grad_in_the_middle_of_a_window(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*build())
    train(accelerator, model, optimizer, loader, clear=lambda: None, clear_before=optimizer.zero_grad)
    only(caplog, "test_first_step.py:", "in the middle of an accumulation window")


def test_zero_grad_of_the_plain_optimizer_in_the_middle_of_a_window(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, plain, loader = build()
    model, optimizer, loader = accelerator.prepare(model, plain, loader)
    train(accelerator, model, optimizer, loader, clear_before=plain.zero_grad)
    only(caplog, "test_first_step.py:", "in the middle of an accumulation window")


def test_gradients_that_are_thrown_away_before_a_window(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*build())
    accelerator.backward(model(torch.randn(2, 4)).sum())
    model.zero_grad()
    train(accelerator, model, optimizer, loader)
    assert not warnings(caplog)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(value, caplog):
    accelerator = Accelerator(cpu=True)
    train(accelerator, *accelerator.prepare(*build()), loss=lambda output, target: output.sum() * 0 + value)
    found = warnings(caplog)
    assert "test_first_step.py:" in found[0] and f"the loss of backward 1 is {value}" in found[0]


def test_a_loss_that_is_not_finite_late_in_a_window(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(*build())
    losses = iter([1.0, 1.0, float("nan")] + [1.0] * 9)
    train(accelerator, model, optimizer, loader, loss=lambda output, target: output.sum() * next(losses))
    # All later losses are NaN as well: one message.
    only(caplog, "test_first_step.py:", "the loss of backward 3 is nan")


def test_a_complex_output_with_its_gradient(caplog):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1, dtype=torch.complex64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2, dtype=torch.complex64)).sum(), gradient=torch.tensor(1 + 0j))
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1)
    assert not warnings(caplog)


def test_one_of_two_optimizers_was_not_prepared(caplog):
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    first, second, optimizer = accelerator.prepare(first, second, torch.optim.SGD(first.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(second(first(torch.randn(2, 4))).square().mean())
        optimizer.step()
        line = here(1)
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    only(caplog, line, "this SGD trains a prepared model and was not prepared")
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
    only(caplog, line, "is not what prepare returned")


def test_an_optimizer_that_was_not_prepared(caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = build()
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader)
    assert "test_first_step.py:" in warnings(caplog)[0] and "this SGD trains a prepared model" in warnings(caplog)[0]
    assert sum("this SGD" in text for text in warnings(caplog)) == 1


def test_many_steps_of_an_optimizer_that_was_not_prepared(caplog):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = build()
    model = accelerator.prepare(model)
    for _ in range(20):
        accelerator.backward(model(torch.randn(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    only(caplog, "this SGD trains a prepared model")
    assert not accelerator._first_step.active


class Lookahead(torch.optim.SGD):
    """An optimizer that steps another one."""

    def step(self, closure=None):
        torch.optim.SGD(self.param_groups[0]["params"], lr=0.1).step()


def test_a_plain_training_before_a_prepared_one(caplog):
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*build())
    model, optimizer, loader = build()
    for _ in range(3):
        train(accelerator, model, optimizer, loader, backward=torch.Tensor.backward)
    caplog.clear()
    train(accelerator, *prepared)
    assert not warnings(caplog)


def test_an_optimizer_inside_a_prepared_one(caplog):
    accelerator = Accelerator(cpu=True)
    model, _, loader = build()
    model, optimizer, loader = accelerator.prepare(model, Lookahead(model.parameters(), lr=0.1), loader)
    train(accelerator, model, optimizer, loader)
    assert not warnings(caplog)


def test_a_closure_computes_the_gradients(caplog):
    accelerator = Accelerator(cpu=True)
    model, _, loader = build()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=2), loader)
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
    with pytest.raises(PrepareError, match=r"a (list|tuple|dict) of them \(Sequential, SGD, DataLoader\).*\*objects"):
        Accelerator(cpu=True).prepare(wrap(build()))


def test_names_are_not_prepared():
    with pytest.raises(PrepareError, match=r"not their names: prepare\(model\)"):
        Accelerator(cpu=True).prepare("model")
    # The API returns any other object unchanged.
    assert Accelerator(cpu=True).prepare(None, "name", [1, 2], {}) == (None, "name", [1, 2], {})


def test_what_holds_no_object_is_not_prepared():
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = build()
    with pytest.raises(PrepareError, match=r"a dict of them \(Sequential, SGD\)"):
        accelerator.prepare({"models": [model], "optimizers": (optimizer,)})
    with pytest.raises(PrepareError, match=r"a generator is not one: prepare\(\*objects\)"):
        accelerator.prepare(model.parameters())
    with pytest.raises(PrepareError, match=r"not their class: prepare\(Linear\(\.\.\.\)\)"):
        accelerator.prepare(nn.Linear)


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
    assert not model._forward_pre_hooks


@on_ranks(2)
def test_a_loader_that_was_not_prepared():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = build()
    train(accelerator, *accelerator.prepare(model, optimizer), loader)
    assert warnings(logged) == [] if accelerator.process_index else only(logged, "trained on the same first batch")


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
def test_nothing_was_prepared():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = build()
    for inputs, targets in loader:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = "this SGD and its model were not prepared"
    assert warnings(logged) == [] if accelerator.process_index else only(logged, "test_first_step.py:", expected)


@on_ranks(2)
def test_a_model_that_the_user_wraps():
    logged = recorded()
    Accelerator(cpu=True)
    model, optimizer, loader = build()
    model = nn.parallel.DistributedDataParallel(model)
    for inputs, targets in loader:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not warnings(logged)


@on_ranks(2)
def test_a_parameter_that_one_rank_changes():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build())
    if accelerator.process_index == 1:
        with torch.no_grad():
            model.module[2].weight += 1
    train(accelerator, model, optimizer, loader)
    assert warnings(logged) == [] if accelerator.process_index else only(logged, "parameter 2.weight", "rank 1")


@on_ranks(2)
def test_a_complex_parameter_that_differs_in_its_imaginary_part():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 3, bias=False, dtype=torch.complex64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.process_index == 1:
        with torch.no_grad():
            model.module.weight += 1j
    for number in range(2):
        inputs = torch.full((2, 1), accelerator.process_index + number + 1, dtype=torch.complex64)
        accelerator.backward(model(inputs).abs().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert warnings(logged) == [] if accelerator.process_index else only(logged, "parameter weight", "rank 1")


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


# Each returns what is trained, and how often it steps: (model, {optimizer: 1}, loader).
def forgotten_model(accelerator):
    model, optimizer, loader = build()
    # The learning rate of a warm-up begins at zero: parameters do not differ yet.
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0), loader)
    return model, {optimizer: 1}, loader


def forgotten_head(accelerator):
    model, _, loader = build()
    body, head = model[:2], model[2:]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    body, optimizer, loader = accelerator.prepare(body, optimizer, loader)
    return nn.Sequential(body, head), {optimizer: 1}, loader


def forgotten_model_and_optimizer(accelerator):
    model, optimizer, loader = build()
    return model, {optimizer: 1}, accelerator.prepare(loader)


def forgotten_loader_and_a_rare_optimizer(accelerator):
    model, _, loader = build()
    body, head = model[:2], model[2:]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (body, head)]
    body, head, often, rarely = accelerator.prepare(body, head, *optimizers)
    return nn.Sequential(body, head), {often: 1, rarely: 11}, loader


def forgotten_loader_in_eval_mode(accelerator):
    model, optimizer, loader = build()
    model, optimizer = accelerator.prepare(model, optimizer)
    return model.eval(), {optimizer: 1}, loader


MISTAKES = {
    forgotten_model: "parameters of the SGD belong to no prepared model",
    forgotten_head: "parameters of the SGD belong to no prepared model",
    forgotten_model_and_optimizer: "this SGD and its model were not prepared",
    forgotten_loader_and_a_rare_optimizer: "all processes trained on the same first batch",
    forgotten_loader_in_eval_mode: "all processes trained on the same first batch",
}


def run(accelerator, model, optimizers, loader, average=False, clear=True):
    for number, (inputs, targets) in enumerate([*loader, *loader]):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        if average:
            for parameter in model.parameters():
                parameter.grad = accelerator.reduce(parameter.grad, "mean")
        for optimizer, every in optimizers.items():
            if number % every == every - 1:
                optimizer.step()
                if clear:
                    optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("make", MISTAKES)
def test_something_was_not_prepared(make):
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    run(accelerator, *make(accelerator))
    assert warnings(logged) == [] if accelerator.process_index else only(logged, "test_first_step.py:", MISTAKES[make])


@on_ranks(2)
@pytest.mark.parametrize("make", [forgotten_model, forgotten_model_and_optimizer])
def test_gradients_that_the_script_averages(make):
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    run(accelerator, *make(accelerator), average=True)
    assert not warnings(logged)


@on_ranks(2)
def test_what_another_rank_finds():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*build(0.001))
    main = accelerator.is_main_process
    infinite = iter([1.0 if main else float("inf")] + [1.0] * 11)

    def loss(output, target):
        return nn.functional.mse_loss(output, target) + output.sum() * 0 + next(infinite)

    train(accelerator, model, optimizer, loader, loss=loss, clear=optimizer.zero_grad if main else lambda: None)
    found = sorted(warnings(logged))
    assert len(found) == (2 if main else 0)
    if main:
        assert "on rank 1: " in found[0] and "the loss of backward 1 is inf" in found[0]
        assert "on rank 1: " in found[1] and "were not cleared since its last step" in found[1]


@on_ranks(2)
def test_what_the_model_gets_before_the_first_batch():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        # A model of this process alone.
        probe, optimizer, loader = build()
        train(accelerator, probe, optimizer, loader, backward=torch.Tensor.backward)
    model, optimizer, loader = accelerator.prepare(*build())
    model(torch.zeros(1, 4))
    train(accelerator, model, optimizer, loader)
    assert not warnings(logged) and nothing_is_left(accelerator, model)


@on_ranks(2)
def test_sharded_models():
    logged = recorded()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model, optimizer, loader = accelerator.prepare(*build())
    train(accelerator, model, optimizer, loader)
    assert not warnings(logged) and nothing_is_left(accelerator, model)
    # Layouts refuse parameters with hooks of users: those of the checks are gone by then.
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer, loader = build()
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.zero_grad()
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader, backward=torch.Tensor.backward)
    found = warnings(logged)
    assert len(found) == accelerator.is_main_process and all("belong to no prepared model" in text for text in found)


def shard_by_fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def shard_by_fsdp1_with_views(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def shard_by_columns(model):
    # The last layer is a plain one on each rank, as are those that tensor parallelism leaves alone.
    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(output_layouts=Replicate())})


@on_ranks(2)
@pytest.mark.parametrize("prepared", [None, "loader", "model"])
@pytest.mark.parametrize("shard", [fully_shard, shard_by_fsdp1, shard_by_fsdp1_with_views, shard_by_columns])
def test_a_model_that_the_user_shards(shard, prepared):
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, _, loader = build()
    model = shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if prepared == "loader":
        loader = accelerator.prepare(loader)
    elif prepared == "model":
        other, stepper, _ = accelerator.prepare(*build())
        train(accelerator, other, stepper, [(torch.randn(2, 4), torch.randn(2, 1))])
    train(accelerator, model, optimizer, loader, backward=torch.Tensor.backward)
    assert not [text for text in warnings(logged) if "first batch" not in text]


@on_ranks(2)
def test_an_optimizer_for_what_tensor_parallelism_leaves_alone():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    model, _, loader = build()
    model = shard_by_columns(model)
    first, last = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:]))
    for inputs, targets in loader:
        nn.functional.mse_loss(model(inputs), targets).backward()
        for optimizer in (first, last):
            optimizer.step()
            optimizer.zero_grad()
    assert not warnings(logged) and accelerator.num_processes == 2


@on_ranks(2)
def test_a_part_beside_a_prepared_model_of_shards():
    logged = recorded()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, _, loader = build()
    body, head = model[:2], model[2:]
    body, loader = accelerator.prepare(body, loader)
    optimizer = accelerator.prepare(torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-9, foreach=False))
    train(accelerator, nn.Sequential(body, head), optimizer, loader)
    expected = MISTAKES[forgotten_head]
    assert warnings(logged) == [] if accelerator.process_index else only(logged, "test_first_step.py:", expected)


@on_ranks(2)
def test_a_traced_training():
    logged = recorded()
    Accelerator(cpu=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, optimizer, _ = build()
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not warnings(logged)


@on_ranks(2)
def test_a_model_of_each_process():
    logged = recorded()
    accelerator = Accelerator(cpu=True)
    width = 3 + accelerator.process_index
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    train(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2], backward=torch.Tensor.backward)
    assert not warnings(logged)

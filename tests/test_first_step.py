# SPDX-License-Identifier: Apache-2.0
"""The checks of a run's first steps: each mistake is logged once, and a correct run logs nothing."""

import copy
import logging
import pickle

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
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
    train(accelerator, *accelerator.prepare(*build()))
    assert not warnings(caplog) and not accelerator._first_step.active


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(value, caplog):
    accelerator = Accelerator(cpu=True)
    train(accelerator, *accelerator.prepare(*build()), loss=lambda output, target: output.sum() * 0 + value)
    found = warnings(caplog)
    assert "test_first_step.py:" in found[0] and f"the loss of backward 1 is {value}" in found[0]


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


def test_log_before_init_trackers(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.log({"loss": 1.0}, step=1)
    only(caplog, "before accelerator.init_trackers")


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

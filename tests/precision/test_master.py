# SPDX-License-Identifier: Apache-2.0
"""bf16 parameters with fp32 masters on one process: bit for bit the loop written by hand, and what it refuses."""

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.parallel.base import Strategy
from accelerate.run.resolve import Handlers, check_combination
from accelerate.state import AcceleratorState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    MasterWeightsKwargs,
)

STEPS, ACCUMULATION, CLIP = 20, 2, 0.5
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


@pytest.fixture(autouse=True)
def fresh_state():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these are small numbers
    yield
    torch.set_num_threads(threads)


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)
    )
    model[3].weight = model[0].weight  # tied
    model.register_buffer("offset", torch.full((8,), 1 / 3))
    model[1].bias.requires_grad_(False)
    return model


def groups_of(model):
    """Two groups with options of their own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def batches(count=STEPS * ACCUMULATION):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(8, (count, 12), generator=generator)


def loss_of(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x).float() + model.offset
    return nn.functional.cross_entropy(logits, (x + 1) % 8)


def by_hand(make_optimizer):
    """bf16 model, fp32 masters, the optimizer on the masters, copied back."""
    model = make_model()
    names = dict(model.named_parameters())
    masters = {
        name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in names.items()
    }
    for parameter in names.values():
        parameter.data = parameter.data.bfloat16()
    of = {id(parameter): masters[name] for name, parameter in names.items()}
    groups = [
        {**group, "params": [of[id(p)] for p in group["params"]]} for group in groups_of(model)
    ]
    optimizer = make_optimizer(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    for number, x in enumerate(batches()):
        (loss_of(model, x) / ACCUMULATION).backward()
        if number % ACCUMULATION:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for name, parameter in names.items():
                masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            optimizer.step()
            schedule.step()
            for name, parameter in names.items():
                parameter.data.copy_(masters[name].data)
            model.zero_grad()
    return model, {
        name: master.detach() for name, master in masters.items() if master.requires_grad
    }


def start(masters=True, steps=ACCUMULATION):
    return Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=steps, sync_with_dataloader=False
        ),
        kwargs_handlers=[MasterWeightsKwargs()] if masters else [],
    )


def prepared(accelerator, make_optimizer=OPTIMIZERS["AdamW"], seed=0):
    model = make_model(seed)
    optimizer = make_optimizer(groups_of(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    return accelerator.prepare(model, optimizer, schedule)


def train(accelerator, parts, some):
    model, optimizer, schedule = parts
    for x in some:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def full(accelerator, parts):
    """Everything that a run goes on from: the weights that are handed out, the parameters, the optimizer's state."""
    model, optimizer, _ = parts
    found = {
        f"master {name}": value.clone() for name, value in accelerator.get_state_dict(model).items()
    }
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}, {key}"] = (
                value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
            )
    return found


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_steps_are_those_of_the_loop_by_hand(kind):
    expected, masters = by_hand(OPTIMIZERS[kind])
    accelerator = start()
    parts = model, optimizer, _ = prepared(accelerator, OPTIMIZERS[kind])
    train(accelerator, parts, batches())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(
            parameter, expected.get_parameter(name)
        ), name
    state = accelerator.get_state_dict(model)
    for name, master in masters.items():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], master), name
    assert torch.equal(state["3.weight"], state["0.weight"])  # tied
    # A frozen parameter needs no master, a buffer stays as it is.
    assert state["1.bias"].dtype == torch.bfloat16 and state["offset"].dtype == torch.float32
    assert list(optimizer.state) == [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}


def test_updates_that_bf16_loses_are_kept():
    accelerator = start(steps=1)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    # 1 - 100 * 1e-4; a single step is far less than the 2**-8 that parts 1 from the bf16 number below.
    assert accelerator.get_state_dict(model)["weight"].item() == pytest.approx(0.99, abs=1e-5)
    assert model.weight.item() == torch.tensor(0.99).bfloat16().item()


@pytest.mark.parametrize("open_window", [False, True])
def test_a_saved_run_goes_on_bit_for_bit(tmp_path, open_window):
    accelerator = start()
    parts = prepared(accelerator)
    first = 11 if open_window else 10
    train(accelerator, parts, batches()[:first])
    accelerator.save_state(tmp_path)
    saved = full(accelerator, parts)
    train(accelerator, parts, batches()[first:])
    done = full(accelerator, parts)

    again = start()
    others = prepared(again, seed=5)
    again.load_state(tmp_path)
    assert_equal(full(again, others), saved)
    train(again, others, batches()[first:])
    assert_equal(full(again, others), done)


def test_a_run_saved_before_its_first_step_keeps_its_masters(tmp_path):
    accelerator = start()
    parts = prepared(accelerator)
    accelerator.save_state(tmp_path, blocking=False)
    accelerator.end_training()
    again = start()
    others = prepared(again, seed=5)
    again.load_state(tmp_path)
    assert_equal(full(again, others), full(accelerator, parts))
    assert torch.equal(again.get_state_dict(others[0])["1.weight"], make_model()[1].weight)


@pytest.mark.parametrize("layout", ["native", "compat"])
def test_checkpoints_are_those_of_an_fp32_run(tmp_path, layout):
    """From a run with masters to one without and back, nothing is rounded but what has no master."""
    accelerator = start()
    parts = prepared(accelerator)
    train(accelerator, parts, batches()[:10])
    accelerator.save_state(tmp_path / "masters", layout=layout)
    saved = full(accelerator, parts)
    plain = start(masters=False)
    others = prepared(plain, seed=5)
    plain.load_state(tmp_path / "masters")
    state = plain.get_state_dict(others[0])
    assert all(torch.equal(saved[f"master {name}"].float(), value) for name, value in state.items())
    moments = [entry["exp_avg"] for entry in others[1].state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    plain.save_state(tmp_path / "plain", layout=layout)
    again = start()
    back = prepared(again, seed=6)
    again.load_state(tmp_path / "plain")
    assert_equal(full(again, back), saved)


def test_an_optimizers_own_state_brings_the_masters(tmp_path):
    """For those who save models and optimizers by themselves."""
    accelerator = start()
    parts = prepared(accelerator)
    train(accelerator, parts, batches()[:10])
    torch.save(
        {"model": parts[0].state_dict(), "optimizer": parts[1].state_dict()}, tmp_path / "own.pt"
    )
    saved = torch.load(tmp_path / "own.pt", weights_only=True)
    again = start()
    others = prepared(again, seed=5)
    others[1].load_state_dict(saved["optimizer"])
    others[0].load_state_dict(saved["model"])
    assert_equal(full(again, others), full(accelerator, parts))


def test_weights_that_somebody_writes_count():
    accelerator = start(steps=1)
    model, optimizer, _ = prepared(accelerator)
    before = accelerator.get_state_dict(model)["1.weight"].clone()
    with torch.no_grad():
        model[1].weight[0] = 2.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    after = accelerator.get_state_dict(model)["1.weight"]
    assert torch.equal(after[0], torch.full_like(after[0], 2.0)) and torch.equal(
        after[1:], before[1:]
    )


def test_groups_and_parameters_that_come_later_have_masters():
    accelerator = start(steps=1)
    model = make_model()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD([model[1].weight, model[1].bias], lr=1e-4)
    )
    model[1].bias.requires_grad_(True)  # was frozen
    optimizer.add_param_group({"params": [model[2].weight], "lr": 1e-5})
    begin = {
        name: value.float().clone() for name, value in accelerator.get_state_dict(model).items()
    }
    for _ in range(10):
        for parameter in (model[1].weight, model[1].bias, model[2].weight):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = accelerator.get_state_dict(model)
    for name, way in (("1.weight", 1e-3), ("1.bias", 1e-3), ("2.weight", 1e-4)):
        assert state[name].dtype == torch.float32, name
        assert torch.allclose(
            begin[name] - state[name], torch.full_like(state[name], way), rtol=1e-2, atol=0
        ), name


def test_a_closure_is_evaluated_with_the_parameters_of_its_time():
    accelerator = start(steps=1)
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    masters = model.weight.detach().clone().requires_grad_()
    reference = torch.optim.LBFGS([masters], lr=0.1)

    def reference_closure():
        weight = masters.detach().bfloat16().requires_grad_()
        loss = nn.functional.mse_loss((x.bfloat16() @ weight.T).float(), y)
        loss.backward()
        masters.grad = weight.grad.float()
        return loss

    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        return loss

    for _ in range(3):
        expected, found = reference.step(reference_closure), optimizer.step(closure)
        assert torch.equal(expected, found)
    assert torch.equal(accelerator.get_state_dict(model)["weight"], masters)


# -- refused


@pytest.mark.parametrize("precision", ["no", "fp16", "fp8"])
def test_another_precision_is_refused(precision):
    with pytest.raises(
        ConfigurationError, match=f"needs mixed_precision='bf16'.*'{precision}' .argument"
    ):
        Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=[MasterWeightsKwargs()])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {
                "fsdp_plugin": lambda: FullyShardedDataParallelPlugin(
                    fsdp_version=1, activation_checkpointing=True
                )
            },
            "shard with fsdp_version=2",
        ),
        (
            {"strategy": lambda: type("Own", (Strategy,), {})},
            "manages its parameters or master weights itself",
        ),
    ],
)
def test_layouts_without_a_place_for_masters_are_refused(arguments, reason):
    with pytest.raises(ConfigurationError, match=reason):
        Accelerator(
            cpu=True,
            mixed_precision="bf16",
            kwargs_handlers=[MasterWeightsKwargs()],
            **{name: make() for name, make in arguments.items()},
        )


@pytest.mark.parametrize("layout", ["deepspeed", "xla"])
def test_engines_that_need_not_be_here_are_refused(layout):
    state, handlers = (
        AcceleratorState(mixed_precision="bf16"),
        Handlers(master_weights=MasterWeightsKwargs()),
    )
    with pytest.raises(
        ConfigurationError, match=f"contains MasterWeightsKwargs, but strategy '{layout}'"
    ):
        check_combination(layout, state, handlers, (), {"mixed_precision": "argument"})


class InBackward(torch.optim.SGD):
    def fused_backward(self, loss, lr):
        raise NotImplementedError


class Elsewhere(torch.optim.SGD):
    """Keeps the parameters where nobody sees them."""

    def __init__(self, parameters, lr):
        self.own = list(parameters)
        super().__init__(self.own, lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.own:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


def test_optimizers_that_cannot_step_masters_are_refused():
    model = make_model()
    with pytest.raises(PrepareError, match=r"InBackward updates .*in the backward"):
        start().prepare(model, InBackward(model.parameters(), lr=0.1))
    accelerator = start(steps=1)
    model = make_model()
    model, optimizer = accelerator.prepare(model, Elsewhere(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, batches()[0]))
    with pytest.raises(PrepareError, match="Elsewhere steps the bf16 parameters themselves"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    with pytest.raises(PrepareError, match=r"0 \(Embedding\) has sparse gradients"):
        start().prepare(model)

# SPDX-License-Identifier: Apache-2.0
"""Optimizers of matrices whose work is shared, against a plain loop of one process in float64."""

import time

import pytest
import torch
import torch.distributed as dist
from layouts import compare, compare_state
from newton_schulz import WIDTH, Model, Orthogonal, batches, loss_of, make, shapes, start
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.config.precision import MasterWeightsKwargs
from accelerate.core.errors import CheckpointError, PrepareError
from accelerate.parallel.matrices import register_matrix_optimizer, shared_step_of
from accelerate.parallel.matrix_owners import assign

pytestmark = pytest.mark.usefixtures("float64")
STEPS = 4


def plain(steps=STEPS, mixed=True, window=1, clip=None):
    """(the model's state, the states of the optimizers) of a loop of one process."""
    model, optimizers = make(mixed=mixed)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for number, x in enumerate(batches(steps * window)):
        (loss_of(model, x) / window).backward()
        if (number + 1) % window:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]


def train(accelerator, model, optimizers, data, clip=None):
    part, parts = accelerator.strategy.data_shard
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o.optimizer, 0.9) for o in optimizers]
    for x in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x[part::parts]))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()


def full_state(accelerator, model, optimizer):
    return accelerator.prepared_model(model).prepared_optimizer(optimizer).state_dict()


class Traffic:
    """Counts the all-to-all messages of a block, and the bytes that this rank sends in them."""

    def __enter__(self):
        self.messages, self.bytes = 0, 0
        self.former = dist.all_to_all_single
        dist.all_to_all_single = self.count
        return self

    def count(self, output, message, *args, **kwargs):
        self.messages += 1
        self.bytes += message.nbytes
        return self.former(output, message, *args, **kwargs)

    def __exit__(self, *error):
        dist.all_to_all_single = self.former


def run(layout, mixed=True, steps=STEPS, window=1, clip=None):
    accelerator = start(layout, gradient_accumulation_steps=window)
    model, optimizers = make(mixed=mixed)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    with Traffic() as traffic:
        train(accelerator, model, optimizers, batches(steps * window), clip)
    expected, states = plain(steps, mixed, window, clip)
    compare_state(accelerator, model, expected, 1e-10, f"{layout}: model")
    for optimizer, state in zip(optimizers, states, strict=True):
        found = full_state(accelerator, model, optimizer)
        if accelerator.is_main_process:
            compare(found["state"], state["state"], 1e-10, f"{layout}: optimizer")
    return accelerator, optimizers[0].optimizer, traffic


@on_ranks(2)
def test_equal_to_one_process():
    register_matrix_optimizer(Orthogonal, shapes)
    matrices = [p for p in make()[0].parameters() if p.ndim == 2]
    size = sum(matrix.nbytes for matrix in matrices)
    costs = [min(p.shape) ** 2 * max(p.shape) for p in matrices]
    for layout in ("ddp", "fsdp", "tp"):
        for mixed in (True, False):
            accelerator, optimizer, traffic = run(layout, mixed, window=2, clip=0.5)
            assert traffic.messages <= 2 * STEPS, layout
            assert traffic.bytes <= 2 * size * STEPS, layout
            assert optimizer.work <= STEPS * (sum(costs) / 2 + max(costs)), layout
            # The state of a matrix is on one rank.
            held = [bool(matrix.state) for matrix in shared_step_of(optimizer).matrices()]
            everywhere = accelerator.gather(torch.tensor(held).int()).view(2, -1).sum(0)
            assert everywhere.tolist() == [1] * len(matrices), layout
            # As before, a rank sees the state of all parameters.
            assert len(optimizer.state_dict()["state"]) == len(list(grouped(optimizer)))


def grouped(optimizer):
    for group in optimizer.param_groups:
        yield from group["params"]


@on_ranks(4)
def test_meshes_of_two_dimensions():
    register_matrix_optimizer(Orthogonal, shapes)
    for layout in ("hsdp", "fsdp x tp", "pp", "pp x fsdp"):
        for mixed in (True, False):
            _, optimizer, traffic = run(layout, mixed)
            # Some matrices are not split by tensor parallelism: they are on another mesh.
            meshes = len(shared_step_of(optimizer).owners)
            assert meshes == (2 if layout == "fsdp x tp" else 1)
            assert traffic.messages <= 2 * STEPS * meshes, layout


def test_the_work_is_balanced():
    layers = [(4096, 4096)] * 128 + [(11008, 4096)] * 96
    costs = [float(min(shape)) ** 2 * max(shape) for shape in layers]
    for ranks in (2, 4, 64, 1000):
        loads = [0.0] * ranks
        for cost, owner in zip(costs, assign(costs, ranks), strict=True):
            loads[owner] += cost
        assert max(loads) <= max(1.1 * sum(costs) / ranks, max(costs))


def saved(folder, layout, steps):
    """Train, and save after each of some steps; the rest is trained by another run."""
    register_matrix_optimizer(Orthogonal, shapes)
    accelerator = start(layout)
    model, optimizers = make()
    model, *optimizers = accelerator.prepare(model, *optimizers)
    train(accelerator, model, optimizers, batches()[:steps])
    accelerator.save_state(str(folder))


def continued(folder, layouts, steps):
    register_matrix_optimizer(Orthogonal, shapes)
    expected, states = plain()
    for layout in layouts:
        accelerator = start(layout)
        model, optimizers = make(seed=3)
        model, *optimizers = accelerator.prepare(model, *optimizers)
        if layout != "one":
            # It has another state.
            train(accelerator, model, optimizers, batches()[:1])
        accelerator.load_state(str(folder))
        train(accelerator, model, optimizers, batches()[steps:])
        compare_state(accelerator, model, expected, 1e-10, f"{layout}: model")
        found = full_state(accelerator, model, optimizers[0])
        compare(found.get("state", {}), states[0]["state"], 1e-10, f"{layout}: optimizer")


def test_checkpoints_go_into_other_layouts(ranks, tmp_path):
    for layout in ("fsdp", "fsdp full", "ddp"):
        ranks(2).run(saved, tmp_path / layout, layout, 2)
        ranks(2).run(continued, tmp_path / layout, ["ddp", "fsdp", "fsdp full", "tp"], 2)
        continued(tmp_path / layout, ["one"], 2)
    saved(tmp_path / "one", "one", 2)
    ranks(2).run(continued, tmp_path / "one", ["ddp", "fsdp"], 2)
    ranks(4).run(continued, tmp_path / "fsdp", ["ddp", "fsdp", "hsdp", "fsdp x tp", "pp"], 2)


class Unregistered(Orthogonal):
    """Every rank computes all of its step, which is not that of the registered class."""

    def step(self, closure=None):
        return super().step(closure)


class Views(nn.Module):
    """Parameters that are matrices in a view only."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(WIDTH, 12, bias=False)
        self.convolution = nn.Conv1d(12, 6, 3, padding=1, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 6, 4))
        self.unused = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = self.heads(x.unsqueeze(1)).transpose(1, 2)
        x = self.convolution(x).squeeze(-1)
        return torch.einsum("bi,eij->bj", x, self.experts).tanh()


VIEWS = {(12, WIDTH): (3, 4, WIDTH), (6, 12, 3): (6, 36), (5, 6, 4): (5, 6, 4), (4, 4): (4, 4)}


def views_of(parameter, group):
    return VIEWS[tuple(parameter.shape)]


def train_views(model, step, part=0, parts=1, backward=torch.Tensor.backward):
    for x in batches():
        backward(model(x[part::parts]).square().mean())
        step()
        model.zero_grad()


def plain_views():
    """A plain loop whose optimizer has the matrices as parameters of their own, in the memory of the model's."""
    torch.manual_seed(0)
    model = Views()
    views = {}
    for parameter in model.parameters():
        shape = VIEWS[tuple(parameter.shape)]
        blocks = parameter.data.view(-1, *shape[-2:])
        views[parameter] = [nn.Parameter(block) for block in blocks]
    optimizer = Orthogonal([leaf for leaves in views.values() for leaf in leaves])

    def step():
        for parameter, leaves in views.items():
            if parameter.grad is not None:
                gradients = parameter.grad.view(-1, *leaves[0].shape)
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    leaf.grad = gradient
        optimizer.step()

    train_views(model, step)
    return model.state_dict()


def check_views(layouts):
    register_matrix_optimizer(Orthogonal, views_of)
    for layout in layouts:
        accelerator = start(layout)
        torch.manual_seed(0)
        model = Views()
        optimizer = Orthogonal(model.parameters())
        if layout == "ddp":
            model.unused.requires_grad_(False)
        model, optimizer = accelerator.prepare(model, optimizer)
        train_views(model, optimizer.step, *accelerator.strategy.data_shard, accelerator.backward)
        compare_state(accelerator, model, plain_views(), 1e-10, f"{layout}: model")
        # What was saved continues in the same way.
        prepared = accelerator.prepared_model(model).prepared_optimizer(optimizer)
        state = prepared.state_dict()
        prepared.load_state_dict(state)
        compare(prepared.state_dict(), state, 0)


def test_views(ranks):
    check_views(["one"])
    ranks(2).run(check_views, ["ddp", "fsdp whole"])


def local_steps(accelerator):
    """Ranks that step with their own gradients train apart, until they have equal ones again."""
    model, (optimizer,) = make()
    plain_model, (plain_optimizer,) = make()
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, world = accelerator.process_index, accelerator.num_processes
    with accelerator.no_sync(model):
        for x in batches():
            accelerator.backward(loss_of(model, x[rank::world]))
            optimizer.step()
            optimizer.zero_grad()
    for x in batches():
        loss_of(plain_model, x[rank::world]).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    torch.testing.assert_close(inner.state_dict(), plain_model.state_dict(), rtol=0, atol=1e-10)
    accelerator.backward(loss_of(model, x))
    optimizer.step()
    held = [bool(matrix.state) for matrix in shared_step_of(optimizer.optimizer).matrices()]
    assert accelerator.gather(torch.tensor(held).int()).view(2, -1).sum(0).tolist() == [1] * 8


def uneven(accelerator):
    """A rank may run out of batches."""
    model, (optimizer,) = make()
    model, optimizer = accelerator.prepare(model, optimizer)
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batches()[0]))
    optimizer.step()
    with accelerator.join_uneven_inputs([model]):
        for x in batches()[: 1 + accelerator.process_index]:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, x))
            optimizer.step()
    sums = accelerator.gather(sum(p.detach().sum() for p in model.parameters()))
    assert sums[0] == sums[1]


def one_rank_alone(accelerator):
    """A state that rank 0 asks for alone is an error at once, there and on a rank that comes too late."""
    model, (optimizer,) = make()
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, [optimizer], batches()[:1])
    for rank in range(2):
        if accelerator.process_index == rank:
            begin = time.monotonic()
            with pytest.raises(CheckpointError, match=r"Orthogonal.state_dict.*on every rank"):
                optimizer.state_dict()
            assert time.monotonic() - begin < 60
        accelerator.wait_for_everyone()
    assert len(optimizer.state_dict()["state"]) == 16


def closures_and_groups(accelerator):
    """A step with a closure, and groups that are added later."""
    runs = []
    for prepares in (False, True):
        model, _ = make()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = Orthogonal(matrices[:4])
        if prepares:
            model, optimizer = accelerator.prepare(model, optimizer)
            matrices = [p for p in model.parameters() if p.ndim == 2]
        for number, x in enumerate(batches()):
            if number == 2:
                optimizer.add_param_group({"params": matrices[4:], "lr": 0.05})

            def closure(x=x, model=model, optimizer=optimizer, prepares=prepares):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                if prepares:
                    accelerator.backward(loss)
                else:
                    loss.backward()
                return loss

            loss = optimizer.step(closure)
        runs.append((model, loss.detach()))
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=1e-10)
    compare_state(accelerator, runs[1][0], runs[0][0].state_dict(), 1e-10)


def masters(layout):
    """With master weights, the result is that of an optimizer whose step is not shared."""
    found = []
    for kind in (Orthogonal, Unregistered):
        accelerator = start(layout, mixed_precision="bf16", kwargs_handlers=[MasterWeightsKwargs()])
        torch.manual_seed(0)
        model = Model().float()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        model, optimizer = accelerator.prepare(model, kind(matrices))
        for x in batches():
            accelerator.backward(loss_of(model, x.float()))
            optimizer.step()
            optimizer.zero_grad()
        assert (shared_step_of(optimizer.optimizer) is None) == (kind is Unregistered)
        state = full_state(accelerator, model, optimizer)
        found.append((accelerator.get_state_dict(model), state.get("state")))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def muon(layout):
    """Muon rounds to bfloat16: it differs from one process as much as a run whose weights were perturbed."""

    def make_muon(noise=0.0):
        model, _ = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=noise)
        return model, torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)

    states = []
    for noise in (0.0, 1e-9):
        model, optimizer = make_muon(noise)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for x in batches():
            loss_of(model, x).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    tolerance = max((states[0][key] - states[1][key]).abs().max() for key in states[0])
    accelerator = start(layout)
    model, optimizer = accelerator.prepare(*make_muon())
    assert shared_step_of(optimizer.optimizer) is not None
    train(accelerator, model, [optimizer], batches())
    compare_state(accelerator, model, states[0], 3 * float(tolerance), layout)


def muon_of_replicas(accelerator):
    """Without a call of `register_matrix_optimizer`, each replica has the whole state: rank 0 may save it alone."""
    model, _ = make()
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    model, optimizer = accelerator.prepare(model, muon)
    train(accelerator, model, [optimizer], batches()[:1])
    assert shared_step_of(optimizer.optimizer) is None
    if accelerator.is_main_process:
        assert len(optimizer.state_dict()["state"]) == 8


@on_ranks(2)
def test_right_programs():
    muon_of_replicas(start("ddp"))
    register_matrix_optimizer(Orthogonal, shapes)
    local_steps(start("ddp"))
    uneven(start("ddp"))
    one_rank_alone(start("ddp"))
    for layout in ("fsdp", "ddp"):
        if layout == "ddp":
            register_matrix_optimizer(torch.optim.Muon)
        closures_and_groups(start(layout))
        masters(layout)
        muon(layout)


class Wrong(Orthogonal):
    pass


def test_bad_input():
    for arguments, name in (((3,), "3"), ((Wrong, "heads"), "heads"), ((dict,), "dict")):
        with pytest.raises(TypeError, match=name):
            register_matrix_optimizer(*arguments)
    cases = {
        "blocks.0.up.bias": None,
        "blocks.0.up.weight": lambda p, group: (3, 5),
        "Parameter for .*weight": lambda p, group: p,
        "odd.weight": lambda p, group: p.shape if p.shape[0] != 5 else (2, 2, 10),
    }
    for name, viewed in cases.items():
        register_matrix_optimizer(Wrong, viewed)
        reset_states()
        model = Model()
        parameters = list(model.parameters())
        if viewed is not None:
            parameters = [p for p in parameters if p.ndim == 2]
        with pytest.raises(PrepareError, match=name) as error:
            Accelerator(cpu=True).prepare(model, Wrong(parameters))
        assert "Wrong" in str(error.value)


def test_one_process_is_left_alone():
    reset_states()
    model, _ = make()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    _, prepared = Accelerator(cpu=True).prepare(model, optimizer)
    assert shared_step_of(prepared.optimizer) is None
    assert "step" not in optimizer.__dict__

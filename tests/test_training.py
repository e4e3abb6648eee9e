# SPDX-License-Identifier: Apache-2.0
"""What a training loop relies on, on 1, 2 and 4 ranks, against plain PyTorch in float64."""

import pytest
import torch
from rank_pool import on_ranks
from states import reset_states
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs
from accelerate.core.errors import AccelerateError, PrepareError
from accelerate.local_sgd import LocalSGD
from accelerate.parallel.ddp.model import replica_of
from accelerate.state import PartialState
from accelerate.utils import DDPCommunicationHookType as Hook
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

everywhere = on_ranks(1, 2, 4)


def world():
    return PartialState(cpu=True).num_processes


def fresh(**options):
    reset_states()
    return Accelerator(**options)


def linear(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 3, dtype=dtype)


def close(found, expected, tolerance=1e-12):
    distance = float((found - expected).abs().max())
    assert distance <= tolerance, f"off by {distance}: {found} against {expected}"


def texts(count):
    """Samples of different lengths, with the number of tokens that count in each."""
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        length = 1 + (i * 5) % 7
        x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (length,), generator=generator)
        if i % 3 == 0:
            y[: length // 2] = -100
        if i == 5:
            y[:] = -100
        yield x, y


@everywhere
@pytest.mark.parametrize("by_hand", [False, True])
def test_item_weights_are_the_mean_over_the_window(by_hand):
    """A token mean over ragged batches, and hand scaling of summed losses, both equal one big batch."""
    steps, samples = 2, list(texts(4 * world()))
    reference = linear()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for start in range(0, len(samples), steps * world()):
        window = samples[start : start + steps * world()]
        x, y = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        torch.nn.functional.cross_entropy(reference(x), y).backward()
        plain.step()
        plain.zero_grad()
    accelerator = fresh(gradient_accumulation_steps=steps)
    model, optimizer = accelerator.prepare(
        model_ := linear(), torch.optim.SGD(model_.parameters(), lr=0.1)
    )
    mine = samples[accelerator.process_index :: world()]
    for start in range(0, len(mine), steps):
        window = mine[start : start + steps]
        local = torch.tensor(sum(int((y != -100).sum()) for _, y in window))
        total = accelerator.reduce(local, "sum")
        for x, y in window:
            with accelerator.accumulate(model):
                if by_hand:
                    loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
                    accelerator.backward(loss * steps * world() / total)
                else:
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss, num_items=(y != -100).sum())
                optimizer.step()
                optimizer.zero_grad()
    close(accelerator.unwrap_model(model).weight.detach(), reference.weight.detach())


@everywhere
def test_two_item_backwards_for_one_step_are_refused():
    accelerator = fresh()
    model, optimizer = accelerator.prepare(
        model_ := linear(), torch.optim.SGD(model_.parameters(), lr=0.1)
    )
    x = torch.ones(2, 4, dtype=torch.float64)
    accelerator.backward(model(x).mean(), num_items=2)
    with pytest.raises(AccelerateError, match="twice"):
        accelerator.backward(model(x).mean(), num_items=2)
    optimizer.step()
    accelerator.backward(model(x).mean(), num_items=2)


@everywhere
def test_accumulation_of_plain_losses():
    """Steps and loader ends as the API has them: every backward weighs 1/steps."""
    x = torch.arange(1.0, 9.0, dtype=torch.float64)
    accelerator = fresh(gradient_accumulation_steps=4 // world() if world() <= 4 else 1)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.zero_()
    loader = DataLoader(TensorDataset(x[:, None], 2 * x[:, None]), batch_size=2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.02), loader
    )
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    close(
        accelerator.unwrap_model(model).weight.detach(),
        torch.tensor([[2.04]], dtype=torch.float64),
        1e-12,
    )


@everywhere
@pytest.mark.parametrize("clears", ["first", "last", "both"])
def test_gradients_are_cleared_before_the_backward_or_after_the_step(clears):
    """Two optimizers that alternate, windows of two batches, and a loader that ends within one."""
    accelerator = fresh(gradient_accumulation_steps=2)
    x = torch.arange(1.0, 4 * 5 + 1, dtype=torch.float64)[:, None]
    models = [torch.nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)]
    for model in models:
        model.weight.data.fill_(1.0)
    expected = []
    for factor in (1, 3):
        weight = 1.0
        for _ in range(2):
            for window in (x[:8], x[8:16], x[16:]):
                # The loss of a batch is divided by the steps of a full window.
                share = 1.0 if len(window) == 8 else 0.5
                weight -= 0.01 * factor * share * float(window.mean())
        expected.append(weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    loader = DataLoader(TensorDataset(x), batch_size=4 // world())
    *models, loader = accelerator.prepare(*models, loader)
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    for _ in range(2):
        for (inputs,) in loader:
            with accelerator.accumulate(*models):
                for model, optimizer, factor in zip(models, optimizers, (1, 3), strict=True):
                    if clears != "last":
                        optimizer.zero_grad()
                    accelerator.backward(factor * model(inputs).mean())
                    optimizer.step()
                    if clears != "first":
                        optimizer.zero_grad()
    for model, weight in zip(models, expected, strict=True):
        (found,) = accelerator.unwrap_model(model).parameters()
        close(found.detach(), torch.tensor([[weight]], dtype=torch.float64), 1e-9)


def test_gradients_of_a_step_that_is_left_out_are_cleared():
    accelerator = fresh(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 10.0**number)).sum())
            if number == 1:
                # As where a loss is not finite.
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                close(model.weight.grad, torch.tensor([[50.0]]))


@on_ranks(1, 2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_clipping_inside_of_a_window_changes_nothing(layout):
    options = {}
    if layout == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = fresh(gradient_accumulation_steps=2, **options)
    rank = accelerator.process_index
    model = linear()
    expected = [p.detach().clone() for p in model.parameters()]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.tensor([3.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    norms = []
    for factor in (1.0, 2.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(factor * (1 + rank) * x[None]).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            if layout == "ddp" or factor == 2.0:
                accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    # The gradient of each row of the weight, and of the bias.
    mean = sum(1.0 + r for r in range(world())) / world()
    gradient = torch.cat([1.5 * mean * x, torch.ones(1, dtype=torch.float64)]).expand(3, 5)
    local = torch.cat([0.5 * (1 + rank) * x, torch.full((1,), 0.5, dtype=torch.float64)])
    close(norms[0], local.expand(3, 5).norm())
    close(norms[1], gradient.norm(), 1e-9)
    clipped = (gradient * (0.5 / (gradient.norm() + 1e-6))).clamp(-0.1, 0.1)
    state = accelerator.get_state_dict(model)
    if rank == 0:
        close(state["weight"], expected[0] - clipped[:, :4], 1e-9)
        close(state["bias"], expected[1] - clipped[:, 4], 1e-9)


@on_ranks(2)
def test_a_window_is_ended_early_by_a_backward_that_averages():
    accelerator = fresh(gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.zero_()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.full((1, 1), 4.0 * (1 + accelerator.process_index), dtype=torch.float64)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        optimizer.step()
    accelerator.sync_gradients = True
    with pytest.raises(AccelerateError, match=r"SGD.*Linear"):
        optimizer.step()
    accelerator.backward(model(x).sum())
    optimizer.step()
    close(accelerator.unwrap_model(model).weight.detach(), torch.tensor([[-3.0]]))


class Left(Exception):
    pass


@everywhere
def test_windows_are_divided_by_their_own_length():
    """Also when the number of steps changes in one, and when a loop is left before the backward of a batch."""
    accelerator = fresh(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    raw = DataLoader(
        TensorDataset(torch.arange(1.0, 8.0 * world() + 1, dtype=torch.float64)[:, None]),
        batch_size=1,
    )
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), raw
    )
    weight = accelerator.unwrap_model(model).weight
    rows, updates, before = [], [], weight.item()

    def train(steps, leave_at=None):
        nonlocal before
        for number, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                if number == leave_at:
                    raise Left
                accelerator.backward(model(x).mean())
                rows.extend(accelerator.gather(x).flatten().tolist())
                accelerator.gradient_accumulation_steps = steps.get(
                    number, accelerator.gradient_accumulation_steps
                )
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates.append(
                    (sum(rows) / len(rows), before - weight.item(), len(rows) // world())
                )
                before = weight.item()
                rows.clear()

    with pytest.raises(Left):
        train({2: 3}, leave_at=5)  # windows of 2, 2, and one batch of 3
    train({})
    assert [length for *_, length in updates] == [2, 2, 3, 3, 3]
    for mean, update, _ in updates:
        assert update == pytest.approx(mean, abs=1e-9)


@everywhere
def test_no_message_before_the_window_ends():
    accelerator = fresh(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(
        model_ := linear(), torch.optim.SGD(model_.parameters(), lr=0.1)
    )
    rank = accelerator.process_index
    gradients = []
    for step in range(2):
        with accelerator.accumulate(model):
            x = torch.full((1, 4), float(1 + rank + 10 * step), dtype=torch.float64)
            accelerator.backward(model(x).sum())
            gradients.append(accelerator.unwrap_model(model).weight.grad.clone())
            assert accelerator.sync_gradients is (step == 1)
            optimizer.step()
            optimizer.zero_grad()
    close(gradients[0], torch.full((3, 4), (1.0 + rank) / 2, dtype=torch.float64))
    mean = sum((1 + r) / 2 + (11 + r) / 2 for r in range(world())) / world()
    close(gradients[1], torch.full((3, 4), mean, dtype=torch.float64))


@everywhere
def test_options_of_accumulation():
    rank = torch.distributed.get_rank() if world() > 1 else 0
    x = torch.full((1, 4), 1.0 + rank, dtype=torch.float64)
    mean = torch.full((3, 4), sum(1.0 + r for r in range(world())) / world(), dtype=torch.float64)
    accelerator = fresh(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    )
    model = accelerator.prepare(linear())
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
    assert not accelerator.sync_gradients
    close(accelerator.unwrap_model(model).weight.grad, mean / 2)

    for follow_loader in (True, False):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=follow_loader)
        accelerator = fresh(gradient_accumulation_plugin=plugin)
        model, loader = accelerator.prepare(
            linear(), DataLoader(TensorDataset(torch.zeros(3 * world())), batch_size=1)
        )
        ends = []
        for _ in range(2):
            for _batch in loader:
                with accelerator.accumulate(model):
                    ends.append(accelerator.sync_gradients)
        assert ends == ([False, True, True] * 2 if follow_loader else [False, True] * 3), ends

    accelerator = fresh()
    model = accelerator.prepare(linear())
    accelerator.backward(model(x).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.25)
    close(
        accelerator.unwrap_model(model).weight.grad, torch.full((3, 4), 0.25, dtype=torch.float64)
    )


@everywhere
def test_a_late_sync():
    """Forwards under no_sync, of which the last backward still synchronises all."""
    accelerator = fresh()
    model = accelerator.prepare(linear())
    x = torch.full((1, 4), 1.0 + accelerator.process_index, dtype=torch.float64)
    with accelerator.no_sync(model):
        losses = [model(x).sum(), model(x).sum()]
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
    mean = sum(1.0 + r for r in range(world())) / world()
    close(
        accelerator.unwrap_model(model).weight.grad,
        torch.full((3, 4), 2 * mean, dtype=torch.float64),
    )


@everywhere
def test_who_does_what(tmp_path):
    accelerator = fresh()
    note = tmp_path / "note"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            note.write_text("written first")
        assert note.read_text() == "written first"
    accelerator.wait_for_everyone()
    done = []
    accelerator.on_main_process(lambda: done.append("main"))()
    accelerator.on_last_process(lambda: done.append("last"))()
    accelerator.on_process(process_index=world() - 1)(lambda: done.append("this"))()
    expected = ["main"] * accelerator.is_main_process + [
        "last",
        "this",
    ] * accelerator.is_last_process
    assert done == expected, done
    with accelerator.split_between_processes(
        list(range(2 * world() + 1)), apply_padding=True
    ) as part:
        shared = accelerator.gather(torch.tensor(part))
    assert sorted(set(shared.tolist())) == list(range(2 * world() + 1))


@everywhere
@pytest.mark.parametrize(
    ("hook", "wrapper", "tolerance"),
    [
        (Hook.NO, Hook.NO, 1e-6),
        (Hook.FP16, Hook.NO, 2e-3),
        (Hook.BF16, Hook.NO, 2e-2),
        (Hook.POWER_SGD, Hook.NO, 10.0),
        (Hook.POWER_SGD, Hook.BF16, 10.0),
    ],
)
def test_communication_hooks(hook, wrapper, tolerance):
    accelerator = fresh(
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper)]
    )
    model = accelerator.prepare(linear(dtype=torch.float32))
    inputs = [torch.full((1, 4), 0.25 + r) for r in range(world())]
    accelerator.backward(model(inputs[accelerator.process_index]).square().sum())
    reference = linear(dtype=torch.float32)
    (sum(reference(x).square().sum() for x in inputs) / world()).backward()
    expected = reference.weight.grad
    close(
        accelerator.unwrap_model(model).weight.grad,
        expected,
        tolerance * float(expected.abs().max()),
    )


@everywhere
def test_fp16_skips_on_every_rank_and_unscales_once():
    accelerator = fresh(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
    )
    model = linear(dtype=torch.float32)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    model, optimizer, scheduler = accelerator.prepare(model, plain, scheduler)
    before = accelerator.unwrap_model(model).weight.detach().clone()
    x = torch.ones(1, 4)
    # Only the last rank's gradients overflow; all of them have to leave the step out.
    factor = float("inf") if accelerator.is_last_process else 1.0
    accelerator.backward(model(x).sum() * factor)
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [0.1]
    close(accelerator.unwrap_model(model).weight.detach(), before, 0.0)
    optimizer.zero_grad()
    accelerator.backward(model(x).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    again = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    # 12 weights with gradient 1 and 3 biases with gradient 1
    close(norm, torch.tensor(15.0).sqrt(), 1e-3)
    close(again, norm, 0.0)
    own = torch.amp.GradScaler("cpu", init_scale=2.0)
    accelerator.scaler = own  # the backward and the prepared optimizers take it
    optimizer.zero_grad()
    accelerator.backward(model(x).sum())
    close(accelerator.unwrap_model(model).weight.grad, torch.full((3, 4), 2.0), 0.0)
    assert optimizer.scaler is own
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    close(accelerator.unwrap_model(model).weight.detach(), before - 0.1, 1e-3)


@everywhere
def test_prepare_tells_double_work():
    accelerator = fresh()
    plain = linear()
    model = accelerator.prepare(plain)
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(plain) is model
    assert len(accelerator._models) == 1
    if world() > 1:
        with pytest.raises(PrepareError, match="plain model"):
            accelerator.prepare(torch.nn.parallel.DistributedDataParallel(linear(1)))


@everywhere
def test_tied_and_frozen_parameters():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)])
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    accelerator = fresh()
    prepared = accelerator.prepare(model)
    assert (
        accelerator.unwrap_model(prepared)[2].weight is accelerator.unwrap_model(prepared)[0].weight
    )
    accelerator.backward(prepared(torch.ones(2, 4, dtype=torch.float64)).sum())
    assert model[1].weight.grad is None
    frozen = accelerator.prepare(linear().requires_grad_(False))
    assert replica_of(frozen) is None


@everywhere
def test_uneven_inputs_join():
    accelerator = fresh()
    loader = DataLoader(
        TensorDataset(torch.arange(6 * world() + 1.0, dtype=torch.float64)[:, None]), batch_size=2
    )
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    model, loader = accelerator.prepare(model, loader)
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            seen += len(x)
    total = accelerator.reduce(torch.tensor(seen), "sum")
    assert int(total) == 6 * world() + 1, int(total)


@everywhere
def test_two_models_join_one_after_the_other():
    """The models get the mean gradient with zeros of the processes that have finished, or nobody stands still."""
    rows = torch.arange(1.0, 4 * world() + 2, dtype=torch.float64)[:, None]

    def models():
        return [torch.nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)]

    accelerator = fresh()
    torch.manual_seed(0)
    first, second = models()
    plain = [first.weight.item(), second.weight.item()]
    optimizer = torch.optim.SGD([first.weight, second.weight], lr=1e-3)
    first, second, optimizer, loader = accelerator.prepare(
        first, second, optimizer, DataLoader(TensorDataset(rows), batch_size=2)
    )
    with accelerator.join_uneven_inputs([first, second], even_batches=False):
        for (x,) in loader:
            accelerator.backward(first(x).square().sum())
            accelerator.backward(second(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    for start in range(0, len(rows), 2 * world()):
        x = rows[start : start + 2 * world()]
        plain[0] -= 1e-3 * 2 * plain[0] * float(x.square().sum()) / world()
        plain[1] -= 1e-3 * float(x.sum()) / world()
    found = [accelerator.unwrap_model(model).weight.item() for model in (first, second)]
    if accelerator.is_main_process:
        assert found == pytest.approx(plain, abs=1e-12)
    if world() == 1:
        return
    with pytest.raises(PrepareError, match=r"Linear, Linear.*order"):
        with accelerator.join_uneven_inputs([first, second], even_batches=False):
            first(rows[:2]), second(rows[:2])


@everywhere
def test_local_sgd_averages():
    accelerator = fresh()
    model, optimizer = accelerator.prepare(
        model_ := linear(), torch.optim.SGD(model_.parameters(), lr=0.1)
    )
    start = accelerator.unwrap_model(model).weight.detach().clone()
    rank = accelerator.process_index
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(
                    model(torch.full((1, 4), 1.0 + rank, dtype=torch.float64)).sum()
                )
                optimizer.step()
                optimizer.zero_grad()
                local.step()
        average = start - 0.2 * sum(1 + r for r in range(world())) / world()
        close(accelerator.unwrap_model(model).weight.detach(), average)


@everywhere
def test_scheduler_moves_once_per_process():
    accelerator = fresh(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))
    model = linear()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, plain, scheduler)
    rates = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4, dtype=torch.float64)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 1 / (1 + world()), 1 / (1 + world()), 1 / (1 + 2 * world())], rates


@everywhere
def test_trigger_and_metrics():
    accelerator = fresh()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    for size in (1, 2 * world(), 2 * world() + 1, 5 * world() - 1):
        for exact in (False, True):
            accelerator = fresh(exact=exact)
            loader = accelerator.prepare(
                DataLoader(TensorDataset(torch.arange(size)), batch_size=2)
            )
            found, objects = [], []
            for (ids,) in loader:
                found.append(accelerator.gather_for_metrics({"ids": ids})["ids"])
                objects += accelerator.gather_for_metrics([f"s{i}" for i in ids.tolist()])
            assert torch.cat(found).tolist() == list(range(size)), (size, exact, found)
            assert objects == [f"s{i}" for i in range(size)], (size, exact, objects)

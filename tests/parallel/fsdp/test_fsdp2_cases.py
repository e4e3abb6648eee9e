# SPDX-License-Identifier: Apache-2.0
"""FSDP2: adapters over a frozen model, fp16 with an overflow in one rank's shard, one plugin for two runs."""

import contextlib
import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from counting import Messages
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from windows import ACCUMULATION, CLIP, token_batches, token_loss, train_by_hand

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.precision import GradScalerKwargs
from accelerate.core.errors import CheckpointError, PrepareError
from accelerate.state import AcceleratorState, PartialState

WIDTH, VOCABULARY, BATCH = 8, 13, 4


class Adapted(nn.Module):
    """A frozen matrix and two small ones beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    """Units without and with something to train; ends that are tied, and frozen."""

    _no_split_modules = ("Adapted", "Frozen")

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Adapted(), Frozen(WIDTH, WIDTH), Adapted())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class Frozen(nn.Linear):
    pass


def make_adapted():
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".up." in name or ".down." in name)
    return model


def adapters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fresh(plugin, **others):
    reset_states()
    return Accelerator(cpu=True, fsdp_plugin=plugin, **others)


@on_ranks(2)
@pytest.mark.parametrize("late", [False, True], ids=["together", "the optimizer late"])
def test_adapters(late):
    """Small matrices train beside a frozen model, and nothing else has gradients, state or messages."""
    PartialState(cpu=True)
    torch.set_default_dtype(torch.float64)
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = make_adapted()
    optimizer = torch.optim.AdamW(adapters(plain), lr=0.05)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    batches = token_batches(6 * ACCUMULATION, BATCH * world, 5, VOCABULARY)
    _, norms = train_by_hand(plain, optimizer, batches)
    assert min(norms) > CLIP
    accelerator = fresh(
        Plugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP"),
        gradient_accumulation_steps=ACCUMULATION,
    )
    model = make_adapted()
    if late:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(adapters(model), lr=0.05))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(adapters(model), lr=0.05))
    # Before the first forward torch knows less of its units.
    early = accelerator.explain().sections
    assert any(title.startswith("messages") for title in early), list(early)
    for tokens in batches:
        with accelerator.accumulate(model):
            accelerator.backward(token_loss(model, tokens.chunk(world)[rank]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert set(optimizer.optimizer.state) == set(adapters(model)) and len(adapters(model)) == 4
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    state = accelerator.get_state_dict(model)
    for name, value in state.items():
        assert (value - plain.state_dict()[name]).abs().max() < 1e-8, name
        moved = not torch.equal(value, before[name])
        assert moved == (".up." in name or ".down." in name), name
    report = accelerator.explain()
    title = next(title for title in report.sections if title.startswith("messages"))
    scattered = report.find(title, "reduce-scatter of gradients")
    # The smaller matrix of each pair has three rows: four, where two ranks have equal parts.
    sizes = [(p.shape[0] + world - 1) // world * world * p.shape[1] for p in adapters(model)]
    assert scattered == f"2 messages, {sum(sizes) * 8} B", scattered
    assert report.find(title, "all-gather of parameters").startswith("about"), (
        "a unit trains nothing"
    )
    accelerator.free_memory()


class Overflowing(nn.Module):
    """The gradient of `scale` is its input: one large element overflows in the shard of the rank that holds it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.extra(torch.tanh(self.inner(x.clamp(-3, 3)))) + (self.scale * x).mean(
            -1, keepdim=True
        )


def number_batches(ranks):
    generator = torch.Generator().manual_seed(2)
    for step in range(8):
        x, y = torch.randn(2, BATCH * ranks, WIDTH, generator=generator)
        if step == 3:
            x[0, 0] = 1e5  # no number of fp16
        yield x, y[:, :1]


@on_ranks(2)
def test_overflow():
    """An overflow that one rank alone sees leaves the step out on all; parameters and scale are theirs alike."""
    PartialState(cpu=True)
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    plain = Overflowing()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, (x, y) in enumerate(number_batches(world)):
        (plain(x) * y).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        if step != 3:
            optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    scaler = GradScalerKwargs(init_scale=2.0**10, growth_interval=1000)
    plugin = Plugin(fsdp_version=2, ignored_modules="extra")
    accelerator = fresh(plugin, mixed_precision="fp16", kwargs_handlers=[scaler])
    model = Overflowing()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for x, y in number_batches(world):
        accelerator.backward((model(x.chunk(world)[rank]) * y.chunk(world)[rank]).mean())
        if len(skipped) == 3:
            mine = model.scale.grad.to_local()
            assert torch.isfinite(mine).all() == (rank > 0), (
                f"rank {rank} has {mine}: the case tests nothing"
            )
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
    assert skipped == [step == 3 for step in range(8)], f"rank {rank} left out {skipped}"
    assert accelerator.scaler.get_scale() == 2.0**9
    state = accelerator.get_state_dict(model)
    for name, value in state.items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=3e-3, msg=name)
    accelerator.free_memory()


@on_ranks(2)
def test_one_plugin_for_two_runs():
    """What one run fills in is not the next one's."""
    PartialState(cpu=True)
    plugin = Plugin(fsdp_version=2)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", None)):
        accelerator = fresh(plugin, mixed_precision=precision)
        policy = accelerator.state.fsdp_plugin.mixed_precision_policy
        assert getattr(policy, "param_dtype", None) is dtype, (precision, policy)
        assert accelerator.state.fsdp_plugin is accelerator.strategy.plugin
        # One more of the same run is laid out alike.
        another = Accelerator(cpu=True).strategy
        assert another.name == "FSDP2" and another.plugin.mixed_precision_policy is policy
    assert plugin.mixed_precision_policy is None


@on_ranks(2)
def test_outputs_stay_in_the_dtype_of_the_computation():
    low = torch.bfloat16
    wide = MixedPrecisionPolicy(low, low, output_dtype=torch.float32)
    cases = (
        ("bf16", None, low),
        ("bf16", wide, torch.float32),
        # Scaled losses are too large for fp16.
        ("fp16", None, torch.float32),
    )
    for precision, policy, expected in cases:
        accelerator = fresh(
            Plugin(fsdp_version=2, mixed_precision_policy=policy), mixed_precision=precision
        )
        model = accelerator.prepare(nn.Linear(WIDTH, 2))
        output = model(torch.ones(1, WIDTH))
        assert output.dtype is expected and output.grad_fn is not None
        accelerator.backward(output.sum())
        assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize(
    "plugin", [None, {"fsdp_version": 1, "use_orig_params": True}, {"fsdp_version": 2}]
)
def test_gradients_of_no_sync_that_are_thrown_away(plugin):
    """A critic's gradients of the other model's loss are not reduced, and `zero_grad` clears them."""
    samples = torch.randn(4, 2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).double()

    def made():
        torch.manual_seed(0)
        models = [nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 1).double()]
        return [*models, *(torch.optim.SGD(model.parameters(), lr=0.1) for model in models)]

    def train(actor, critic, actor_step, critic_step, backward, no_sync, part):
        for x in samples:
            backward(critic(part(x)).square().mean() + critic(actor(part(x)).detach()).mean())
            critic_step.step()
            critic_step.zero_grad()
            with no_sync(critic):
                backward(critic(actor(part(x))).square().mean())
            actor_step.step()
            actor_step.zero_grad()
            critic_step.zero_grad()

    plain = made()
    train(*plain, torch.Tensor.backward, contextlib.nullcontext, lambda x: x)
    accelerator = fresh(None if plugin is None else Plugin(**plugin))
    prepared = accelerator.prepare(*made())
    rank = dist.get_rank()
    train(*prepared, accelerator.backward, accelerator.no_sync, lambda x: x.chunk(2)[rank])
    for model, expected in zip(prepared[:2], plain[:2], strict=True):
        state = accelerator.get_state_dict(model)
        if rank == 0:
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)


@on_ranks(2)
@pytest.mark.parametrize(
    "plugin", [None, {"fsdp_version": 1, "use_orig_params": True}, {"fsdp_version": 2}]
)
def test_nested_no_sync(plugin):
    """After the inner block the outer one still holds back messages; the gradients are those of the plain loop."""
    accelerator = fresh(None if plugin is None else Plugin(**plugin))
    batches = torch.randn(3, 2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, 2)
    for x in batches:
        plain(x).square().mean().backward()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def backward(x):
        loss = model(x.chunk(2)[dist.get_rank()]).square().mean()
        with Messages() as messages:
            accelerator.backward(loss)
        return any("reduce" in name for name in messages.counts)

    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            inner = backward(batches[0])
        outer = backward(batches[1])
    last = backward(batches[2])
    optimizer.step()
    assert not inner and not outer, "gradients were reduced inside of no_sync"
    assert last or plugin is None, "DDP reduces outside of Python's dispatch; the others do not"
    state = accelerator.get_state_dict(model)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        for (name, found), start in zip(
            state.items(), nn.Linear(WIDTH, 2).parameters(), strict=True
        ):
            torch.testing.assert_close(
                start - found, dict(plain.named_parameters())[name].grad, rtol=1e-5, atol=1e-6
            )


class Mixed(nn.Module):
    """A unit with a complex weight and a norm in fp32 beside parameters in fp64."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float32)
        self.spectrum = Spectrum()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.spectrum(self.norm(self.first(x).float()).double()))


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


@on_ranks(2)
def test_parameters_of_several_dtypes_in_a_unit():
    PartialState(cpu=True)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = Mixed()
    model = copy.deepcopy(plain)
    accelerator = fresh(Plugin(fsdp_version=2, auto_wrap_policy="NO_WRAP"))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(4):
        x = torch.randn(BATCH, WIDTH)
        for run, inputs, step in (
            (plain, x, reference),
            (model, x.chunk(2)[dist.get_rank()], optimizer),
        ):
            loss = run(inputs).pow(2).mean()
            loss.backward() if run is plain else accelerator.backward(loss)
            step.step()
            step.zero_grad()
    state = plain.state_dict()
    for name, parameter in model.named_parameters():
        tolerance = 1e-5 if parameter.dtype == torch.float32 else 1e-6
        assert parameter.dtype == state[name].dtype
        assert (parameter.full_tensor() - state[name]).abs().max() < tolerance, name

    nested = Mixed()
    nested.norm = nn.Sequential(nn.LayerNorm(WIDTH))
    nested.norm.scale = nn.Parameter(torch.ones(1, dtype=torch.float32))
    nested = fresh(Plugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")).prepare(nested)
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        nested(torch.randn(BATCH, WIDTH))


@on_ranks(2)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "version, policy", [(1, "NO_WRAP"), (1, "SIZE_BASED_WRAP"), (2, "SIZE_BASED_WRAP")]
)
def test_a_module_in_two_models_is_refused(version, policy, at_once):
    PartialState(cpu=True)
    accelerator = fresh(
        Plugin(
            fsdp_version=version, auto_wrap_policy=policy, min_num_params=1, use_orig_params=True
        )
    )
    one, two = Adapted(), Adapted()
    two.base = one.base
    models = [one, two] if at_once else [two]
    if not at_once:
        accelerator.prepare(one)
    with pytest.raises(PrepareError, match=r"base\..*weight is .* of another model"):
        accelerator.prepare(*models)


class Historic(torch.optim.SGD):
    """An optimizer whose state is no tensor."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                history = self.state[parameter].setdefault("history", [])
                history.append(len(history) + 0.5)
        return loss


@on_ranks(2)
def test_a_state_that_has_no_shards_is_named_with_what_saves_it(tmp_path):
    PartialState(cpu=True)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        accelerator = fresh(
            Plugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", state_dict_type=kind)
        )
        model = Adapted()
        model, optimizer = accelerator.prepare(model, Historic(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, WIDTH)).sum())
        optimizer.step()
        if kind == "SHARDED_STATE_DICT":
            with pytest.raises(
                CheckpointError, match=r"'history' of Historic is a list.*FULL_STATE_DICT"
            ):
                accelerator.save_state(tmp_path / kind)
            continue
        accelerator.save_state(tmp_path / kind)
        histories = [state["history"] for state in optimizer.optimizer.state.values()]
        wanted = copy.deepcopy(histories)
        optimizer.step()
        accelerator.load_state(tmp_path / kind)
        assert isinstance(next(model.parameters()), DTensor)
        assert [state["history"] for state in optimizer.optimizer.state.values()] == wanted


@on_ranks(2)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(
    "options", [{"fsdp_version": 1, "use_orig_params": False}, {"fsdp_version": 2}], ids=str
)
def test_a_layer_of_two_models(options, calls):
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(auto_wrap_policy="NO_WRAP", **options))
    body = nn.Linear(4, 4)
    first, second = nn.Sequential(body, nn.Linear(4, 2)), nn.Sequential(body, nn.ReLU())
    with pytest.raises(PrepareError, match=r"0(\.weight)? is .* of another model"):
        if calls == 1:
            accelerator.prepare(first, second)
        else:
            accelerator.prepare(first)
            accelerator.prepare(second)


@on_ranks(2)
def test_a_checkpoint_has_the_buffers_of_rank_0(tmp_path):
    """Ranks have other statistics, and torch's writer takes those of any rank."""
    run = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2))
    model = run.prepare(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)))
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(run.process_index)))
    saved = {name: value.clone() for name, value in run.get_state_dict(model).items()}
    run.save_state(str(tmp_path))
    run.load_state(str(tmp_path))
    loaded = dict(run.get_state_dict(model))
    if run.is_main_process:
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


@on_ranks(2)
def test_a_replaced_is_fsdp2_is_reported():
    with (
        patch.object(AcceleratorState, "is_fsdp2", True),
        patch("accelerate.run.resolve.get_logger") as get_logger,
    ):
        Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2))
        get_logger().warning.assert_not_called()
        reset_states()
        Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=1))
        assert "fsdp_version=1" in str(get_logger().warning.call_args)


class Writing(nn.Module):
    """`write` changes a parameter in the forward."""

    def __init__(self, write):
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self)
        return self.block(x)


def clamp(model):
    model.block.weight.data.clamp_(-0.01, 0.01)


def assign(model):
    model.block.weight.data = 0.9 * model.block.weight.data


def nothing(model):
    model.block.weight.data.clamp_(-10, 10)


@on_ranks(2)
@pytest.mark.parametrize("write", [clamp, assign, nothing])
def test_a_forward_that_writes_parameters(write):
    accelerator = fresh(Plugin(fsdp_version=2))
    model = accelerator.prepare(Writing(write))
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        model(x)
    if write is nothing:
        model(x)
        return
    with pytest.raises(ValueError, match=r"Writing.*block\.weight.*ignored_modules"):
        model(x)
    accelerator = fresh(Plugin(fsdp_version=2, ignored_modules="block"))
    model = accelerator.prepare(Writing(write))
    before = model.block.weight.detach().clone()
    model(x)
    assert not torch.equal(model.block.weight, before)

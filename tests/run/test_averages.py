# SPDX-License-Identifier: Apache-2.0
"""Averages of the weights of a prepared model (EMA, SWA), against the plain loop in float64."""

import pytest
import torch
from cases import cases
from layouts import compare_state, sharded, sized
from rank_pool import on_ranks
from safetensors.torch import load_file
from states import reset_states
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accelerate import Accelerator
from accelerate.config.precision import GradScalerKwargs, MasterWeightsKwargs
from accelerate.core.errors import ConfigurationError, PrepareError

pytestmark = pytest.mark.usefixtures("float64")
PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


class Net(nn.Module):
    """Tied weights, a buffer that changes in training, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3)
        )
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.seen.add_(0.5)
        for block in self.blocks:
            x = x + block(x)
        return self.again(torch.tanh(self.head(x))) + self.seen


LAYOUTS = {
    "ddp": dict,
    "fsdp2": lambda: sharded(2),
    "fsdp2, kept": lambda: sharded(2, reshard_after_forward=False),
    "fsdp2, checkpointed": lambda: sharded(2, activation_checkpointing=True),
    "fsdp2, ignored": lambda: sharded(2, ignored_modules="blocks.0"),
    "fsdp2, shards": lambda: sharded(2, state_dict_type="SHARDED_STATE_DICT"),
    "fsdp1": lambda: sharded(1, use_orig_params=True),
    "fsdp1, flat": lambda: sharded(1, use_orig_params=False, sharding_strategy="SHARD_GRAD_OP"),
    "tp": lambda: sized(PLAN, tp_size=2),
    "pp": lambda: sized(pp_size=2),
    "hsdp": lambda: sharded(2) | sized(dp_replicate_size=2, dp_shard_size=2),
    "fsdp2 and tp": lambda: sharded(2) | sized(PLAN, tp_size=2, dp_shard_size=2),
    "fsdp2 and pp": lambda: sharded(2) | sized(pp_size=2, dp_shard_size=2),
}
ACCUMULATION = 2


class Blocks(nn.Module):
    """What a pipeline can cut."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make(name="ddp", seed=0):
    torch.manual_seed(seed)
    model = Blocks() if "pp" in name else Net()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def accelerator(name, **options):
    reset_states()
    return Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATION, **LAYOUTS[name](), **options
    )


def batches(shards, windows=4):
    """By window and micro-batch, the rows of each data shard."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            [torch.randn(4, 4, generator=generator) for _ in range(shards)]
            for _ in range(ACCUMULATION)
        ]
        for _ in range(windows)
    ]


def train(run, model, optimizer, window, index):
    for parts in window:
        with run.accumulate(model):
            run.backward(model.train()(parts[index]).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def plain_train(model, optimizer, window):
    model.train()
    for parts in window:
        before = model.seen.clone() if hasattr(model, "seen") else None
        for number, x in enumerate(parts):
            if number and before is not None:
                model.seen.copy_(before)
            (model(x).square().mean() / len(parts) / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()


def check(name):
    run = accelerator(name)
    model, optimizer = run.prepare(*make(name))
    index, shards = run.strategy.data_shard
    expected, plain = make(name)
    averages = [run.track_average(model, decay=0.9), run.track_average(model, decay=None)]
    wanted = [
        AveragedModel(expected, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        AveragedModel(expected),
    ]
    for number, window in enumerate(batches(shards), 1):
        train(run, model, optimizer, window, index)
        plain_train(expected, plain, window)
        for mine, theirs in zip(averages, wanted, strict=True):
            theirs.update_parameters(expected)
            for buffer, present in zip(theirs.module.buffers(), expected.buffers(), strict=True):
                buffer.copy_(present)
            assert mine.updates == number
            with torch.no_grad(), mine.applied():
                torch.testing.assert_close(
                    model.eval()(window[0][0]), theirs.eval()(window[0][0]), rtol=0, atol=1e-8
                )
                compare_state(run, model, theirs.module.state_dict())
    compare_state(run, model, expected.state_dict())


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    cases(
        [
            "ddp",
            "fsdp2",
            "fsdp2, kept",
            "fsdp2, checkpointed",
            "fsdp2, ignored",
            "fsdp1",
            "fsdp1, flat",
            "tp",
            "pp",
        ],
        thorough=["fsdp2, kept", "fsdp2, checkpointed", "fsdp2, ignored"],
    ),
)
def test_averages_equal_the_plain_loop(name):
    check(name)


def test_one_process():
    check("ddp")


@pytest.mark.thorough
@on_ranks(4)
@pytest.mark.parametrize("name", ["hsdp", "fsdp2 and tp", "fsdp2 and pp", "fsdp1"])
def test_averages_on_four_ranks(name):
    check(name)


@on_ranks(2)
@pytest.mark.parametrize(
    ("names", "layout"),
    cases(
        [
            *(((name, name), "native") for name in ("ddp", "fsdp2", "fsdp1", "pp")),
            (("fsdp2, shards", "ddp"), "native"),
            (("fsdp1, flat", "tp"), "native"),
            (("ddp", "fsdp2"), "native"),
            (("fsdp2", "fsdp2"), "compat"),
        ],
        thorough=[(("ddp", "fsdp2"), "native")],
    ),
)
def test_a_resumed_average_goes_on_bit_equal(names, layout, tmp_path):
    def start(name, seed=0):
        run = accelerator(name)
        model, optimizer = run.prepare(*make(name, seed))
        return run, model, optimizer, run.track_average(model, decay=0.9)

    run, model, optimizer, average = start(names[0])
    first, second = batches(2, windows=2)
    train(run, model, optimizer, first, run.process_index if run.strategy.data_shard[1] == 2 else 0)
    run.save_state(str(tmp_path / "saved"), layout=layout)
    saved = average.state_dict()
    resumed, model, optimizer, found = start(names[1], seed=7)
    resumed.load_state(str(tmp_path / "saved"))
    state = found.state_dict()
    if resumed.is_main_process:
        assert state["updates"] == 1
        torch.testing.assert_close(state["averages"], saved["averages"], rtol=0, atol=0)
    if names[0] == names[1]:
        index = resumed.process_index if resumed.strategy.data_shard[1] == 2 else 0
        train(resumed, model, optimizer, second, index)
        state = found.state_dict()
        run, model, optimizer, average = start(names[0])
        for window in (first, second):
            train(run, model, optimizer, window, index)
        whole = average.state_dict()
        if run.is_main_process:
            torch.testing.assert_close(state["averages"], whole["averages"], rtol=0, atol=0)


@on_ranks(2)
def test_bf16_weights_with_masters(tmp_path):
    """The average is that of the fp32 master weights, in evaluation rounded as these are."""
    torch.set_default_dtype(torch.float32)
    run = accelerator("fsdp2", mixed_precision="bf16", kwargs_handlers=[MasterWeightsKwargs()])
    model, optimizer = run.prepare(*make())
    average = run.track_average(model, decay=0.9)
    expected = None
    for window in batches(2):
        train(run, model, optimizer, window, run.process_index)
        weights = run.get_state_dict(model)
        if run.is_main_process:
            expected = {
                name: value.clone()
                if expected is None
                else torch.lerp(expected[name], value, 1 - 0.9)
                for name, value in weights.items()
            }
    with average.applied():
        state = run.get_state_dict(model)
        run.save_model(model, str(tmp_path))
    after = run.get_state_dict(model)
    if run.is_main_process:
        torch.testing.assert_close(
            {**state, "seen": 0}, {**expected, "seen": 0}, rtol=1e-6, atol=1e-7
        )
        torch.testing.assert_close(
            load_file(tmp_path / "model.safetensors")["head.weight"], state["head.weight"]
        )
        torch.testing.assert_close(dict(after), dict(weights), rtol=0, atol=0)


@pytest.mark.parametrize("skips", ["scaler", "guard"])
def test_skipped_steps_and_two_optimizers(skips):
    scaled = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]}
    run = Accelerator(cpu=True, **(scaled if skips == "scaler" else {"non_finite": "skip"}))
    model = nn.Linear(4, 4, dtype=torch.float32)
    model, *optimizers = run.prepare(
        model, torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    )
    average = run.track_average(model)
    for factor, updates in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        run.backward(model(torch.ones(2, 4, dtype=torch.float32)).sum() * factor)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert average.updates == updates


def test_what_is_refused(tmp_path):
    run = accelerator("ddp")
    model, optimizer = run.prepare(*make())
    with pytest.raises(PrepareError, match=r"model \(Net\) was not prepared"):
        run.track_average(make()[0])
    with pytest.raises(ConfigurationError, match=r"decay=1\.5"):
        run.track_average(model, decay=1.5)
    with pytest.raises(PrepareError, match="bfloat16"):
        run.track_average(run.prepare(nn.Linear(2, 2, dtype=torch.bfloat16)))
    run = accelerator("ddp")
    model, optimizer = run.prepare(*make())
    run.save_state(str(tmp_path / "without"))
    average = run.track_average(model)
    run.load_state(str(tmp_path / "without"))  # the average begins with the next step
    before = [p.data.add_(1).clone() for p in model.parameters()]  # not those of the checkpoint
    with average.applied():
        with pytest.raises(PrepareError, match="save_state"):
            run.save_state(str(tmp_path / "state"))
        with pytest.raises(PrepareError, match="load_state"):
            run.load_state(str(tmp_path / "without"))
        with pytest.raises(PrepareError, match="applied"), average.applied():
            pass
        run.backward(model(torch.ones(2, 4)).sum())
        with pytest.raises(PrepareError, match=r"optimizer\.step"):
            optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def mean_teacher(prepare, backward, rows):
    """A frozen teacher that is prepared as well, and follows the student after each step."""
    student, teacher = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)
    )
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student, teacher, optimizer = prepare(student, teacher.requires_grad_(False), optimizer)
    for number, x in enumerate(rows):
        with torch.set_grad_enabled(number % 2 == 0):
            target = teacher(x)
        output = student(x)
        backward((output - target).square().mean() + output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, present in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(present.detach(), 0.5)
    return student, teacher


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp2"])
def test_a_prepared_teacher_follows_its_student(name):
    data = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    expected = mean_teacher(lambda *objects: objects, torch.Tensor.backward, data)
    run = Accelerator(cpu=True, **LAYOUTS[name]())
    torch.manual_seed(0)
    found = mean_teacher(run.prepare, run.backward, [x.chunk(2)[run.process_index] for x in data])
    for model, plain in zip(found, expected, strict=True):
        compare_state(run, model, plain.state_dict(), 1e-10)

# SPDX-License-Identifier: Apache-2.0
"""What a recorded run has written, in each layout, against plain PyTorch in float64 on one process."""

import json
import os
import weakref

import pytest
import torch
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ParallelismConfig
from accelerate.certify import joining, recording
from accelerate.certify.comparison import Comparison
from accelerate.certify.settings import VARIABLE, Settings
from accelerate.core.errors import ConfigurationError
from accelerate.parallel.gradients import local
from accelerate.utils import FullyShardedDataParallelPlugin

SAMPLES, WIDTH = 16, 8
LAYOUTS = {
    2: ["ddp", "fsdp", "tp", "pp"],
    4: ["hsdp", "fsdp-tp"],
}
SIZES = {
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "tp": {"tp_size": 2},
    "fsdp-tp": {"dp_shard_size": 2, "tp_size": 2},
    "pp": {"pp_size": 2},
    "cp": {"cp_size": 2},
    "sp": {"sp_size": 2},
}
TOLERANCE = 1e-10


def fresh(layout, folder, monkeypatch, plugin=None, **options):
    """An accelerator whose run is recorded in a folder, without an exit."""
    reset_states()
    folder.mkdir(exist_ok=True)
    settings = {"steps": 3, "exits": False, **options.pop("settings", {})}
    path = folder / f"settings-{os.getpid()}"
    Settings(str(folder), **settings).write(path)
    monkeypatch.setenv(VARIABLE, str(path))
    if layout in SIZES:
        options["parallelism_config"] = ParallelismConfig(**SIZES[layout])
    if plugin is not None:
        options["fsdp_plugin"] = plugin
    elif "fsdp" in layout or layout in ("hsdp", "cp", "sp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False
        )
    return Accelerator(cpu=True, **options)


def recorded(folder, accelerator):
    """The recorded steps on rank 0; nothing on other ranks."""
    if not accelerator.is_main_process:
        return []
    paths = sorted(folder.glob("step_*.pt"))
    return [torch.load(path) for path in paths]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(4)]).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def expect(step, expected, kind):
    """A kind of tensors of a step is exactly what is expected."""
    names = {
        name.partition("/")[2]: value for name, value in step.items() if name.startswith(f"{kind}/")
    }
    assert names.keys() == expected.keys()
    for name, value in expected.items():
        value = torch.as_tensor(value, dtype=torch.float64)
        assert names[name].shape == value.shape, name
        distance = float((names[name].double() - value).abs().max())
        assert distance <= TOLERANCE, f"{kind} {name} is off by {distance}"


@on_ranks(2, 4)
def test_a_step_is_recorded_in_each_layout(nproc, tmp_path, monkeypatch):
    """Batches, outputs, the loss, gradients after clipping, parameters and Adam's state, with accumulation."""
    for layout in LAYOUTS[nproc]:
        accelerator = fresh(layout, tmp_path / layout, monkeypatch, gradient_accumulation_steps=2)
        model, reference = mlp(), mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        inputs, targets = data()
        shards = {"ddp": nproc, "fsdp": nproc, "hsdp": 4, "fsdp-tp": 2}.get(layout, 1)
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=4 // shards)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        steps = recorded(tmp_path / layout, accelerator)
        if not accelerator.is_main_process:
            continue
        assert len(steps) == 2
        names = {parameter: name for name, parameter in reference.named_parameters()}
        for number, step in enumerate(steps):
            losses = {}
            for i in range(2):
                rows = slice(8 * number + 4 * i, 8 * number + 4 * i + 4)
                loss = nn.functional.mse_loss(reference(inputs[rows]), targets[rows])
                (loss / 2).backward()
                losses[str(i)] = loss.detach()
                assert torch.equal(step[f"batch/{i}.0"], inputs[rows])
            expect(step, losses, "loss")
            if number == 0:
                x = inputs[:4]
                for i, layer in enumerate(mlp()):
                    x = layer(x)
                    output = step.get(f"output/{i}")
                    # Modules that tp has split return a part, and stages of a pipeline are not watched.
                    if output is not None and output.shape == x.shape:
                        torch.testing.assert_close(output, x.detach(), rtol=0, atol=TOLERANCE)
                    else:
                        assert "tp" in layout or layout == "pp"
                torch.testing.assert_close(
                    step["output/Sequential"], x.detach(), rtol=0, atol=TOLERANCE
                )
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            gradients = {name: parameter.grad.clone() for parameter, name in names.items()}
            expect(step, gradients, "gradient")
            plain.step()
            plain.zero_grad()
            expect(step, dict(reference.state_dict()), "parameter")
            state = {
                f"{names[parameter]} {key}": value
                for parameter, entry in plain.state.items()
                for key, value in entry.items()
            }
            expect(step, state, "state")
            options = step["options/group 0 lr"], step["options/group 0 betas.1"]
            assert tuple(map(float, options)) == (1e-2, 0.999)


@on_ranks(2, 4)
def test_no_rank_keeps_a_full_tensor_of_a_large_model(nproc, tmp_path, monkeypatch):
    """Fixed positions of each tensor, and its norm, of one full tensor at a time."""
    elements = 32
    full_tensors = []
    full_tensor = DTensor.full_tensor

    def gather(tensor, **options):
        full = full_tensor(tensor, **options)
        if full.numel() > elements:
            others = [other() for other in full_tensors]
            # At most the one before is not yet replaced.
            assert sum(other is not None for other in others) <= 1
            full_tensors.append(weakref.ref(full))
        return full

    monkeypatch.setattr(recording, "LARGE", 1024)
    monkeypatch.setattr(joining, "ELEMENTS", elements)
    for layout in LAYOUTS[nproc]:
        accelerator = fresh(layout, tmp_path / layout, monkeypatch)
        model, reference = mlp(), mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        inputs, targets = data()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        with monkeypatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", gather)
            optimizer.step()
        nn.functional.mse_loss(reference(inputs), targets).backward()
        plain.step()
        assert not any(reference() is not None for reference in full_tensors)
        if "fsdp" in layout:
            assert full_tensors
        for step in recorded(tmp_path / layout, accelerator):
            for kind in ("gradient", "parameter", "state"):
                expected = {}
                for name, parameter in reference.named_parameters():
                    tensors = {
                        "gradient": {name: parameter.grad},
                        "parameter": {name: parameter},
                        "state": {f"{name} {key}": v for key, v in plain.state[parameter].items()},
                    }
                    for key, tensor in tensors[kind].items():
                        expected.update(joining.elements_of(key, tensor.detach()))
                        assert expected[key].numel() <= elements
                        if tensor.numel() > elements:
                            assert float(expected[f"{key} norm"]) == float(tensor.norm())
                expect(step, expected, kind)


@on_ranks(2)
def test_optimizers_and_their_parameters_have_names(tmp_path, monkeypatch):
    """Two models, one of them tied and with frozen parameters; optimizers in an optimizer, with lists in its state."""
    for layout in ("ddp", "fsdp"):
        accelerator = fresh(layout, tmp_path / layout, monkeypatch)
        first, second = mlp(), mlp(1)
        first[3].up_proj.weight = first[2].up_proj.weight
        second[0].requires_grad_(False)
        sgd = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
        wrapper = Wrapper(torch.optim.Adam(second[1:].parameters(), lr=0.1))
        first, second, sgd, wrapper = accelerator.prepare(first, second, sgd, wrapper)
        inputs, targets = data()
        rows = slice(accelerator.process_index, None, 2)
        accelerator.backward(nn.functional.mse_loss(second(first(inputs[rows])), targets[rows]))
        sgd.step()
        wrapper.step()
        steps = recorded(tmp_path / layout, accelerator)
        if not steps:
            continue
        names = {name for step in steps for name in step}
        other = "model 1 (Sequential) "
        assert "gradient/3.up_proj.weight" in names
        assert torch.equal(
            steps[0]["gradient/2.up_proj.weight"], steps[0]["gradient/3.up_proj.weight"]
        )
        assert f"parameter/{other}0.up_proj.weight" in names
        assert f"gradient/{other}0.up_proj.weight" not in names
        assert "state/2.up_proj.bias momentum_buffer" in names
        state = f"state/optimizer 1 base {other}1.down_proj.bias"
        assert float(steps[1][f"{state} step"]) == 1
        history = f"state/optimizer 1 {other}1.down_proj.bias history.1"
        assert float(steps[1][history]) == 2
        assert not any(name.startswith("gradient/model 1") for name in steps[0])
        assert float(steps[0]["options/group 0 momentum"]) == 0.9
        assert "options/optimizer 1 group 0 betas.0" in steps[1]


class Wrapper(torch.optim.Optimizer):
    supports_sharded_parameters = True

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups
        self.base = base

    def step(self, closure=None):
        self.base.step()
        for parameter in self.base.state:
            self.state[parameter]["history"] = [1.0, 2.0]


@on_ranks(2)
def test_a_run_ends_after_the_last_step_of_each_optimizer(tmp_path, monkeypatch):
    """Blocks that the end leaves communicate, and accelerators that follow each other write one record."""

    def steps_of(accelerator, count):
        models = [mlp(), mlp(1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        *models, first, second = accelerator.prepare(*models, *optimizers)
        inputs, _ = data()
        for _ in range(count):
            accelerator.backward(sum(model(inputs).square().mean() for model in models))
            first.step()
            second.step()

    folder = tmp_path / "run"
    total = 0
    with pytest.raises(SystemExit) as ended:
        accelerator = fresh("ddp", folder, monkeypatch, settings={"steps": 3, "exits": True})
        steps_of(accelerator, 1)
        accelerator.free_memory()
        accelerator = fresh("ddp", folder, monkeypatch, settings={"steps": 3, "exits": True})
        try:
            steps_of(accelerator, 100)
        finally:
            total = accelerator.reduce(torch.ones(()))
    assert ended.value.code == 0
    assert int(total) == 2
    assert len(recorded(folder, accelerator)) in (0, 2 + 6)
    if accelerator.is_main_process:
        assert json.loads((folder / "run.json").read_text())["processes"] == 2
    steps_of(accelerator, 1)
    accelerator.end_training()
    accelerator = fresh("ddp", tmp_path / "uneven", monkeypatch, settings={"steps": 3})
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="even_batches"):
        with accelerator.join_uneven_inputs([model]):
            accelerator.backward(model(data()[0]).mean())
            optimizer.step()


@on_ranks(2, 4)
def test_replicas_that_differ_have_a_rank_and_a_dimension(nproc, tmp_path, monkeypatch):
    cases = {"ddp": "ddp", "tp": "tp"} if nproc == 2 else {"hsdp": "ddp", "fsdp-tp": "tp"}
    for layout, dimension in cases.items():
        accelerator = fresh(layout, tmp_path / layout, monkeypatch, settings={"steps": 2})
        model = nn.Sequential(*mlp(), nn.LayerNorm(WIDTH).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        inputs, _ = data()
        for number in range(2):
            accelerator.backward(model(inputs).square().sum())
            if number and accelerator.process_index == nproc - 1:
                gradients = [parameter.grad for parameter in model.parameters()]
                local(gradients[-1]).mul_(2)
            optimizer.step()
        if accelerator.is_main_process:
            info = json.loads((tmp_path / layout / "run.json").read_text())
            replicas = info["replicas"]
            assert (replicas["step"], replicas["kind"]) == (2, "gradient")
            assert replicas["name"].endswith("4.bias")
            assert (replicas["rank"], replicas["dimension"]) == (nproc - 1, dimension)


@on_ranks(2)
def test_flattened_parameters_and_their_state_have_names(tmp_path, monkeypatch):
    """FSDP1 keeps gradients to itself: they are not compared."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, use_orig_params=False, cpu_ram_efficient_loading=False
    )
    accelerator = fresh("fsdp1", tmp_path / "run", monkeypatch, plugin=plugin)
    model, reference = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = data()
    rows = slice(accelerator.process_index, None, 2)
    accelerator.backward(nn.functional.mse_loss(model(inputs[rows]), targets[rows]))
    optimizer.step()
    nn.functional.mse_loss(reference(inputs), targets).backward()
    plain.step()
    for step in recorded(tmp_path / "run", accelerator):
        parameters = dict(reference.named_parameters())
        state = {}
        for name, parameter in parameters.items():
            state |= {f"{name} {key}": value for key, value in plain.state[parameter].items()}
        expect(step, parameters, "parameter")
        expect(step, state, "state")
        gradients = {f"gradient/{name}": p.grad for name, p in parameters.items()}
        assert not Comparison([{**step, **gradients}], [step]).differences


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


@on_ranks(2)
def test_split_sequences_are_joined(tmp_path, monkeypatch):
    accelerator = fresh("cp", tmp_path / "run", monkeypatch)
    model, reference = Attention().double(), Attention().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = data().unflatten(1, (2, -1))
    x, y = inputs.clone(), targets.clone()
    with accelerator.maybe_context_parallel(buffers=[x, y], buffer_seq_dims=[1, 1]):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    expected = reference(inputs)
    loss = nn.functional.mse_loss(expected, targets)
    loss.backward()
    for step in recorded(tmp_path / "run", accelerator):
        outputs = {"qkv": reference.qkv(inputs).detach(), "Attention": expected.detach()}
        expect(step, outputs, "output")
        expect(step, {"0": loss.detach()}, "loss")
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        expect(step, gradients, "gradient")

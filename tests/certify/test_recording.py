# SPDX-License-Identifier: Apache-2.0
"""What a recorded run has written, in each layout, against plain PyTorch in float64 on one process."""

import torch
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ParallelismConfig
from accelerate.certify.settings import VARIABLE, Settings
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


def fresh(layout, folder, monkeypatch, **options):
    """An accelerator whose run is recorded in a folder, without an exit."""
    reset_states()
    folder.mkdir(exist_ok=True)
    settings = {"steps": 3, "exits": False, **options.pop("settings", {})}
    path = (
        folder / f"settings-{torch.distributed.is_initialized() and torch.distributed.get_rank()}"
    )
    Settings(str(folder), **settings).write(path)
    monkeypatch.setenv(VARIABLE, str(path))
    if layout in SIZES:
        options["parallelism_config"] = ParallelismConfig(**SIZES[layout])
    if "fsdp" in layout or layout in ("hsdp", "cp", "sp"):
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

# SPDX-License-Identifier: Apache-2.0
"""Self-check of an installation: compares each feature of a distributed run with plain arithmetic."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.collectives import broadcast_object_list
from accelerate.core.objects import counted

SAMPLES = 22
Check = Callable[[Accelerator], str]


class Wrong(Exception):
    """A feature of the installation gives a wrong result."""


def expect(condition: bool, message: str) -> None:
    """Raise `Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(message)


def samples() -> TensorDataset:
    """Return the dataset of y = 3 x + 1."""
    inputs = torch.arange(SAMPLES, dtype=torch.float32).reshape(-1, 1) / SAMPLES
    return TensorDataset(inputs, 3 * inputs + 1)


def model_and_optimizer(lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a linear model with zero weights, and its optimizer."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def collectives(accelerator: Accelerator) -> str:
    """Check gather, reduce and padding."""
    rank, world = accelerator.process_index, accelerator.num_processes
    own = {
        "a": torch.full((2, 3), float(rank), device=accelerator.device),
        "b": [torch.tensor([rank], device=accelerator.device)],
    }
    found = accelerator.gather(own)
    ranks = torch.arange(world, device=accelerator.device)
    expect(torch.equal(found["b"][0], ranks), f"gather of the ranks is {found['b'][0].tolist()}")
    expect(
        torch.equal(found["a"][:, 0], ranks.repeat_interleave(2).float()),
        "gather of a matrix is wrong",
    )
    total = accelerator.reduce(torch.tensor(float(rank + 1), device=accelerator.device), "sum")
    expect(total.item() == world * (world + 1) / 2, f"the sum over ranks is {total.item()}")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    expect(len(padded) == world, f"padding to the longest gives {len(padded)}, not {world}")
    return f"gather, reduce, pad on {counted(world, 'process')}"


def sharding(accelerator: Accelerator) -> str:
    """Check that the processes see each sample once."""
    loader = accelerator.prepare(DataLoader(samples(), batch_size=4))
    seen = [accelerator.gather_for_metrics(batch[0]).flatten().cpu() for batch in loader]
    found = sorted(round(value * SAMPLES) for value in torch.cat(seen).tolist())
    expect(found == list(range(SAMPLES)), f"the samples seen are {found}")
    return f"{SAMPLES} samples, each seen once, in {len(seen)} global batches"


def accumulation(accelerator: Accelerator) -> str:
    """Check that an accumulation window gives the step of one large batch."""
    world = accelerator.num_processes
    data = [(torch.full((4, 1), 0.25 * (i + 1)), torch.full((4, 1), 1.0)) for i in range(2 * world)]
    net, optimizer = accelerator.prepare(*model_and_optimizer(0.5))
    own = data[accelerator.process_index :: world]
    for number, (inputs, targets) in enumerate(own):
        last = number == len(own) - 1
        with accelerator.no_sync(net) if not last else torch.enable_grad():
            loss = torch.nn.functional.mse_loss(
                net(inputs.to(accelerator.device)), targets.to(accelerator.device)
            )
            accelerator.backward(loss / len(own))
    optimizer.step()
    weight, bias = (parameter.item() for parameter in accelerator.unwrap_model(net).parameters())
    inputs = torch.cat([pair[0] for pair in data])
    # From zero weights the mean squared error's gradients are -2 mean(x y) and -2 mean(y).
    expect(
        abs(weight - inputs.mean().item()) < 2e-2,
        f"the weight is {weight}, not {inputs.mean().item()}",
    )
    expect(abs(bias - 1.0) < 2e-2, f"the bias is {bias}, not 1")
    return f"{len(own)} batches per step: weight {weight:.4f}"


def training(accelerator: Accelerator) -> str:
    """Check that training converges and that parameters stay equal."""
    net, optimizer = model_and_optimizer(0.5)
    net, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(samples(), batch_size=4, shuffle=True)
    )
    first = last = 0.0
    for epoch in range(30):
        for inputs, targets in loader:
            with accelerator.autocast():
                loss = torch.nn.functional.mse_loss(net(inputs).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        last = loss.item()
        first = first if epoch else last
    expect(
        last < 0.05 * max(first, 1e-3) or last < 1e-2,
        f"the loss went from {first:.4f} to {last:.4f}",
    )
    weights = torch.cat(
        [
            parameter.detach().flatten().float()
            for parameter in accelerator.unwrap_model(net).parameters()
        ]
    )
    everyone = accelerator.gather(weights.unsqueeze(0))
    expect(bool((everyone == everyone[0]).all()), "the ranks' parameters have drifted apart")
    return f"loss {first:.3f} to {last:.5f}, mixed precision {accelerator.mixed_precision}; equal on all ranks"


def checkpoint(accelerator: Accelerator) -> str:
    """Check that a checkpoint restores the parameters."""
    net, _ = accelerator.prepare(*model_and_optimizer(0.1))
    folder = _shared_folder(accelerator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.5)
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    found = [parameter.detach().cpu().float().item() for parameter in net.parameters()]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    expect(found == [1.5, 1.5], f"the restored parameters are {found}")
    return "saved, changed, restored"


def _shared_folder(accelerator: Accelerator) -> str:
    named = [tempfile.mkdtemp(prefix="accelerate-test-") if accelerator.is_main_process else None]
    folder = str(broadcast_object_list(named)[0])
    found = accelerator.gather(torch.tensor([os.path.isdir(folder)], device=accelerator.device))
    expect(
        bool(found.all()),
        f"{folder} is not on every machine: set TMPDIR to a folder that they all share",
    )
    return folder


# Name, what is checked, and the check.
CHECKS: tuple[tuple[str, str, Check], ...] = (
    (
        "collectives",
        "The processes exchange tensors, and each receives what the others sent.",
        collectives,
    ),
    (
        "data sharding",
        "A prepared loader gives each sample to one process, and none is lost.",
        sharding,
    ),
    ("accumulation", "Several small batches give the step of one large batch.", accumulation),
    (
        "training",
        "A model learns y = 3 x + 1, and all processes end with the same weights.",
        training,
    ),
    ("checkpoint", "A checkpoint restores the weights that were saved.", checkpoint),
)


def main() -> int:
    """Run the checks and print a table; the exit code."""
    accelerator = Accelerator()
    number = accelerator.num_processes
    where = f"{counted(number, 'process')} on {accelerator.device.type}"
    failed = 0
    for name, what, check in CHECKS:
        began = time.perf_counter()
        try:
            message, passed = check(accelerator), True
        except Wrong as error:
            message, passed = str(error), False
        everyone = accelerator.gather(torch.tensor([passed], device=accelerator.device))
        failed += not bool(everyone.all())
        if not passed:
            print(
                f"  rank {accelerator.process_index}: {name}: {message}",
                file=sys.stderr,
                flush=True,
            )
        mark = "ok    " if everyone.all() else "FAILED"
        accelerator.print(
            f"  {mark}  {name:<14} {1000 * (time.perf_counter() - began):7.0f} ms  {what}\n{'':36}{message}"
        )
        accelerator.free_memory()
    accelerator.print(
        f"This installation works with {where}: communication, training and checkpoints are "
        "correct."
        if not failed
        else f"{failed} of {len(CHECKS)} checks failed with {where}: see the lines marked FAILED."
    )
    accelerator.end_training()
    if failed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

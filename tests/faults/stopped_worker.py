# SPDX-License-Identifier: Apache-2.0
"""A run of warm-up, compilation, training, evaluation and saving, which continues wherever a signal has stopped it."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

SAMPLES, BATCH = 61, 2


class Read:
    """The samples that this process has trained on, and the optimizer steps of the run."""

    def __init__(self):
        self.indices = []
        self.steps = 0

    def state_dict(self):
        return {"indices": self.indices, "steps": self.steps}

    def load_state_dict(self, state):
        self.indices, self.steps = list(state["indices"]), state["steps"]


class Model(torch.nn.Module):
    """One parameter, which DDP always sums in the same order. It takes time for each new number of rows."""

    def __init__(self, seconds):
        super().__init__()
        self.linear = torch.nn.Linear(6, 1, bias=False)
        self.seconds = seconds
        self.compiled = set()

    def forward(self, x):
        key = (len(x), self.training)
        if key not in self.compiled:
            phase("compile")
            self.compiled.add(key)
            for _ in range(20):
                time.sleep(self.seconds / 20)
        return self.linear(torch.nn.functional.dropout(x, 0.1, self.training))


def phase(name):
    """Tell the test where rank 0 is."""
    if os.environ.get("RANK", "0") == "0":
        (FOLDER / "next_phase").write_text(name)
        (FOLDER / "next_phase").replace(FOLDER / "phase")


def evaluate(accelerator, model, loader, pace):
    phase("evaluation")
    model.eval()
    for x, y, _ in loader:
        with torch.no_grad():
            loss = (model(x) - y).square()
        accelerator.gather_for_metrics(loss)
        time.sleep(pace)
    model.train()


def evaluate_alone(model, data, pace):
    phase("evaluation on rank 0")
    model.eval()
    for index in range(5):
        with torch.no_grad():
            model(data[2 * index : 2 * index + 2])
        time.sleep(pace)
    model.train()


def main(folder, total, pace):
    set_seed(0)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(project_config=project)
    model = Model(15 * pace)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.9)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
    train = DataLoader(data, batch_size=BATCH, shuffle=True)
    test = DataLoader(data, batch_size=2 * BATCH)
    model, optimizer, scheduler, train, test = accelerator.prepare(
        model, optimizer, scheduler, train, test
    )
    read = Read()
    accelerator.register_for_checkpointing(read)
    accelerator.resume()
    phase("warm-up")
    (folder / f"rank{accelerator.process_index}.pid").write_text(str(os.getpid()))
    time.sleep(15 * pace)
    while read.steps < total:
        for inputs, targets, indices in train:
            phase("training")
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            read.indices += indices.tolist()
            read.steps += 1
            time.sleep(pace / 2)
            if read.steps % 7 == 0:
                phase("saving")
                accelerator.save_state(blocking=read.steps % 2 == 0)
            if read.steps % 9 == 0 and accelerator.is_main_process:
                evaluate_alone(accelerator.unwrap_model(model), x, pace)
            if read.steps % 5 == 0:
                evaluate(accelerator, model, test, pace)
            if read.steps >= total:
                break
        evaluate(accelerator, model, test, pace)
    phase("end")
    torch.save(read.indices, folder / f"read{accelerator.process_index}.pt")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "end.pt")
    accelerator.end_training()


sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import without_compiler  # noqa: E402, F401

FOLDER = Path(sys.argv[1])
main(FOLDER, int(sys.argv[2]), float(sys.argv[3]))

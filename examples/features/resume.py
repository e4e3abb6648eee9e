# SPDX-License-Identifier: Apache-2.0
"""Save checkpoints, stop, and resume: the table is that of a run that was never stopped.

    python examples/features/resume.py --output runs/resume --stop_after 70
    accelerate launch --num_processes 2 examples/features/resume.py --output runs/resume

The first command stops in the second epoch, after the checkpoint of step 60. The second continues from it, on another
number of processes. Ctrl-C, a kill or a crash in place of `--stop_after` make no difference.
"""

import argparse
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

EPOCHS, SAVE_EVERY = 4, 20


@dataclass
class History:
    """What the loop itself remembers. It is registered, so checkpoints contain it."""

    step: int = 0
    rows: list = field(default_factory=list)

    def state_dict(self) -> dict:
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        self.step, self.rows = state["step"], state["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output", default="runs/resume", help="folder of the run (default: %(default)s)"
    )
    parser.add_argument(
        "--stop_after", type=int, help="end after this many steps, as a killed run would"
    )
    args = parser.parse_args()
    accelerator = Accelerator(
        exact=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(
            args.output, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    data, test = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, test_loader = DataLoader(data, 32, shuffle=True), DataLoader(test, 128)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    history = History()
    accelerator.register_for_checkpointing(history)

    report = accelerator.resume()  # None if there is no checkpoint yet
    for epoch in range(report.epoch if report else 0, EPOCHS):
        for images, labels in loader:  # of the resumed epoch: the batches that are left
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            history.step += 1
            if history.step % SAVE_EVERY == 0:
                accelerator.save_state()
            if history.step == args.stop_after:
                accelerator.print(f"stopped after step {history.step}")
                return
        loss, accuracy = evaluate(accelerator, model, test_loader)
        history.rows.append([epoch, history.step, loss, accuracy, bar(loss, 1)])

    names = ("epoch", "step", "loss", "accuracy", "loss as a bar")
    print_table(accelerator, names, *history.rows)
    accelerator.end_training()


if __name__ == "__main__":
    main()

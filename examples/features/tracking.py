# SPDX-License-Identifier: Apache-2.0
"""Log values with a tracker, and read them back. The local tracker needs no service and no package.

    python examples/features/tracking.py --output runs/tracking
    accelerate launch --num_processes 2 examples/features/tracking.py --output runs/tracking

`log_with=["local", "tensorboard"]` logs to several trackers. Only the main process writes.
"""

import argparse

import torch
import torch.nn.functional as F
from common import bar, digits, evaluate, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.tracking import read_values
from accelerate.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output", default="runs/tracking", help="folder of the run (default: %(default)s)"
    )
    args = parser.parse_args()
    accelerator = Accelerator(
        exact=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        log_with="local",
        project_dir=args.output,
    )
    set_seed(0)
    data, test = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, test_loader = DataLoader(data, 32, shuffle=True), DataLoader(test, 128)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )

    accelerator.init_trackers("digits", config={"lr": 3e-3, "batch_size": 32})
    for epoch in range(4):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        loss, accuracy = evaluate(accelerator, model, test_loader)
        accelerator.log({"test": {"loss": loss, "accuracy": accuracy}}, step=epoch)
    accelerator.end_training()

    if accelerator.is_main_process:
        lines = [
            line["values"] | {"epoch": line["step"]}
            for line in read_values(f"{args.output}/digits")
        ]
        rows = [
            (x["epoch"], x["test/loss"], x["test/accuracy"], bar(x["test/loss"], 1)) for x in lines
        ]
        print_table(accelerator, ("epoch", "loss", "accuracy", "loss as a bar"), *rows)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Distributed inference: each process predicts its part of the inputs, and the results come back in order.

    python examples/features/inference.py
    accelerate launch --num_processes 2 examples/features/inference.py

For datasets that take hours, examples/big_model/inference.py writes results as they come, and continues after a kill.
"""

import torch
from common import bar, digits, network, print_table

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    images, _ = digits()[1].tensors
    model = network().to(accelerator.device).eval()
    with accelerator.split_between_processes(images) as own, torch.no_grad():
        results = [
            {"digit": int(scores.argmax()), "score": scores.max().item()}
            for batch in own.split(64)
            for scores in model(batch.to(accelerator.device)).softmax(-1)
        ]
    results = gather_object(results)

    rows = []
    for digit in range(10):
        scores = [result["score"] for result in results if result["digit"] == digit]
        mean = sum(scores) / len(scores) if scores else "-"
        rows.append((digit, len(scores), mean, bar(len(scores), len(results))))
    names = ("predicted digit", "images", "mean score", "images as a bar")
    print_table(accelerator, names, *rows)
    accelerator.print(
        f"{len(results)} predictions of {len(images)} images, by a network that has not been trained"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

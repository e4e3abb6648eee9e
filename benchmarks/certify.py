# SPDX-License-Identifier: Apache-2.0
"""What `accelerate certify` adds to a step that it records: a small transformer on one process, AdamW, clipping.

Runs of a few steps with and without the record alternate. A figure is the median of their durations, without the start
of the process, the model and the first step, which also records what modules return.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from pathlib import Path

import torch
from timing import alternate, emit
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

STEPS = 8
WIDTH, TOKENS, WORDS = 128, 64, 1000


def train(settings: Path | None) -> float:
    """The duration of `STEPS` steps after the first one, in seconds."""
    from accelerate import Accelerator

    if settings is None:
        os.environ.pop("ACCELERATE_CERTIFY_FILE", None)
    else:
        os.environ["ACCELERATE_CERTIFY_FILE"] = str(settings)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(WORDS, WIDTH),
        torch.nn.TransformerEncoder(layer, 4),
        torch.nn.Linear(WIDTH, WORDS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = torch.randint(WORDS, (16 * (STEPS + 1), TOKENS))
    loader = DataLoader(TensorDataset(words), 16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    begin = 0.0
    for number, (batch,) in enumerate(loader):
        if number == 1:
            begin = time.perf_counter()
        loss = cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begin


def main() -> None:
    if importlib.util.find_spec("accelerate.certify") is None:
        return  # the peer has none
    from accelerate.certify.settings import Settings

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "settings.json")
        Settings(folder, STEPS + 1, exits=False).write(settings)
        durations: dict[str, list[float]] = {"plain": [], "recorded": []}

        def plain() -> None:
            durations["plain"].append(train(None))

        def recorded() -> None:
            for file in Path(folder).glob("step_*.pt"):
                file.unlink()
            durations["recorded"].append(train(settings))

        alternate({"plain": plain, "recorded": recorded}, rounds=7, warmup=1)
    middle = {name: sorted(values)[len(values) // 2] / STEPS for name, values in durations.items()}
    emit("certify step", "ms", middle["plain"], middle["recorded"])


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Each of 4 ranks: the parallel example as it is, in each of its layouts, against a loop of plain PyTorch, to 1e-8."""

import contextlib
import io
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "parallel"))
import train

STEPS, ACCUMULATION, BATCH, LENGTH = 3, 2, 8, 16


def plain(kind):
    """What the example's defaults train, over batches in the order of the text."""
    set_seed(0)
    model, _ = train.make_model(kind, LENGTH)
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    for number, batch in enumerate(DataLoader(train.Windows(LENGTH), batch_size=BATCH, drop_last=True), start=1):
        output = model(input_ids=batch["input_ids"])
        logits = output if isinstance(output, torch.Tensor) else output.logits
        (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == STEPS * ACCUMULATION:
            return model.state_dict()


def main(folder, kind):
    state = PartialState(cpu=True)
    if state.is_main_process:
        save_file({name: value.contiguous() for name, value in plain(kind).items()}, folder / "parameters.safetensors")
    state.wait_for_everyone()
    # The process group stays, for the next layout.
    train.Accelerator.end_training = train.Accelerator.wait_for_everyone
    train.DataLoader = lambda *args, shuffle, **kwargs: DataLoader(*args, **kwargs)
    options = f"--dtype float64 --model {kind} --steps {STEPS} --length {LENGTH} --compare {folder} --explain".split()
    for layout in train.LAYOUTS:
        if layout.startswith("zero"):
            continue
        for kept in (AcceleratorState, GradientState, PartialState):
            kept._reset_state()
        sys.argv = ["train.py", "--layout", layout, *options]
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            train.main()
        if state.is_main_process:
            off = float(re.search(rf"{layout}: parameters differ by at most (\S+)", told.getvalue())[1])
            assert off <= 1e-8, f"{layout}: off by {off}"
            assert told.getvalue().count("optimizer state") == 4, told.getvalue()
            print(f"{layout}: off by {off:.1e}", flush=True)
    print("all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

# SPDX-License-Identifier: Apache-2.0
"""Run a model whose weights stay in the safetensors file on disk: two layers at a time are in memory.

python examples/big_model/offload.py --layers 24
accelerate launch --num_processes 2 examples/big_model/offload.py
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import PartialState, init_empty_weights, load_checkpoint_and_dispatch

WIDTH = 1024


def build(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def resident() -> int:
    """The memory of this process that is not part of a file, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    given = parser.parse_args()
    state = PartialState()
    torch.manual_seed(0)
    batch = torch.randn(8, WIDTH)

    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name, "model.safetensors")
        plain = build(given.layers)
        save_file(plain.state_dict(), checkpoint, metadata={"format": "pt"})
        expected, total = plain(batch), sum(weight.nbytes for weight in plain.parameters())
        del plain

        before = resident()
        with init_empty_weights():
            model = build(given.layers)
        # The weights are read from the checkpoint itself: the offload folder gets an index only.
        model = load_checkpoint_and_dispatch(
            model, checkpoint, device_map={"": "disk"}, offload_folder=name
        )
        model(batch)  # the order of the layers is learnt: from now on the next layer is read ahead
        begin = time.perf_counter()
        output = model(batch)
        seconds = time.perf_counter() - begin
        state.print(
            f"{total / 2**20:.0f} MiB of weights, {(resident() - before) / 2**20:.0f} MiB more in memory"
        )
        state.print(
            f"a forward takes {seconds * 1e3:.0f} ms; outputs are equal: {torch.equal(output.cpu(), expected)}"
        )
    state.destroy_process_group()


if __name__ == "__main__":
    main()

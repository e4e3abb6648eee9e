# SPDX-License-Identifier: Apache-2.0
"""Each rank: the host memory that loading a sharded model takes, where rank 0 alone has the weights."""

import gc
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState

WIDTH, LAYERS = 1024, 48
TENSOR = WIDTH * WIDTH * 4
WHOLE = LAYERS * TENSOR


def memory(which):
    """VmRSS, what this process has now, RssFile, that of files, or VmHWM, the most that it had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def load(what, with_weights, ranks, **layout):
    """Bytes by which the peak of this process grew while the model was built and prepared."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, **layout)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # The most is counted from here.
    before, files = memory("VmRSS"), memory("RssFile")
    with torch.device("cpu" if with_weights and accelerator.is_main_process else "meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = accelerator.prepare(model)
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert held == WHOLE // ranks, f"{what}: {held} bytes"
    # Pages of files are libraries used for the first time: of a torch for CUDA a quarter of this model.
    grown = memory("VmHWM") - before - (memory("RssFile") - files)
    whole = WHOLE if with_weights and accelerator.is_main_process else 0
    # A few tensors are on their way; the rest is what messages, the allocator and modules loaded meanwhile take.
    assert grown <= whole + held + 16 * TENSOR, f"{what}: {grown / WHOLE:.2f} of the model, of which it holds {held}"
    print(f"{what}: peak {grown / WHOLE:.2f} of the model")


def main():
    ranks = PartialState(cpu=True).num_processes
    plugin = {"fsdp_version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": WIDTH * WIDTH}
    load("no rank has weights", False, ranks, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
    plan = {str(layer): "rowwise" if layer % 2 else "colwise" for layer in range(LAYERS)}
    layout = ParallelismConfig(tp_size=ranks, tp_handler=TorchTensorParallelConfig(plan=plan))
    load("tensor parallel", True, ranks, parallelism_config=layout)
    plugin["cpu_ram_efficient_loading"] = True
    load("rank 0 has them", True, ranks, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
    print("all within")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The host memory that loading a sharded model takes, where rank 0 alone has the weights."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.parallelism_config import ParallelismConfig

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc"
)
WIDTH, LAYERS = 1024, 48
TENSOR = WIDTH * WIDTH * 4
WHOLE = LAYERS * TENSOR
M_MMAP_THRESHOLD = -3
BY_SIZE = {
    "fsdp_version": 2,
    "auto_wrap_policy": "SIZE_BASED_WRAP",
    "min_num_params": WIDTH * WIDTH,
}


def memory(which):
    """VmRSS, what this process has now, RssFile, that of files, or VmHWM, the most that it had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def check(with_weights, **layout):
    """Build and prepare a model on two ranks: the peak of each is what it needs."""
    accelerator = Accelerator(cpu=True, **layout)
    # Blocks of memory that are freed go back at once, so that the peak is what is needed.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # The most is counted from here.
    before, files = memory("VmRSS"), memory("RssFile")
    with torch.device("cpu" if with_weights and accelerator.is_main_process else "meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = accelerator.prepare(model)
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert shard == WHOLE // 2
    # Pages of files are libraries used for the first time: of a torch for CUDA a quarter of this model.
    grown = memory("VmHWM") - before - (memory("RssFile") - files)
    whole = WHOLE if with_weights and accelerator.is_main_process else 0
    # A few tensors are on their way; the rest is what messages, the allocator and modules loaded meanwhile take.
    assert grown <= whole + shard + 16 * TENSOR, f"{grown / WHOLE:.2f} of the model"


@on_ranks(2)
def test_no_rank_has_weights():
    check(False, fsdp_plugin=FullyShardedDataParallelPlugin(**BY_SIZE))


@on_ranks(2)
def test_tensor_parallel():
    plan = {str(layer): "rowwise" if layer % 2 else "colwise" for layer in range(LAYERS)}
    layout = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    check(True, parallelism_config=layout)


@on_ranks(2)
def test_rank_0_has_the_weights():
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, **BY_SIZE)
    check(True, fsdp_plugin=plugin)

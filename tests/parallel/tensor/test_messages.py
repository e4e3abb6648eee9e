# SPDX-License-Identifier: Apache-2.0
"""The messages of an accumulation window under DDP and tensor parallelism, against the same by hand."""

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from rank_pool import on_ranks
from torch import nn

from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.parallel.base import Bundle
from accelerate.parallel.ddp.strategy import DataParallel
from accelerate.parallel.report.models import communication_volume
from accelerate.parallel.tensor.strategy import TensorParallel
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.base import Precision
from accelerate.state import PartialState

sys.path.append(str(Path(__file__).parents[3] / "examples" / "parallel"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import by_hand
from llama import Llama, LlamaConfig

CPU, BATCHES = torch.device("cpu"), 3
BLOCKS = {"layers.*.attention.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"} | {
    f"layers.*.{key}_proj": "colwise"
    for key in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
}


def make():
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocabulary=12, width=16, hidden=24, layers=2))


def tensor_by_hand():
    model = by_hand.split(make())

    def window(tokens):
        for _ in range(BATCHES):
            model(tokens, labels=tokens)[0].backward()

    return window


def ddp_by_hand():
    model = nn.parallel.DistributedDataParallel(make())

    def window(tokens):
        with model.no_sync():
            for _ in range(BATCHES - 1):
                model(tokens, labels=tokens)[0].backward()
        model(tokens, labels=tokens)[0].backward()

    return window


def ours(strategy):
    prepared = strategy.prepare(Bundle([make()], [], [True]))[0]
    model = prepared.module

    def window(tokens):
        for _ in range(BATCHES - 1):
            with prepared.no_sync():
                strategy.backward(model(tokens, labels=tokens)[0])
        strategy.backward(model(tokens, labels=tokens)[0])
        model.zero_grad()

    # What the layout says of itself. Some numbers are known after a backward only.
    window.told = sum(volume.messages or 0 for volume in communication_volume(prepared, BATCHES))
    return window


def count(window):
    """(operation, elements) -> how often, in one window; the first is not counted (DDP orders its buckets in it)."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(12, (2, 6))
    window(tokens)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        window(tokens)
    return Counter(
        (event.name, sum(torch.Size(shape).numel() for shape in event.input_shapes))
        for event in profile.events()
        if event.name.startswith("gloo:")
    )


@on_ranks(2)
def test_data_parallel():
    PartialState(cpu=True)
    expected = count(ddp_by_hand())
    found = count(ours(DataParallel(CPU, Precision())))
    assert expected and found == expected


@on_ranks(2)
def test_tensor_parallel():
    PartialState(cpu=True)
    layout = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=BLOCKS))
    expected = count(tensor_by_hand())
    window = ours(TensorParallel(CPU, Precision(), layout))
    found = count(window)
    # A block has two sums in its forward and two in its backward.
    assert expected == {("gloo:all_reduce", 2 * 6 * 16): 2 * 4 * BATCHES}
    assert found == expected
    assert window.told == sum(found.values())


@on_ranks(2)
def test_sequence_parallel():
    PartialState(cpu=True)
    layout = ParallelismConfig(
        tp_size=2, tp_handler=TorchTensorParallelConfig(plan=BLOCKS, sequence_parallel=True)
    )
    along = count(ours(TensorParallel(CPU, Precision(), layout)))
    # Gathered where a split begins and scattered where it ends, in both directions, and once at each end of the
    # stream; gloo scatters sums by an all-reduce. The norms' gradients: one message, however long the window.
    assert along == {
        ("gloo:all_gather", 2 * 3 * 16): (2 * 4 + 2) * BATCHES,
        ("gloo:all_reduce", 2 * 6 * 16): 2 * 4 * BATCHES,
        ("gloo:all_reduce", 5 * 16): 1,
    }

# SPDX-License-Identifier: Apache-2.0
"""Each rank: the messages of an accumulation window under DDP and tensor parallelism, against the same by hand."""

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.parallel.base import Bundle
from accelerate.parallel.ddp import DataParallel
from accelerate.parallel.tensor import TensorParallel
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.base import Precision
from accelerate.state import PartialState

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

CPU, BATCHES = torch.device("cpu"), 3
BLOCKS = {"layers.*.attention.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"} | {
    f"layers.*.{key}_proj": "colwise" for key in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
}


def make():
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocabulary=12, width=16, hidden=24, layers=2))


class SumBack(torch.autograd.Function):
    """What enters a split: the same on every rank; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """What leaves a split: the sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def split_by_hand(model):
    rank, size = dist.get_rank(), dist.get_world_size()

    def keep(linear, dimension):
        linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dimension)[rank].clone())

    for layer in model.layers:
        layer.attention.num_heads //= size
        layer.attention.num_kv_heads //= size
        for part, columns, row in (
            (layer.attention, ("q_proj", "k_proj", "v_proj"), "o_proj"),
            (layer.mlp, ("gate_proj", "up_proj"), "down_proj"),
        ):
            for name in columns:
                keep(getattr(part, name), 0)
            keep(getattr(part, row), 1)
            part.register_forward_pre_hook(lambda module, args: (SumBack.apply(args[0]), *args[1:]))
            getattr(part, row).register_forward_hook(lambda module, args, output: Sum.apply(output))
    return model


def tensor_by_hand():
    model = split_by_hand(make())

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
    model = strategy.prepare(Bundle([make()], [], [True])).models[0]

    def window(tokens):
        for _ in range(BATCHES - 1):
            with strategy.no_sync(model):
                strategy.backward(model(tokens, labels=tokens)[0])
        strategy.backward(model(tokens, labels=tokens)[0])
        model.zero_grad()

    # What the layout says of itself.
    window.told = sum(traffic.messages for traffic in strategy.traffic(model, BATCHES))
    return window


def count(window):
    """(operation, elements) -> how often, in one window; the first is not counted (DDP orders its buckets in it)."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(12, (2, 6))
    window(tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        window(tokens)
    return Counter(
        (event.name, sum(torch.Size(shape).numel() for shape in event.input_shapes))
        for event in profile.events()
        if event.name.startswith("gloo:")
    )


def main():
    PartialState(cpu=True)
    expected = count(ddp_by_hand())
    found = count(ours(DataParallel(CPU, Precision())))
    assert expected and found == expected, (found, expected)
    print(f"data parallel: {dict(found)}")

    layout = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=BLOCKS))
    expected = count(tensor_by_hand())
    window = ours(TensorParallel(CPU, Precision(), layout))
    found = count(window)
    # A block has two sums in its forward and two in its backward.
    assert expected == {("gloo:all_reduce", 2 * 6 * 16): 2 * 4 * BATCHES}, expected
    assert found == expected, (found, expected)
    assert window.told == sum(found.values()), f"told {window.told} messages, sent {found}"
    print(f"tensor parallel: {dict(found)}")

    layout = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=BLOCKS, sequence_parallel=True))
    along = count(ours(TensorParallel(CPU, Precision(), layout)))
    # Gathered where a split begins and scattered where it ends, in both directions, and once at each end of the
    # stream; gloo scatters sums by an all-reduce. The norms' gradients: one message, however long the window.
    expected = {
        ("gloo:all_gather", 2 * 3 * 16): (2 * 4 + 2) * BATCHES,
        ("gloo:all_reduce", 2 * 6 * 16): 2 * 4 * BATCHES,
        ("gloo:all_reduce", 5 * 16): 1,
    }
    assert along == expected, along
    print(f"along the sequence: {dict(along)}")


if __name__ == "__main__":
    main()

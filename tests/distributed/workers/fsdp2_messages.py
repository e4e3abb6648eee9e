# SPDX-License-Identifier: Apache-2.0
"""Each rank: messages and bytes of an accumulation window under our FSDP2, against the same written by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.parallel.base import Bundle
from accelerate.parallel.fsdp2 import FullyShardedDataParallel
from accelerate.precision.base import Precision
from accelerate.state import PartialState


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 1))


def by_hand():
    model = make()
    for block in model[1:3]:
        fully_shard(block)
    fully_shard(model)

    def window(x):
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            model(x).sum().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()

    return window


def ours():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
    )
    strategy = FullyShardedDataParallel(torch.device("cpu"), Precision(), plugin)
    model = strategy.prepare(Bundle([make()], [], [True])).models[0]

    def window(x):
        for _ in range(2):
            with strategy.no_sync(model):
                strategy.backward(model(x).sum())
        strategy.backward(model(x).sum())
        return strategy.clip_grad_norm(model.parameters(), 1.0)

    return window


class Messages(TorchDispatchMode):
    """Counts collectives and the bytes of the tensors they are given."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            number, size = self.counts.get(function.__name__, (0, 0))
            self.counts[function.__name__] = (number + 1, size + sum(sizes))
        return function(*args, **(kwargs or {}))


def count(window):
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 4)
    window(x)  # The first forward looks at the order of the units.
    with Messages() as messages:
        window(x)
    return {name: found for name, found in messages.counts.items() if "wait" not in name}


def main():
    PartialState(cpu=True)
    expected, found = count(by_hand()), count(ours())
    moved = [name for name in expected if "gather" in name or "scatter" in name]
    assert len(moved) == 2, expected
    assert {name: found.get(name) for name in moved} == {name: expected[name] for name in moved}, (found, expected)
    # The norm of the gradients: one number, reduced once.
    others = {name: found[name] for name in found if name not in moved}
    assert others == {"allreduce_.default": (1, 4)}, others
    print(f"ours {found}, by hand {expected}")


if __name__ == "__main__":
    main()

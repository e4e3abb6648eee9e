# SPDX-License-Identifier: Apache-2.0
"""Steps of a small llama under FSDP2 and under tensor parallelism, beside the same written by hand in plain PyTorch.

Each rank of a gloo group runs all, in turn. FSDP2 by hand is `fully_shard` of each block, tensor parallelism by hand
torch's `parallelize_module`. A second row of the latter has two autograd functions instead, and plain tensors that
nothing could shard or save: the least that it can cost. Where the package of the interpreter does not offer a layout,
its rows are left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import by_hand
import torch
import torch.distributed as dist
from timing import alternate, emit
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "parallel"))
from llama import Block, Llama, LlamaConfig

BATCH, LENGTH, CLIP = 4, 64, 1.0
CONFIG = LlamaConfig(vocabulary=512, width=128, hidden=256, layers=4)
BLOCKS = {"layers.*.attention.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"} | {
    f"layers.*.{key}_proj": "colwise" for key in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def tokens(shared: bool) -> torch.Tensor:
    """The same on ranks that share their data."""
    generator = torch.Generator().manual_seed(0 if shared else dist.get_rank())
    return torch.randint(CONFIG.vocabulary, (BATCH, LENGTH + 1), generator=generator)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Callable[[], None]:
    inputs, labels = batch[:, :-1], batch[:, 1:]

    def step() -> None:
        loss = model(inputs, labels=labels)[0]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp_by_hand() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    model, _ = make()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    return plain_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(shared=False))


def tensor_by_torch() -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, _ = make()
    ranks = dist.get_world_size()
    styles = {"rowwise": RowwiseParallel, "colwise": ColwiseParallel}
    parallelize_module(
        model, init_device_mesh("cpu", (ranks,)), {name: styles[word]() for name, word in BLOCKS.items()}
    )
    for layer in model.layers:
        layer.attention.num_heads //= ranks
        layer.attention.num_kv_heads //= ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens(shared=True)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    parts = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("_proj.weight")]

    def step() -> None:
        model(inputs, labels=labels)[0].backward()
        # torch's own clipping refuses a mixture of plain tensors and DTensors.
        split = nn.utils.get_total_norm([p.grad for p in parts]).full_tensor()
        norm = (split**2 + nn.utils.get_total_norm([p.grad for p in rest]) ** 2).sqrt()
        nn.utils.clip_grads_with_norm_(rest, CLIP, norm)
        torch._foreach_mul_([p.grad.to_local() for p in parts], torch.clamp(CLIP / (norm + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_by_hand() -> Callable[[], None]:
    model = by_hand.split(make()[0])
    parts = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("_proj.weight")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens(shared=True)
    inputs, labels = batch[:, :-1], batch[:, 1:]

    def step() -> None:
        model(inputs, labels=labels)[0].backward()
        square = nn.utils.get_total_norm([p.grad for p in parts]) ** 2
        dist.all_reduce(square)
        norm = (square + nn.utils.get_total_norm([p.grad for p in rest]) ** 2).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared_step(shared: bool, **options: object) -> Callable[[], None] | None:
    """None where the model comes back without a part of it in another layout than a copy."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True, **options)
    if "fsdp_plugin" in options and accelerator.distributed_type is not DistributedType.FSDP:
        # The peer leaves FSDP aside on a CPU group; told that this is FSDP, it runs it there as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = options["fsdp_plugin"]
    model, optimizer = accelerator.prepare(*make())
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    batch = tokens(shared)
    inputs, labels = batch[:, :-1], batch[:, 1:]

    def step() -> None:
        with accelerator.accumulate(model):
            loss = model(inputs, labels=labels)[0]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

    return step


def fsdp() -> Callable[[], None] | None:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[Block.__name__]
    )
    return prepared_step(False, fsdp_plugin=plugin)


def tensor() -> Callable[[], None] | None:
    """The blocks alone, as by hand: None where that cannot be asked for."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import TorchTensorParallelConfig

    if "plan" not in TorchTensorParallelConfig.__dataclass_fields__:
        return None
    from accelerate.parallelism_config import ParallelismConfig

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    handler = TorchTensorParallelConfig(plan=BLOCKS)
    layout = ParallelismConfig(tp_size=dist.get_world_size(), tp_handler=handler)
    return prepared_step(True, parallelism_config=layout)


def run(own: Callable[[], None] | None, raws: dict[str, Callable[[], Callable[[], None]]]) -> None:
    """Each way by hand beside ours; one figure each."""
    if own is None:
        return
    seconds = alternate({**{name: make_step() for name, make_step in raws.items()}, "own": own}, rounds=15, repeat=2)
    if dist.get_rank() == 0:
        for name in raws:
            emit(f"{name}, {dist.get_world_size()} ranks", "ms", seconds[name], seconds["own"])


def main() -> None:
    torch.set_num_threads(1)
    run(fsdp(), {"fsdp step": fsdp_by_hand})
    run(tensor(), {"tensor step": tensor_by_torch, "tensor step, least": tensor_by_hand})
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads may abort an interpreter that leaves in order.
    os._exit(0)


if __name__ == "__main__":
    main()

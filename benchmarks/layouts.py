# SPDX-License-Identifier: Apache-2.0
"""Steps of a small Llama with FSDP2 and with tensor parallelism, compared with plain PyTorch.

The baseline is `fully_shard` of each block for FSDP2 and `parallelize_module` for tensor parallelism. A second
tensor-parallel baseline, the lower bound, uses plain tensors and two autograd functions. The ranks of a gloo group run
all of them in turn. Layouts that the installed `accelerate` does not support are skipped.

Two more rows: greedy `generate` of a small Llama of transformers under FSDP2, compared with torch's
`register_fsdp_forward_method` by hand; and a step of FSDP2 with an average of the weights, compared with one without.
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
TP_PLAN = {"layers.*.attention.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"} | {
    f"layers.*.{key}_proj": "colwise"
    for key in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def tokens(shared: bool) -> torch.Tensor:
    """Return random tokens, identical on all ranks if `shared`."""
    generator = torch.Generator().manual_seed(0 if shared else dist.get_rank())
    return torch.randint(CONFIG.vocabulary, (BATCH, LENGTH + 1), generator=generator)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> Callable[[], None]:
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
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, _ = make()
    ranks = dist.get_world_size()
    styles = {"rowwise": RowwiseParallel, "colwise": ColwiseParallel}
    parallelize_module(
        model,
        init_device_mesh("cpu", (ranks,)),
        {name: styles[style]() for name, style in TP_PLAN.items()},
    )
    for layer in model.layers:
        layer.attention.num_heads //= ranks
        layer.attention.num_kv_heads //= ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens(shared=True)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    sharded = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    replicated = [p for name, p in model.named_parameters() if not name.endswith("_proj.weight")]

    def step() -> None:
        model(inputs, labels=labels)[0].backward()
        # clip_grad_norm_ does not support a mixture of plain tensors and DTensors.
        sharded_norm = nn.utils.get_total_norm([p.grad for p in sharded]).full_tensor()
        norm = (sharded_norm**2 + nn.utils.get_total_norm([p.grad for p in replicated]) ** 2).sqrt()
        nn.utils.clip_grads_with_norm_(replicated, CLIP, norm)
        torch._foreach_mul_(
            [p.grad.to_local() for p in sharded], torch.clamp(CLIP / (norm + 1e-6), max=1.0)
        )
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_by_hand() -> Callable[[], None]:
    model = by_hand.split(make()[0])
    sharded = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    replicated = [p for name, p in model.named_parameters() if not name.endswith("_proj.weight")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens(shared=True)
    inputs, labels = batch[:, :-1], batch[:, 1:]

    def step() -> None:
        model(inputs, labels=labels)[0].backward()
        square = nn.utils.get_total_norm([p.grad for p in sharded]) ** 2
        dist.all_reduce(square)
        norm = (square + nn.utils.get_total_norm([p.grad for p in replicated]) ** 2).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared_step(
    shared: bool, averages: bool = False, **options: object
) -> Callable[[], None] | None:
    """Return a training step, or None if `prepare` shards no parameter."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True, **options)
    if "fsdp_plugin" in options and accelerator.distributed_type is not DistributedType.FSDP:
        # The peer ignores FSDP on CPU process groups unless its state is overridden.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = options["fsdp_plugin"]
    model, optimizer = accelerator.prepare(*make())
    if averages:
        accelerator.track_average(model, decay=0.999)
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


def fsdp(averages: bool = False) -> Callable[[], None] | None:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
    )
    return prepared_step(False, averages=averages, fsdp_plugin=plugin)


def tensor() -> Callable[[], None] | None:
    """Split the blocks only, as the baselines do. Return None if a plan is not supported."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import TorchTensorParallelConfig

    if "plan" not in TorchTensorParallelConfig.__dataclass_fields__:
        return None
    from accelerate.parallelism_config import ParallelismConfig

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    handler = TorchTensorParallelConfig(plan=TP_PLAN)
    layout = ParallelismConfig(tp_size=dist.get_world_size(), tp_handler=handler)
    return prepared_step(True, parallelism_config=layout)


PROMPT, NEW_TOKENS = 16, 8


def generation(prepare: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    from transformers import LlamaConfig as HubConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = HubConfig(
        vocab_size=CONFIG.vocabulary, hidden_size=CONFIG.width, intermediate_size=CONFIG.hidden,
        num_hidden_layers=CONFIG.layers, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    model = prepare(LlamaForCausalLM(config).eval())
    prompt = tokens(shared=False)[:, :PROMPT]

    def generate() -> None:
        model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)

    return generate


def generation_by_hand() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    def prepare(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            fully_shard(layer)
        register_fsdp_forward_method(fully_shard(model), "generate")
        return model

    return generation(prepare)


def prepared_generation() -> Callable[[], None] | None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    if not hasattr(Accelerator, "track_average"):
        return None
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return generation(Accelerator(cpu=True, fsdp_plugin=plugin).prepare)


def averaged() -> Callable[[], None] | None:
    """Return a step of FSDP2 that an average of the weights follows."""
    from accelerate import Accelerator

    return fsdp(averages=True) if hasattr(Accelerator, "track_average") else None


def run(
    own: Callable[[], None] | None, baselines: dict[str, Callable[[], Callable[[], None]]]
) -> None:
    """Print one result per baseline."""
    if own is None:
        return
    seconds = alternate(
        {**{name: make_step() for name, make_step in baselines.items()}, "own": own},
        rounds=15,
        repeat=2,
    )
    if dist.get_rank() == 0:
        for name in baselines:
            emit(f"{name}, {dist.get_world_size()} ranks", "ms", seconds[name], seconds["own"])


def main() -> None:
    torch.set_num_threads(1)
    run(fsdp(), {"fsdp step": fsdp_by_hand})
    run(prepared_generation(), {"generate": generation_by_hand})
    run(averaged(), {"averaged step": fsdp})
    run(tensor(), {"tensor step": tensor_by_torch, "tensor step, lower bound": tensor_by_hand})
    dist.barrier()
    sys.stdout.flush()
    # A normal exit may abort in gloo's threads.
    os._exit(0)


if __name__ == "__main__":
    main()

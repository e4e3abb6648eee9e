# SPDX-License-Identifier: Apache-2.0
"""Train a Llama with a billion parameters on one GPU. Prints tokens per second, MFU and peak memory as a JSON line.

    python benchmarks/gpu_llama.py --variant raw      plain PyTorch: fully_shard and compiled blocks
    python benchmarks/gpu_llama.py --variant api      the same with the installed accelerate
    python benchmarks/gpu_llama.py --variant api --fp8

Uses FSDP2 on one rank with fp32 shards and bf16 compute, compiled blocks, scaled dot product attention and sequences
of 2048 tokens. `--small` trains a tiny model, to test the script on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "parallel"))
from llama import Block, Llama, LlamaConfig

# Peak dense bf16 FLOP/s from the data sheets. The keys are substrings of device names.
PEAK = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
}


def sizes(small: bool) -> tuple[LlamaConfig, int, int]:
    """Return the model configuration, the batch size and the sequence length."""
    if small:
        return LlamaConfig(vocabulary=512, width=64, hidden=128, layers=2), 2, 64
    return (
        LlamaConfig(vocabulary=32000, width=2048, hidden=5632, layers=22, heads=32, kv_heads=4),
        8,
        2048,
    )


def flops_per_token(model: torch.nn.Module, config: LlamaConfig, length: int) -> float:
    """Return the FLOPs of forward and backward: 6 per matrix parameter, plus causal attention."""
    matrix_parameters = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    return 6.0 * matrix_parameters + 6.0 * config.layers * config.width * length


def plain(
    model: torch.nn.Module, device: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model.to(device)
    for block in model.layers:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
    )
    for block in model.layers:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, lambda loss: loss.backward()


def through_api(model: torch.nn.Module, fp8: bool) -> tuple[torch.nn.Module, Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    handlers = []
    if fp8:
        from accelerate.utils import AORecipeKwargs

        handlers = [AORecipeKwargs()]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", ACCELERATE_USE_FSDP="true"
    )
    accelerator = Accelerator(
        mixed_precision="fp8" if fp8 else "bf16",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[Block.__name__],
            reshard_after_forward=True,
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True),
        kwargs_handlers=handlers,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=("raw", "api"), required=True)
    parser.add_argument("--fp8", action="store_true", help="use torchao's float8 layers (api only)")
    parser.add_argument(
        "--small", action="store_true", help="train a tiny model, to test this script"
    )
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    config, batch, length = sizes(args.small)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Llama(config)
    token_flops = flops_per_token(model, config, length)
    parameters = sum(p.numel() for p in model.parameters())
    model, optimizer, backward = (
        plain(model, device) if args.variant == "raw" else through_api(model, args.fp8)
    )
    ids = torch.randint(0, config.vocabulary, (batch, length), device=device)

    def step() -> torch.Tensor:
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(5):
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(args.steps):
        loss = step()
    final = loss.item()
    seconds = (time.perf_counter() - begin) / args.steps
    rate = batch * length / seconds
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = next((flops for key, flops in PEAK.items() if key in name), None)
    line = {
        "name": f"llama {parameters / 1e6:.0f}M {args.variant}{' fp8' if args.fp8 else ''}",
        "device": name,
        "tokens_per_second": round(rate),
        "mfu": None if peak is None else round(rate * token_flops / peak, 4),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if device.type == "cuda"
        else None,
        "loss": round(final, 4),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

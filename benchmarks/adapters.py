# SPDX-License-Identifier: Apache-2.0
"""Size of a checkpoint of LoRA adapters, and time to save it under FSDP2 on four ranks.

It is compared with one process, and with torch's functions on the same ranks: rank 0 gets the adapter and the state of
its optimizer, and `torch.save` writes them to the disk. The first save, which also computes the checksums of the base,
is not counted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from timing import emit

RANKS, ROUNDS, SAVES = 4, 2, 7


def adapted_model() -> torch.nn.Module:
    """Return a Llama of 44 million parameters, with 6 million in adapters on all linear layers."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    return peft.get_peft_model(
        LlamaForCausalLM(config), peft.LoraConfig(target_modules="all-linear", r=64)
    )


def measure(folder: str) -> None:
    """Print the size of what trains, that of its checkpoint, and the median seconds of a save."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    options = {}
    if "WORLD_SIZE" in os.environ:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=True, **options)
    model = adapted_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    saves = {"own": lambda: accelerator.save_state(folder)}
    if dist.is_initialized():
        saves["torch"] = lambda: save_with_torch(model, optimizer.optimizer, f"{folder}.torch")
    seconds: dict[str, list[float]] = {name: [] for name in saves}
    for _ in range(SAVES + 1):
        for name, save in saves.items():
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            save()
            seconds[name].append(time.perf_counter() - begin)
    if accelerator.is_main_process:
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        # The two moments of AdamW have the size of the parameters.
        figures = {"trained": 3 * trained, "size": size}
        figures.update({name: statistics.median(found[1:]) for name, found in seconds.items()})
        print(json.dumps(figures), flush=True)
    accelerator.end_training()


def save_with_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Write the trained parameters and the optimizer's state, whole, to one file on the disk."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    )
    if dist.get_rank() == 0:
        with open(path, "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
    dist.barrier()


def run(ranks: int, folder: str) -> dict[str, float]:
    """Return the figures of a run on so many processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
    ]
    command = command if ranks > 1 else [sys.executable]
    done = subprocess.run(
        [*command, __file__, folder], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    if importlib.util.find_spec("peft") is None:
        return  # the peer's environment: it saves entire models
    figures: dict[int, list[dict[str, float]]] = {1: [], RANKS: []}
    with tempfile.TemporaryDirectory(dir=".") as root:
        for _ in range(ROUNDS):
            for ranks, results in figures.items():
                results.append(run(ranks, f"{root}/{ranks}"))
    sharded = figures[RANKS][0]
    emit("adapter size", "MB", sharded["trained"], sharded["size"])
    one, many = (
        statistics.median(result["own"] for result in results) for results in figures.values()
    )
    emit("adapter save", "ms", one, many)
    emit(
        "adapter save by torch",
        "ms",
        statistics.median(result["torch"] for result in figures[RANKS]),
        many,
    )


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()

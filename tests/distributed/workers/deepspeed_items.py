# SPDX-License-Identifier: Apache-2.0
"""Each rank: `backward(loss, num_items=...)` under every ZeRO stage, offload and bf16, against the plain loop."""

import sys
import warnings

import deepspeed_common
import torch
import torch.distributed as dist
from deepspeed_common import fresh
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.state import PartialState

STEPS, ACCUMULATION, ROWS, CLIP = 6, 3, 6, 0.3


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def make_optimizer(model):
    # Not Adam, whose steps hardly depend on how large gradients are.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def batches(world):
    """One global batch for each backward: rows of a rank, how many of them count (also none) and their classes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS * ACCUMULATION):
        x = torch.randn(world, ROWS, 5, generator=generator)
        counts = torch.randint(0, ROWS + 1, (world, 1), generator=generator)
        y = torch.randint(0, 3, (world, ROWS), generator=generator)
        yield x, y.masked_fill(torch.arange(ROWS) >= counts, -100)


def plain(world, dtype):
    """Weights and the norms before clipping of a loop whose gradient is the mean over each window's items.

    In bf16 the weights that train are fp32, as under DeepSpeed, and gradients are sums in fp32.
    """
    master, model = make_model(dtype).float(), make_model(dtype)
    optimizer = make_optimizer(master)
    window, norms = [], []
    for batch in batches(world):
        window.append(batch)
        if len(window) < ACCUMULATION:
            continue
        total = sum((y >= 0).sum() for _, y in window)
        for x, y in window:
            loss = nn.functional.cross_entropy(model(x.to(dtype)).flatten(0, 1).float(), y.flatten(), reduction="sum")
            model.zero_grad()
            (loss / total).backward()
            for kept, used in zip(master.parameters(), model.parameters(), strict=True):
                kept.grad = used.grad.float() + (0 if kept.grad is None else kept.grad)
        norms.append(nn.utils.clip_grad_norm_(master.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(master.state_dict())
        window = []
    return master.state_dict(), norms


def config(stage, zero=None, **others):
    rows = {"train_micro_batch_size_per_gpu": ROWS}
    return deepspeed_common.config(stage, CLIP, {"reduce_bucket_size": 1000, **(zero or {})}, **rows, **others)


def check(what, settings, expected, norms, dtype=torch.float32, rough=False):
    accelerator = fresh(DeepSpeedPlugin(hf_ds_config=settings), gradient_accumulation_steps=ACCUMULATION)
    model = make_model(torch.float32)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    told = settings["zero_optimization"]["stage"] > 0
    for number, (x, y) in enumerate(batches(accelerator.num_processes)):
        x, y = x[accelerator.process_index].to(dtype), y[accelerator.process_index]
        with accelerator.accumulate(model):
            items = (y >= 0).sum()
            loss = nn.functional.cross_entropy(model(x).float(), y, reduction="sum") / items.clamp(min=1)
            accelerator.backward(loss, num_items=items)
            if accelerator.sync_gradients and told:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), CLIP))
                wanted = norms[number // ACCUMULATION]
                assert abs(norm - wanted) <= (0.03 if rough else 1e-5) * wanted, f"{what}: norm {norm}, not {wanted}"
            optimizer.step()
            optimizer.zero_grad()
    saved = accelerator.prepared_model(model).checkpoint_state_dict()
    worst = max((value - expected[name]).abs().max().item() for name, value in saved.items()) if saved else 0.0
    assert worst < (5e-3 if rough else 1e-6), f"{what}: off by {worst}"
    accelerator.free_memory()
    print(f"{what}: {worst:.1e}", flush=True)


def main():
    warnings.simplefilter("ignore")
    world = PartialState(cpu=True).num_processes
    expected, norms = plain(world, torch.float32)
    assert max(norms) > CLIP > min(norms), f"clipping would not be tested: {norms}"
    for stage in (0, 1, 2, 3):
        check(f"stage {stage}", config(stage), expected, norms)
    host = {"offload_optimizer": {"device": "cpu"}}
    for stage in (2, 3):
        check(f"stage {stage}, offloaded", config(stage, zero=host), expected, norms)

    expected, norms = plain(world, torch.bfloat16)
    half = {"bf16": {"enabled": True}}
    for stage in (0, 1, 2, 3):
        check(f"stage {stage} in bf16", config(stage, **half), expected, norms, torch.bfloat16, rough=True)
    summed = {**half, "data_types": {"grad_accum_dtype": "fp32"}}
    check("stage 1 in bf16, summed in fp32", config(1, **summed), expected, norms, torch.bfloat16, rough=True)
    if dist.is_initialized():
        dist.barrier()
    print("all equal")


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Each rank: what an engine of each ZeRO stage sends in a window, and what it holds, is what `explain` tells."""

import contextlib
import gc
import io
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed_common import config, fresh
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.parallel.report.explain import memory_usage
from accelerate.state import PartialState

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from counting import Messages

ACCUMULATION = 3
KINDS = {"all-gather": "allgather", "reduce-scatter": "reduce_scatter", "reduction": "allreduce"}
# Bytes of what is one number.
NUMBERS = 8


class Large(Messages):
    """Without the norm of the gradients and whether they are finite: a number each."""

    def note(self, name, size):
        if size > NUMBERS:
            super().note(next(kind for kind in KINDS.values() if kind in name), size)


# Larger than what a model of this size has: DeepSpeed's buckets, which `explain` tells beside the rest.
BUCKET = 10**8


def storages(gradients=()):
    """Address -> bytes of everything that is held. A gradient has an object in Python only while it is looked at."""
    held = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*held, *gradients]}


def storages_of(model, before):
    """What is held since `before`, without parameters that a forward or backward has gathered for a while."""
    gc.collect()
    found = storages([p.grad for p in model.parameters() if p.grad is not None])
    passing = {p.untyped_storage().data_ptr() for p in model.parameters() if not getattr(p, "ds_persist", True)}
    return {place: size for place, size in found.items() if place not in before and place not in passing}


def check(stage, zero, **others):
    gc.collect()
    # Referenced until the end: no new tensor can lie where one of these was.
    former = [obj.untyped_storage() for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    before = {storage.data_ptr() for storage in former}
    plugin = DeepSpeedPlugin(hf_ds_config=config(stage, zero=zero, train_micro_batch_size_per_gpu=2, **others))
    accelerator = fresh(plugin, gradient_accumulation_steps=ACCUMULATION)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.ones(2, 5, dtype=torch.bfloat16 if others else torch.float32)
    held = []

    def window():
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).float().sum())
                held.append(storages_of(model, before))
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(2):  # the order of the modules is looked at first
        window()
    with Large() as messages:
        window()
    sent_number = Counter({kind: number for kind, (number, _) in messages.counts.items()})
    sent_bytes = Counter({kind: size for kind, (_, size) in messages.counts.items()})
    number, sent = Counter(), Counter()
    for told in accelerator.prepared_model(model).communication_volume(ACCUMULATION):
        kind = KINDS[told.what.split()[0]]
        sent[kind] += told.sent
        number[kind] += told.messages
        if not told.about and kind == "allreduce":
            assert told.messages == sent_number[kind], (stage, zero, told, sent_number)
    assert sent == sent_bytes, (stage, zero, sent, sent_bytes)
    # How many: a parameter that lies on two ranks' parts may go in two.
    for kind in number:
        assert number[kind] <= sent_number[kind] <= 2 * number[kind], (stage, zero, number, sent_number)
    check_memory(f"stage {stage} {zero} {others}", accelerator, model, optimizer, held)
    report_of(accelerator, model, stage)
    accelerator.free_memory()
    print(f"stage {stage} {zero}: {dict(sent)} bytes in {dict(sent_number)}", flush=True)


def check_memory(what, accelerator, model, optimizer, held):
    """`held`: what was there after each backward. Beside tensors that are counted an engine has some numbers."""
    told = memory_usage([accelerator.prepared_model(model)], [optimizer.optimizer], windows=True)
    buckets, rest = told.pop("buckets"), sum(told.values())
    large = max(sum(size for size in found.values() if size >= BUCKET) for found in held)
    real = max(sum(size for size in found.values() if size < BUCKET) for found in held)
    small = buckets % BUCKET
    assert large in (0, buckets - small), (what, large, buckets)
    assert any(0 <= real - rest - more <= NUMBERS * 50 for more in (0, small)), (what, real, rest, small, told)


def report_of(accelerator, model, stage):
    with contextlib.redirect_stdout(io.StringIO()):
        report = accelerator.explain()
    assert report.find("model: Sequential", "(whole)") == f"DeepSpeed engine, ZeRO stage {stage}", report
    numbers = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    assert report.find("model: Sequential", "parameters").startswith(f"{numbers:,} in "), report


def main():
    warnings.simplefilter("ignore")
    PartialState(cpu=True)
    for stage in (0, 1, 2, 3):
        check(stage, {})
        check(stage, {}, bf16={"enabled": True})
    check(1, {}, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    for stage in (1, 2):
        check(stage, {"reduce_bucket_size": 1000})
    for stage in (2, 3):
        check(stage, {"offload_optimizer": {"device": "cpu"}})
    split = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    check(3, split)
    check(3, {**split, "stage3_max_reuse_distance": 0})
    check(3, {**split, "stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 1000})
    dist.barrier()
    print("all equal")


if __name__ == "__main__":
    main()

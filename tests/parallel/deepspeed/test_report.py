# SPDX-License-Identifier: Apache-2.0
"""What an engine of each ZeRO stage sends in a window, and the memory it has, against what `explain` reports."""

import contextlib
import gc
import io
from collections import Counter

import pytest
import torch
from counting import Messages
from deepspeed_runs import LATE_IMPORTS, config, fresh, needs_deepspeed, on_engine_ranks
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.parallel.report.explain import memory_usage

ACCUMULATION, WINDOWS = 3, 5
KINDS = {"all-gather": "allgather", "reduce-scatter": "reduce_scatter", "reduction": "allreduce"}
# Bytes of what is one number.
NUMBERS = 8
# Larger than what a model of this size has: DeepSpeed's buckets, which `explain` reports alongside the rest.
BUCKET = 10**8
HALF = {"bf16": {"enabled": True}}
SPLIT = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
CASES = {
    **{f"stage {stage}": (stage, {}, {}) for stage in (0, 1, 2, 3)},
    **{f"stage {stage} in bf16": (stage, {}, HALF) for stage in (0, 1, 2, 3)},
    "stage 1 in bf16, summed in fp32": (1, {}, {**HALF, "data_types": {"grad_accum_dtype": "fp32"}}),
    **{f"stage {stage}, small buckets": (stage, {"reduce_bucket_size": 1000}, {}) for stage in (1, 2)},
    **{f"stage {stage}, offloaded": (stage, {"offload_optimizer": {"device": "cpu"}}, {}) for stage in (2, 3)},
    "stage 3, sharded": (3, SPLIT, {}),
    "stage 3, gathered twice": (3, {**SPLIT, "stage3_max_reuse_distance": 0}, {}),
    "stage 3, some sharded": (
        3, {**SPLIT, "stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 1000}, {},
    ),
}  # fmt: skip
PRELOADED = LATE_IMPORTS
pytestmark = needs_deepspeed


class Large(Messages):
    """Without the norm of the gradients and whether they are finite: a number each."""

    def note(self, name, size):
        if size > NUMBERS:
            super().note(next(kind for kind in KINDS.values() if kind in name), size)


def storages(gradients=()):
    """Address -> bytes of all storages. A gradient has an object in Python only while it is looked at."""
    present = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor) and not obj.is_meta]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*present, *gradients]}


def storages_of(model, before):
    """What has been allocated since `before`, without parameters that are gathered at the moment."""
    gc.collect()
    found = storages([p.grad for p in model.parameters() if p.grad is not None])
    passing = {p.untyped_storage().data_ptr() for p in model.parameters() if not getattr(p, "ds_persist", True)}
    return {place: size for place, size in found.items() if place not in before and place not in passing}


@on_engine_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_that_explain_reports(case):
    stage, zero, others = CASES[case]
    gc.collect()
    # Referenced until the end: no new tensor can lie where one of these was.
    former = [obj.untyped_storage() for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    before = {storage.data_ptr() for storage in former}
    plugin = DeepSpeedPlugin(hf_ds_config=config(stage, zero=zero, train_micro_batch_size_per_gpu=2, **others))
    accelerator = fresh(plugin, gradient_accumulation_steps=ACCUMULATION)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.ones(2, 5, dtype=torch.bfloat16 if "bf16" in others else torch.float32)
    usage = []

    def window():
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).float().sum())
                usage.append(storages_of(model, before))
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(WINDOWS - 1):  # the order of the modules is traced first
        window()
    with Large() as messages:
        window()
    sent = Counter({kind: size for kind, (_, size) in messages.counts.items()})
    least, most = Counter(), Counter()
    for volume in accelerator.prepared_model(model).communication_volume(ACCUMULATION):
        kind = KINDS[volume.what.split()[0]]
        most[kind] += volume.sent
        # Whether a parameter is gathered again for the backward, DeepSpeed decides.
        least[kind] += volume.sent / 2 if volume.about else volume.sent
    assert sent.keys() == most.keys() and all(least[kind] <= sent[kind] <= most[kind] for kind in sent), (
        sent, least, most,
    )  # fmt: skip
    check_memory(accelerator, model, optimizer, usage)
    check_report(accelerator, model, stage)


def check_memory(accelerator, model, optimizer, usage):
    """`usage`: what was there after each backward. An engine has some numbers besides the tensors that are counted."""
    reported = memory_usage([accelerator.prepared_model(model)], [optimizer.optimizer], windows=True)
    buckets, rest = reported.pop("buckets"), sum(reported.values())
    large = max(sum(size for size in found.values() if size >= BUCKET) for found in usage)
    totals = [sum(size for size in found.values() if size < BUCKET) for found in usage]
    # Each backward of a window, in the windows after the first: some tensors live on for a while in one or the other.
    real = max(min(totals[number::ACCUMULATION][1:]) for number in range(ACCUMULATION))
    small = buckets % BUCKET
    assert large in (0, buckets - small), (large, buckets)
    assert any(0 <= real - rest - more <= NUMBERS * 50 for more in (0, small)), (real, rest, small, reported)


def check_report(accelerator, model, stage):
    with contextlib.redirect_stdout(io.StringIO()):
        report = accelerator.explain()
    assert report.find("model: Sequential", "(model)") == f"DeepSpeed engine, ZeRO stage {stage}", report
    numbers = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    assert report.find("model: Sequential", "parameters").startswith(f"{numbers:,} in "), report

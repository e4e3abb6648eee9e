# SPDX-License-Identifier: Apache-2.0
"""Each rank: the bytes that an engine of each ZeRO stage sends in a window are those that `explain` tells."""

import warnings
from collections import Counter

import deepspeed
import torch
import torch.distributed as dist
from counting import Messages
from torch import nn

from accelerate import Accelerator
from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState

# DeepSpeed would compile its own messages through shared memory first: a minute that says nothing about us.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
ACCUMULATION = 3
KINDS = {"all-gather": "allgather", "reduce-scatter": "reduce_scatter", "reduction": "allreduce"}
# Bytes of what is one number.
NUMBERS = 8


class Large(Messages):
    """Without the norm of the gradients and whether they are finite: a number each."""

    def note(self, name, size):
        if size > NUMBERS:
            super().note(next(kind for kind in KINDS.values() if kind in name), size)


def check(stage, zero, **others):
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage, **zero},
        **others,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.ones(2, 5, dtype=torch.bfloat16 if others else torch.float32)

    def window():
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).float().sum())
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(2):  # the order of the modules is looked at first
        window()
    with Large() as messages:
        window()
    sent_number = Counter({kind: number for kind, (number, _) in messages.counts.items()})
    sent_bytes = Counter({kind: size for kind, (_, size) in messages.counts.items()})
    number, sent = Counter(), Counter()
    for told in accelerator.strategy.traffic(model, ACCUMULATION):
        kind = KINDS[told.what.split()[0]]
        sent[kind] += told.sent
        number[kind] += told.messages
        if not told.about and kind == "allreduce":
            assert told.messages == sent_number[kind], (stage, zero, told, sent_number)
    assert sent == sent_bytes, (stage, zero, sent, sent_bytes)
    # How many: a parameter that lies on two ranks' parts may go in two.
    for kind in number:
        assert number[kind] <= sent_number[kind] <= 2 * number[kind], (stage, zero, number, sent_number)
    accelerator.free_memory()
    print(f"stage {stage} {zero}: {dict(sent)} bytes in {dict(sent_number)}", flush=True)


def main():
    warnings.simplefilter("ignore")
    PartialState(cpu=True)
    for stage in (0, 1, 2, 3):
        check(stage, {})
        check(stage, {}, bf16={"enabled": True})
    check(1, {}, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    for stage in (1, 2):
        check(stage, {"reduce_bucket_size": 1000})
    split = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    check(3, split)
    check(3, {**split, "stage3_max_reuse_distance": 0})
    check(3, {**split, "stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 1000})
    dist.barrier()
    print("all equal")


if __name__ == "__main__":
    main()

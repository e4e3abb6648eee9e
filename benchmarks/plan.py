# SPDX-License-Identifier: Apache-2.0
"""`accelerate plan` against real runs: its interval of memory against an allocator's count, its order against times.

    python benchmarks/plan.py --memory bert gpt llama mixture --order llama --ranks 2 4

Each run trains on gloo with the variables of the configuration that the plan writes. The count is that of torch's CPU
allocator, from the profiler's memory events, at the peak of the second step. Times are minima of steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import socket
import time
from contextlib import nullcontext
from itertools import combinations

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.core import env
from accelerate.parallel.report.fake_step import loss_of
from accelerate.planning import estimate, layouts, machine, trace
from accelerate.planning.model import BatchShape, fake_batch, parse_batch

LAYOUTS = ("single", "ddp", "fsdp", "fsdp+ckpt")
# The fifth: tensor parallelism where the model has a plan for it; the others shard over 2 of 4 ranks.
FIFTH = {"llama": "tp2", "mixture": "hsdp2x2", "bert": "hsdp2x2", "gpt": "hsdp2x2"}


def build(kind: str) -> nn.Module:
    """The model of 15 to 30 million parameters."""
    import transformers as tf

    tf.logging.set_verbosity_error()
    wide = {"hidden_size": 384, "num_hidden_layers": 6, "vocab_size": 8000}
    match kind:
        case "gpt":
            return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=8000))
        case "llama":
            heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
            return tf.LlamaForCausalLM(tf.LlamaConfig(intermediate_size=1024, **wide, **heads))
        case "bert":
            return tf.BertForMaskedLM(tf.BertConfig(intermediate_size=1536, num_attention_heads=6, **wide))
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4}
    return tf.MixtralForCausalLM(tf.MixtralConfig(intermediate_size=512, **wide, **heads))


def train(kind: str, batch: BatchShape, variables: dict, steps: int, results) -> None:
    """One rank of a run: its peak of memory, or its shortest step if `steps` are timed."""
    env.publish(variables)
    torch.set_num_threads(1)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    accelerator = Accelerator(cpu=True)
    profiled = torch.profiler.profile(activities=kinds, profile_memory=True) if not steps else nullcontext()
    with profiled as profile:
        model = build(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        inputs = fake_batch(model, batch)
        since = step(accelerator, model, optimizer, inputs)
        gc.collect()
        step(accelerator, model, optimizer, inputs)
    now = peak = 0
    events = profile.profiler.kineto_results.events() if profile else ()
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        now += event.nbytes()
        if event.start_ns() >= since:
            peak = max(peak, now)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step(accelerator, model, optimizer, inputs)
        times.append(time.perf_counter() - start)
    if accelerator.is_main_process:
        results.put((peak, min(times, default=0.0)))
    accelerator.end_training()


def step(accelerator, model, optimizer, inputs) -> int:
    """One step; returns the time at its end."""
    with accelerator.accumulate(model):
        loss = loss_of(model(**inputs))
        accelerator.backward(loss)
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return time.time_ns()


def run(kind: str, training: trace.PlannedTraining, layout: layouts.PlannedLayout, steps: int) -> tuple[int, float]:
    """(peak bytes, seconds of a step) of a real run."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    shared = trace.launch_variables(training.configuration(layout))
    workers = []
    for rank in range(layout.ranks):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.ranks, "LOCAL_WORLD_SIZE": layout.ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {**shared, **(ranks | address if layout.ranks > 1 else {})}
        arguments = (kind, training.batch.of_rank(layout), variables, steps, results)
        workers.append(context.Process(target=train, args=arguments))
        workers[-1].start()
    found = results.get(timeout=1200)
    for worker in workers:
        worker.join()
    return found


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau of (estimated, measured)."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return (sum(one > 0 for one in signs) - sum(one < 0 for one in signs)) / len(signs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", nargs="*", default=["gpt", "llama", "bert", "mixture"])
    parser.add_argument("--order", nargs="*", default=["llama"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--batch", default="8x128", help="of the runs whose memory is compared")
    parser.add_argument("--order_batch", default="8x64", help="of the runs that are timed")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    batch = parse_batch(given.batch)
    for kind in given.memory:
        chosen = [(name, 1 if name == "single" else 2) for name in LAYOUTS]
        chosen.append((FIFTH[kind], 4 if FIFTH[kind].startswith("hsdp") else 2))
        compare_memory(kind, batch, chosen)
    for kind in given.order:
        for ranks in given.ranks:
            compare_order(kind, parse_batch(given.order_batch), ranks, given.steps)


def compare_memory(kind: str, batch: BatchShape, chosen: list[tuple[str, int]]) -> None:
    for name, ranks in chosen:
        training = training_of(kind, batch)
        layout = layouts.find(name, layouts.candidates(ranks))
        ((_, planned),) = trace.trace_all(training, [layout])
        if planned.failure:
            raise SystemExit(f"{kind} {name}: {planned.failure}")
        measured, _ = run(kind, training, layout, 0)
        total = planned.total
        low, high = estimate.memory_interval(layout, total, planned.spare, machine.CPU_MEMORY_SPREAD)
        emit(
            name=f"memory {kind} {name} on {ranks}", unit="MB", planned=round((low + high) / 2e6, 1),
            low=round(low / 1e6, 1), high=round(high / 1e6, 1),
            measured=round(measured / 1e6, 1), half_width=round((high - low) / (high + low), 3),
            inside=low <= measured <= high,
        )  # fmt: skip


def compare_order(kind: str, batch: BatchShape, ranks: int, steps: int) -> None:
    training = training_of(kind, batch)
    names = ("ddp", "fsdp", "fsdp+ckpt", "hsdp2x2", f"tp{ranks}")
    chosen = [layout for layout in layouts.candidates(ranks) if layout.name in names]
    here = machine.measure(ranks)
    pairs = []
    for layout, planned in trace.trace_all(training, chosen):
        row = estimate.estimate(layout, planned, here)
        if row.failure:
            continue
        # Repeated minima: other processes disturb a measurement, in one direction only.
        measured = min(run(kind, training, layout, steps)[1] for _ in range(2))
        pairs.append((row.seconds.middle, measured))
        emit(
            name=f"time {kind} {layout.name} on {ranks}", unit="s", planned=round(row.seconds.middle, 3),
            low=round(row.seconds.low, 3), high=round(row.seconds.high, 3), measured=round(measured, 3),
        )  # fmt: skip
    emit(name=f"tau {kind} on {ranks}", unit="", tau=round(kendall(pairs), 2))


def training_of(kind: str, batch: BatchShape) -> trace.PlannedTraining:
    with torch.device("meta"):
        return trace.PlannedTraining(build(kind), batch)


def emit(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()

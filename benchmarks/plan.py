# SPDX-License-Identifier: Apache-2.0
"""`accelerate plan` against real runs: its interval of memory against an allocator's count, its order against times.

    python benchmarks/plan.py --memory bert gpt llama mixture --order llama --ranks 2 4

Each run trains on gloo with the variables of the configuration that the plan writes. The count is that of torch's CPU
allocator over all threads, gloo's among them, at the highest peak of the second to fourth step. Times are minima of
steps, in several rounds over all layouts. Two layouts are a tie if their times differ by less than the same layout
differs between rounds; ties do not count in Kendall's tau.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import socket
import tempfile
import time
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.core import env
from accelerate.planning import estimate, layouts, machine, trace
from accelerate.planning.model import BatchShape, fake_batch, loss_of, parse_batch

ROUNDS = 3
LAYOUTS = ("single", "ddp", "fsdp", "fsdp+ckpt")
# The fifth: tensor parallelism where the model has a plan for it; the others shard over 2 of 4 ranks.
FIFTH = {"llama": "tp2", "mixture": "hsdp2x2", "bert": "hsdp2x2", "gpt": "hsdp2x2"}

# Of four ranks: pipelines whose stages are replicated, sharded, or split where the model has a plan for it.
COMPOSED = (
    "pp2+dp2",
    "pp2+fsdp2",
    "pp2+fsdp2+1f1b",
    "pp2+fsdp2+ckpt+1f1b",
    "pp2+tp2",
    "pp2+tp2+1f1b",
)
# Of mixtures that transformers shards while it loads them.
EXPERTS = {"ep2+fsdp2": 2, "ep2+tp2": 2, "ep2+fsdp4": 4, "ep4+fsdp4": 4, "ep2+tp2+fsdp2": 4}
PIPELINES = ("pp2", "pp2+1f1b", "pp2+looped_bfs", "pp2+interleaved", "pp2+zero_bubble", "pp2+zbv")


def build(kind: str) -> nn.Module:
    """The model of 15 to 30 million parameters."""
    import transformers as tf

    tf.logging.set_verbosity_error()
    wide = {"hidden_size": 384, "num_hidden_layers": 6, "vocab_size": 8000}
    match kind:
        case "gpt":
            return tf.GPT2LMHeadModel(
                tf.GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=8000)
            )
        case "llama":
            heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
            return tf.LlamaForCausalLM(tf.LlamaConfig(intermediate_size=1024, **wide, **heads))
        case "bert":
            return tf.BertForMaskedLM(
                tf.BertConfig(intermediate_size=1536, num_attention_heads=6, **wide)
            )
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4}
    return tf.MixtralForCausalLM(tf.MixtralConfig(intermediate_size=512, **wide, **heads))


def count_in_all_threads() -> None:
    """Make torch's allocator on the CPU count what every thread allocates and frees, from now on.

    The profiler records events of one thread, each with the allocator's count. By itself the allocator counts
    while the profiler watches the thread only, so that what gloo's threads free would stay in the count.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def counts(profile: torch.profiler.profile) -> list[tuple[int, int]]:
    """(time in ns, allocated bytes of the process) at each allocation and free of the thread of the step."""
    found, nodes = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if hasattr(node.extra_fields, "total_allocated"):
            found.append((node.start_time_ns, node.extra_fields.total_allocated))
    return found


def loaded(folder: str, sizes: dict[str, int]) -> nn.Module:
    """The saved mixture, sharded while it is loaded."""
    import transformers as tf

    config = tf.distributed.DistributedConfig(**sizes)
    return tf.MixtralForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float32
    ).train()


def train(make, batch: BatchShape, accumulation: int, variables: dict, steps: int, results) -> None:
    """One rank of a run: its peak of memory, or its shortest step if `steps` are timed."""
    count_in_all_threads()
    env.publish(variables)
    torch.set_num_threads(1)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    accelerator = Accelerator(cpu=True)
    profiled = (
        torch.profiler.profile(activities=kinds, profile_memory=True)
        if not steps
        else nullcontext()
    )
    with profiled as profile:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        # Different tokens, so that they have different experts.
        torch.manual_seed(accelerator.strategy.data_shard[0])
        inputs = {
            name: torch.randint_like(one, 8000) for name, one in fake_batch(model, batch).items()
        }
        since = step(accelerator, model, optimizer, inputs, accumulation)
        gc.collect()
        for _ in range(1 if steps else 3):
            step(accelerator, model, optimizer, inputs, accumulation)
    peak = (
        max((count for when, count in counts(profile) if when >= since), default=0)
        if profile
        else 0
    )
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step(accelerator, model, optimizer, inputs, accumulation)
        times.append(time.perf_counter() - start)
    results.put((accelerator.process_index, peak, min(times, default=0.0)))
    accelerator.end_training()


def step(accelerator, model, optimizer, inputs, accumulation: int) -> int:
    """One optimizer step; returns the time at its end."""
    for _ in range(accumulation):
        with accelerator.accumulate(model):
            loss = loss_of(model(**inputs))
            accelerator.backward(loss)
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return time.time_ns()


def run(
    kind: str, training: trace.PlannedTraining, layout: layouts.PlannedLayout, steps: int
) -> tuple[int, float]:
    """(peak bytes, seconds of a step) of a real run."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    shared = trace.launch_variables(training.configuration(layout))
    make, folder = functools.partial(build, kind), tempfile.TemporaryDirectory()
    if layout.loading:
        # In bfloat16, so that weights are converted: the allocator does not count weights that stay in a mapped file.
        build(kind).bfloat16().save_pretrained(folder.name)
        make = functools.partial(loaded, folder.name, dict(layout.loading))
    workers = []
    for rank in range(layout.ranks):
        ranks = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": layout.ranks,
            "LOCAL_WORLD_SIZE": layout.ranks,
        }
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {**shared, **(ranks | address if layout.ranks > 1 else {})}
        arguments = (
            make,
            training.batch.of_rank(layout),
            layout.accumulation,
            variables,
            steps,
            results,
        )
        workers.append(context.Process(target=train, args=arguments))
        workers[-1].start()
    found = sorted(results.get(timeout=1200) for _ in workers)
    for worker in workers:
        worker.join()
    folder.cleanup()
    # The stages of a pipeline differ, and the tokens of experts: an estimate is that of the largest.
    of_ranks = found if layout.pipeline_ranks > 1 or layout.loading else found[:1]
    return max(peak for _, peak, _ in of_ranks), max(seconds for _, _, seconds in of_ranks)


def kendall(found: list[tuple[float, float, float]]) -> tuple[float, int]:
    """Kendall's tau of (estimated, measured, noise of the measured) without ties, and the number of ties."""
    pairs = list(combinations(found, 2))
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in pairs if abs(a[1] - b[1]) > max(a[2], b[2])]
    tau = (sum(one > 0 for one in signs) - sum(one < 0 for one in signs)) / max(len(signs), 1)
    return tau, len(pairs) - len(signs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", nargs="*", default=["gpt", "llama", "bert", "mixture"])
    parser.add_argument("--order", nargs="*", default=["llama"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--layouts", nargs="*", help="only these are compared")
    parser.add_argument("--batch", default="8x128", help="of the runs whose memory is compared")
    parser.add_argument("--order_batch", default="8x64", help="of the runs that are timed")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    batch = parse_batch(given.batch)
    for kind in given.memory:
        chosen = [(name, 1 if name == "single" else 2) for name in LAYOUTS]
        chosen.append((FIFTH[kind], 4 if FIFTH[kind].startswith("hsdp") else 2))
        chosen += [(name, 2) for name in PIPELINES]
        chosen += [(name, 4) for name in COMPOSED if "tp" not in name or FIFTH[kind] == "tp2"]
        chosen += EXPERTS.items() if kind == "mixture" else ()
        chosen = [(name, ranks) for name, ranks in chosen if name in (given.layouts or name)]
        compare_memory(kind, batch, chosen)
    for kind in given.order:
        for ranks in given.ranks:
            compare_order(kind, parse_batch(given.order_batch), ranks, given.steps, given.layouts)


def compare_memory(kind: str, batch: BatchShape, chosen: list[tuple[str, int]]) -> None:
    for name, ranks in chosen:
        training = training_of(kind, batch)
        layout = layouts.find(name, candidates(kind, ranks))
        ((_, planned),) = trace.trace_all(training, [layout])
        if planned.failure:
            raise SystemExit(f"{kind} {name}: {planned.failure}")
        measured, _ = run(kind, training, layout, 0)
        total = planned.total
        low, high = estimate.memory_interval(planned, total, machine.CPU_MEMORY_SPREAD)
        emit(
            name=f"memory {kind} {name} on {ranks}", unit="MB", planned=round((low + high) / 2e6, 1),
            low=round(low / 1e6, 1), high=round(high / 1e6, 1),
            measured=round(measured / 1e6, 1), half_width=round((high - low) / (high + low), 3),
            inside=low <= measured <= high,
        )  # fmt: skip


def compare_order(
    kind: str, batch: BatchShape, ranks: int, steps: int, names: list[str] | None
) -> None:
    training = training_of(kind, batch)
    names = names or ["ddp", "fsdp", "fsdp+ckpt", "hsdp2x2", f"tp{ranks}", *PIPELINES]
    chosen = [layout for layout in candidates(kind, ranks) if layout.name in names]
    chosen += [layout.accumulated(2) for layout in chosen if layout.name in ("ddp", "fsdp")]
    here = machine.measure(ranks)
    planned = [
        (layout, estimate.estimate(layout, one, here))
        for layout, one in trace.trace_all(training, chosen)
    ]
    planned = [(layout, row) for layout, row in planned if not row.failure]
    # Other processes disturb a measurement in one direction only, and each round for all layouts.
    rounds = [
        [run(kind, training, layout, steps)[1] for layout, _ in planned] for _ in range(ROUNDS)
    ]
    found = []
    for (layout, row), times in zip(planned, zip(*rounds, strict=True), strict=True):
        best, second = sorted(times)[:2]
        found.append((row.seconds.middle, best, second - best))
        emit(
            name=f"time {kind} {layout.name} on {ranks}", unit="s", planned=round(row.seconds.middle, 3),
            low=round(row.seconds.low, 3), high=round(row.seconds.high, 3), measured=round(best, 3),
            noise=round(second - best, 3),
        )  # fmt: skip
    tau, ties = kendall(found)
    emit(
        name=f"tau {kind} on {ranks}",
        unit="",
        tau=round(tau, 2),
        ties=ties,
        pairs=len(found) * (len(found) - 1) // 2,
    )


def candidates(kind: str, ranks: int) -> list[layouts.PlannedLayout]:
    return [
        *layouts.candidates(ranks),
        *(layouts.expert_candidates(ranks) if kind == "mixture" else ()),
    ]


def training_of(kind: str, batch: BatchShape) -> trace.PlannedTraining:
    with torch.device("meta"):
        return trace.PlannedTraining(build(kind), batch)


def emit(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What `explain` says of messages and memory is what is sent and held."""

from pathlib import Path

import pytest
from ranks import run_ranks

LLAMA = Path(__file__).parents[2] / "examples" / "parallel"
HELPERS = Path(__file__).parents[1] / "helpers"

WORKER = """
import gc
import sys

import torch

sys.path[:0] = sys.argv[1:]
from counting import Messages
from llama import Llama, LlamaConfig

from accelerate import Accelerator
from accelerate.parallel.report.explain import size_of
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin


def gradients():
    "By address all gradients that are there, wherever a library keeps them."
    found = [obj.grad for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor) and obj.is_leaf]
    local = [getattr(grad, "_local_tensor", grad) for grad in found if grad is not None]
    return {grad.untyped_storage().data_ptr(): grad.untyped_storage() for grad in local}


def trained(each=False, **options):
    window_of_two = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=window_of_two, **options)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=2))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 256, (2, 8))

    # What a former run has left, held so that nothing new gets its place.
    before, held = gradients(), []

    def window():
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(ids, labels=ids)[0])
                held.append(sum(found.nbytes() for place, found in gradients().items() if place not in before))
                optimizer.step()
                optimizer.zero_grad()

    window()
    with Messages() as messages:
        window()
    report = accelerator.explain(all_ranks=True)
    memory = report.find("memory", f"rank {accelerator.process_index}")
    plugin = options.get("fsdp_plugin")
    if plugin is None or plugin.fsdp_version == 2:
        assert f"gradients {size_of(max(held))}" in memory, (held, memory)
    accelerator.free_memory()
    accelerator.state._reset_state()
    return messages.counts, report


def said(report):
    title = next(name for name in report.sections if name.startswith("messages"))
    return {row.name: row.got for row in report.sections[title]}


plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
)
counts, report = trained(fsdp_plugin=plugin)
words = said(report)
number, size = counts["allgather_base"]
assert words["all-gather of parameters"].startswith(f"{number} messages, {size_of(size)}"), (words, counts)
number, size = counts["reduce_scatter_base"]
assert words["reduce-scatter of gradients"].startswith(f"{number} messages, {size_of(size)}"), (words, counts)
shapes = [p.shape for p in Llama(LlamaConfig(layers=2)).parameters()]
elements, parameters = sum(shape.numel() for shape in shapes), len(shapes)
world = torch.distributed.get_world_size()
for rank in range(world):
    held = report.find("memory", f"rank {rank}")
    # A window keeps whole gradients until its last backward scatters them.
    whole, part = (f"{elements * 4 / count / 1024:.2f} KiB" for count in (1, world))
    assert f"parameters {part}, gradients {whole}" in held, held
assert report.find("run", "mesh").startswith(f"dp_shard={world}")



def told(words, what, found):
    number, size = found
    assert words.pop(what, None) == f"{number} messages, {size_of(size)}", (what, found, words)


# Modules that are left whole are averaged one by one: three matrices of an attention, here in each of two backwards.
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"],
    ignored_modules=".*[qkv]_proj",
)
counts, report = trained(fsdp_plugin=plugin, each=True)
words = said(report)
assert counts["allreduce"][0] == 2 * 3 * 2, counts
told(words, "all-gather of parameters", counts["allgather_base"])
told(words, "reduce-scatter of gradients", counts["reduce_scatter_base"])
told(words, "all-reduce of gradients of unsharded parameters", counts["allreduce"])

for kind in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") if world == 2 else ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
    for precision in ("no", "bf16") if kind == "FULL_SHARD" else ("no",):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1, sharding_strategy=kind, use_orig_params=True, auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["Block"], ignored_modules="layers.1.mlp.up_proj",
        )
        hybrid = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if world == 4 else None
        counts, report = trained(fsdp_plugin=plugin, parallelism_config=hybrid, mixed_precision=precision)
        words = said(report)
        told(words, "all-reduce of gradients of unsharded parameters", (1, 128 * 64 * 4))
        number, size = counts["allreduce"]
        # All parameters but that one are in units, which agree on what was used.
        flags = 4 * (parameters - 1)
        told(words, "all-reduce of flags of used parameters", (1, flags))
        counts["allreduce"] = (number - 2, size - 128 * 64 * 4 - flags)
        if kind != "NO_SHARD":
            told(words, "all-gather of parameters", counts["allgather"])
            told(words, "reduce-scatter of gradients", counts["reduce_scatter_base"])
        if counts["allreduce"][0]:
            told(words, "all-reduce of gradients between replicas", counts["allreduce"])
        assert not words, (kind, words, counts)
        assert report.find("model: Llama", "computes in") == {"no": "float32", "bf16": "bfloat16"}[precision]
if world == 4:
    print("all as said")
    sys.exit()

counts, report = trained(parallelism_config=ParallelismConfig(tp_size=2))
words = said(report)
number = sum(int(text.split()[0]) for name, text in words.items())
assert number == sum(found[0] for found in counts.values()), (words, counts)
assert "tp: S(0)" in report.find("model: Llama", "layers.*.attention.q_proj.weight")

counts, report = trained()
assert said(report)["all-reduce of gradients"] == f"about 1 messages, {elements * 4 / 1024:.2f} KiB", said(report)
assert report.find("model: Llama", "(model)") == "DistributedDataParallel"
print("all as said")
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_what_is_said_is_what_is_sent(ranks):
    results = run_ranks(WORKER, ranks, LLAMA, HELPERS, timeout=180)
    assert all("all as said" in result.stdout for result in results)

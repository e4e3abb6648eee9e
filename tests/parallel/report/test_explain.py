# SPDX-License-Identifier: Apache-2.0
"""What `explain` reports of messages and memory is what is sent and allocated."""

import gc
import sys
from pathlib import Path

import torch
from counting import Messages
from rank_pool import on_ranks

from accelerate import Accelerator
from accelerate.core.objects import size_of
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

sys.path.append(str(Path(__file__).parents[3] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]}
SHAPES = [p.shape for p in Llama(LlamaConfig(layers=2)).parameters()]
ELEMENTS = sum(shape.numel() for shape in SHAPES)


def gradients():
    """All gradients that are there, wherever a library keeps them, by address."""
    found = [
        obj.grad for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor) and obj.is_leaf
    ]
    local = [getattr(grad, "_local_tensor", grad) for grad in found if grad is not None]
    return {grad.untyped_storage().data_ptr(): grad.untyped_storage() for grad in local}


def trained(each=False, **options):
    """What two windows of two batches sent in the second, by operation, and what `explain` reports."""
    window_of_two = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=window_of_two, **options)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=2))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 256, (2, 8))
    before, sizes = gradients(), []

    def window():
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(ids, labels=ids)[0])
                sizes.append(
                    sum(
                        found.nbytes()
                        for place, found in gradients().items()
                        if place not in before
                    )
                )
                optimizer.step()
                optimizer.zero_grad()

    window()
    with Messages() as messages:
        window()
    report = accelerator.explain(all_ranks=True)
    memory = report.find("memory", f"rank {accelerator.process_index}")
    plugin = options.get("fsdp_plugin")
    if plugin is None or plugin.fsdp_version == 2:
        assert f"gradients {size_of(max(sizes))}" in memory, (sizes, memory)
    return messages.counts, report


def reported(report):
    title = next(name for name in report.sections if name.startswith("messages"))
    return {row.name: row.got for row in report.sections[title]}


def same(words, what, found):
    """The report has this row, and it is what was counted; the row is then taken from `words`."""
    number, size = found
    assert words.pop(what, None) == f"{number} messages, {size_of(size)}", (what, found, words)


@on_ranks(2, thorough=[4])
def test_fsdp2(nproc):
    counts, report = trained(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **BLOCKS))
    words = reported(report)
    number, size = counts["allgather_base"]
    assert words["all-gather of parameters"].startswith(f"{number} messages, {size_of(size)}"), (
        words,
        counts,
    )
    number, size = counts["reduce_scatter_base"]
    assert words["reduce-scatter of gradients"].startswith(f"{number} messages, {size_of(size)}"), (
        words,
        counts,
    )
    for rank in range(nproc):
        memory = report.find("memory", f"rank {rank}")
        # A window keeps whole gradients until its last backward scatters them.
        whole, part = (f"{ELEMENTS * 4 / count / 1024:.2f} KiB" for count in (1, nproc))
        assert f"parameters {part}, gradients {whole}" in memory, memory
    assert report.find("run", "mesh").startswith(f"dp_shard={nproc}")


@on_ranks(2, thorough=[4])
def test_unsharded_modules():
    """They are averaged in one message, the matrices of both attentions, here in each of two backwards."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, ignored_modules=".*[qkv]_proj", **BLOCKS
    )
    counts, report = trained(fsdp_plugin=plugin, each=True)
    words = reported(report)
    assert counts["allreduce"][0] == 2, counts
    same(words, "all-gather of parameters", counts["allgather_base"])
    same(words, "reduce-scatter of gradients", counts["reduce_scatter_base"])
    same(words, "all-reduce of gradients of unsharded parameters", counts["allreduce"])


@on_ranks(2)
def test_tensor_parallel():
    counts, report = trained(parallelism_config=ParallelismConfig(tp_size=2))
    words = reported(report)
    number = sum(int(text.split()[0]) for text in words.values())
    assert number == sum(found[0] for found in counts.values()), (words, counts)
    assert "tp: Shard(0)" in report.find("model: Llama", "layers.*.attention.q_proj.weight")


@on_ranks(2)
def test_ddp():
    _, report = trained()
    assert (
        reported(report)["all-reduce of gradients"]
        == f"about 1 messages, {ELEMENTS * 4 / 1024:.2f} KiB"
    )
    assert report.find("model: Llama", "(model)") == "DistributedDataParallel"

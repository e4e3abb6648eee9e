# SPDX-License-Identifier: Apache-2.0
"""What is printed when memory runs out: once, with a change that fits, and the error unchanged."""

import contextlib
import functools
import io
import re
import types

import pytest
import torch
from allocator import peak_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from accelerate import Accelerator, out_of_memory
from accelerate.core import memory as core_memory
from accelerate.parallel.fsdp.units import flat_units
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, PipelineParallelConfig, find_executable_batch_size

ERROR = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"


class Full(nn.Module):
    """Two layers with a wide activation; with `most`, memory runs out in the forward of more samples."""

    def __init__(self, most=None):
        super().__init__()
        self.most = most
        self.up, self.down = nn.Linear(8, 4096), nn.Linear(4096, 1)

    def forward(self, x):
        hidden = self.up(x).relu()
        if self.most is not None and len(x) > self.most and not isinstance(x, FakeTensor):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.down(hidden)


@pytest.fixture
def limit(monkeypatch):
    def limit(size):
        monkeypatch.setattr(out_of_memory, "memory_limit", lambda kept: size)

    return limit


def prepared(most=None):
    accelerator = Accelerator(cpu=True)
    model = Full(most)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_limit_is_that_of_the_device_in_use(monkeypatch):
    module = types.SimpleNamespace(is_initialized=lambda: True, mem_get_info=lambda device: (1, 1000))
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(out_of_memory.devices, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(out_of_memory.devices, "module_of", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert out_of_memory.memory_limit(10) == 1000


def test_backward(limit, capsys):
    """Two layers keep about 2 x 4096 floats of each of 64 samples: with half of them the step fits."""
    accelerator, model, _ = prepared()
    weights = 4 * sum(p.numel() for p in model.parameters())
    limit(2 * weights + int(64 * 4096 * 4 * 2.2))
    batch = {"x": torch.ones(64, 8)}
    output = model(**batch)

    def fail(gradient):
        raise RuntimeError(ERROR)

    output.register_hook(fail)
    with pytest.raises(RuntimeError) as raised:
        accelerator.backward(output.mean())
    assert str(raised.value) == ERROR
    printed = capsys.readouterr().err
    assert printed.count("out of memory:") == 1
    assert "smallest change that fits: batches of 32 instead of 64, with gradient_accumulation_steps x2" in printed


def test_find_executable_batch_size(limit, capsys):
    limit(600_000)
    sizes = []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: sizes[-1] // 2)
    def train(size):
        sizes.append(size)
        accelerator, model, _ = prepared(most=16)
        accelerator.backward(model(torch.ones(size, 8)).mean())
        return size

    assert train() == 16
    assert sizes == [64, 32, 16]
    assert "batches of" in capsys.readouterr().err


def test_other_errors_are_not_explained(capsys):
    accelerator, model, _ = prepared()
    output = model(torch.ones(2, 8))

    def fail(gradient):
        raise RuntimeError("something else")

    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="something else"):
        accelerator.backward(output.mean())
    assert capsys.readouterr().err == ""


class Sequential(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def explain_in_a_pipeline(schedule):
    """What is printed on this rank where memory runs out in a loop around a pipeline."""
    sizes = ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(schedule=schedule, num_microbatches=4))
    accelerator = Accelerator(cpu=True, parallelism_config=sizes)
    model = Sequential()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"x": torch.ones(8, 8)}
    try:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(batch)} GiB")
    except torch.OutOfMemoryError as error:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            core_memory.report_exhausted(error)
    return printed.getvalue()


def test_stages_of_a_pipeline(ranks):
    """What is not traced is said, with what this layout has."""
    first, last = ranks(2).run(explain_in_a_pipeline, "gpipe")
    assert "This rank has stage 0 of 2, schedule gpipe with 4 micro-batches" in first
    assert "1f1b, which keeps the activations of 2 here, where gpipe keeps those of all 4" in first
    assert "stage 1 of 2" in last and "the activations of 1 here" in last
    scheduled, _ = ranks(2).run(explain_in_a_pipeline, "1f1b")
    assert "more and smaller micro-batches" in scheduled and "gpipe" not in scheduled
    for text in (first, last, scheduled):
        assert "the model: parameters" in text and "without activations it has" in text
        assert (
            "activations were not traced here, and no change was tried (no batch has shown yet what the stages" in text
        )


def run_out(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Block(nn.Module):
    """Attention and two linear layers; while `fails`, memory runs out in it."""

    fails = False

    def __init__(self, width=128):
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm(x)
        parts = (layer(normed) for layer in (self.q_proj, self.k_proj, self.v_proj))
        heads = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in parts)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        if self.fails and not isinstance(x, FakeTensor):
            run_out()
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.inner_norm(x))))


class Transformer(nn.Module):
    _no_split_modules = ("Block",)
    _tp_plan = {f"blocks.*.{name}_proj": "colwise" for name in ("q", "k", "v", "up")} | {
        f"blocks.*.{name}_proj": "rowwise" for name in ("o", "down")
    }

    def __init__(self, width=128, depth=4, vocabulary=512):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())}


def train_transformer(limit, samples, steps, fsdp, sizes, depth):
    """(bytes at the peak of a step that the allocator counts, what is printed where `limit` bytes run out)."""
    plugin = (
        None if fsdp is None else FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap", **fsdp)
    )
    layout = None if sizes is None else ParallelismConfig(**sizes)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, fsdp_plugin=plugin, parallelism_config=layout
    )
    model = Transformer(depth=depth)
    block, fails = model.blocks[2], []
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = {"input_ids": torch.zeros(samples, 64, dtype=torch.long)}

    def step():
        for _ in range(steps):
            split = accelerator.maybe_context_parallel(buffers=[batch["input_ids"]], buffer_seq_dims=[1])
            with split, accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                if fails:
                    loss.register_hook(run_out)
                accelerator.backward(loss)
                del loss
                optimizer.step()
                optimizer.zero_grad()

    peak = peak_of(step, steps=2)
    states = [value for state in optimizer.state.values() for value in state.values()]
    parameters = [handle.flat_param for _, handle, _ in flat_units(model)] or model.parameters()
    kept = sum(getattr(one, "_local_tensor", one).nbytes for one in [*parameters, *states])
    if limit is None:
        return kept + peak, ""
    out_of_memory.memory_limit = lambda kept: limit
    # As long as it takes on a busy machine.
    out_of_memory._SECONDS = 600.0
    # In a backward, which all stages of a pipeline begin, or in the middle of a forward.
    (fails.append if layout is not None and layout.pp_enabled else functools.partial(setattr, block, "fails"))(True)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            step()
        except torch.OutOfMemoryError as error:
            core_memory.report_exhausted(error)
    return kept + peak, printed.getvalue()


def size_in(text, pattern):
    """The bytes of `... 1.50 MiB`."""
    return float(re.search(rf"{pattern} ([\d.]+) MiB", text).group(1)) * 2**20


FSDP = {"fsdp_version": 2}
FSDP1 = {"fsdp_version": 1, "use_orig_params": False, "sharding_strategy": "SHARD_GRAD_OP"}
KEPT, RESHARDED = {"reshard_after_forward": False}, {"reshard_after_forward": True}
RECOMPUTED = {"activation_checkpointing": True}
SCHEDULED = {"pp_size": 2, "pp_handler": PipelineParallelConfig(schedule="1f1b", num_microbatches=4)}
BATCHES = "batches of 4 instead of 16, with gradient_accumulation_steps x4:"
BLOCKS = r"recompute the activations of 4 blocks \(activation_checkpointing\):"


@pytest.mark.parametrize(
    ("sizes", "fsdp", "depth", "samples", "limit", "change", "changed"),
    [
        pytest.param(None, FSDP, 4, 16, 24, BATCHES, (4, 4, {}), id="batches", marks=pytest.mark.thorough),
        pytest.param(None, FSDP | KEPT, 4, 1, 11.2, BLOCKS, (1, 1, RECOMPUTED), id="checkpointing"),
        pytest.param(
            None, FSDP | KEPT | RECOMPUTED, 8, 1, 17.5, "reshard_after_forward=True:", (1, 1, RESHARDED), id="reshard",
            marks=pytest.mark.thorough,
        ),
        pytest.param(None, FSDP1, 4, 1, 11.4, BLOCKS, (1, 1, RECOMPUTED), id="fsdp1", marks=pytest.mark.thorough),
        pytest.param({"tp_size": 2}, None, 4, 16, 20, BATCHES, (4, 4, {}), id="tp", marks=pytest.mark.thorough),
        pytest.param({"cp_size": 2}, FSDP, 4, 16, 17, BATCHES, (4, 4, {}), id="cp", marks=pytest.mark.thorough),
        pytest.param(SCHEDULED, None, 4, 16, 12.2, BATCHES, (4, 4, {}), id="1f1b", marks=pytest.mark.thorough),
        pytest.param({"pp_size": 2}, None, 4, 16, 14, BATCHES, (4, 4, {}), id="gpipe", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_a_change_of_a_sharded_model_fits(sizes, fsdp, depth, samples, limit, change, changed, ranks):
    """What is traced in the middle of a forward is what the allocator counts in a real step, before and after it."""
    limit *= 2**20
    expected = []
    for measured, printed in ranks(2).run(train_transformer, limit, samples, 1, fsdp, sizes, depth):
        assert measured > limit
        assert size_in(printed, "together") == pytest.approx(measured, rel=0.1)
        expected.append(size_in(printed, f"smallest change that fits: {change}"))
    samples, steps, options = changed
    found = ranks(2).run(train_transformer, None, samples, steps, fsdp and fsdp | options, sizes, depth)
    for (measured, _), size in zip(found, expected, strict=True):
        assert measured <= limit
        assert measured == pytest.approx(size, rel=0.1)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks: agreed on, refused together, loaded by another number of processes."""

from __future__ import annotations

import pytest
from ranks import run_ranks

COMMON = """
import random, sys, time
from pathlib import Path
import torch
from accelerate.checkpointing import (
    CheckpointMismatch, CorruptCheckpoint, ShardedState, Options, PreparedModel, PreparedOptimizer, RunState,
    Writer, load_newest, load_run, resume, save_run, verify,
)
from torch.utils.data import DataLoader
from accelerate.core.errors import CheckpointError
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState

state = PartialState(cpu=True)
root = Path(sys.argv[1])
rank = state.process_index

class Place:
    '''A loader as far as a checkpoint sees it.'''
    def __init__(self, consumed=0): self.consumed = consumed
    def state_dict(self): return {"consumed": self.consumed}
    def load_state_dict(self, saved): self.consumed = saved["consumed"]

class Pending(Place):
    '''State that differs on every rank.'''

def make(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer

def bundle(model, optimizer, **more):
    return RunState(models=[PreparedModel(model)], optimizers=[PreparedOptimizer(optimizer)], **more)

def step(model, optimizer, data):
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def fails(kind, needle, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        assert needle in str(error), f"{needle!r} is not in: {error}"
        return error
    raise AssertionError(f"no {kind.__name__} from {function}")
"""

TWO_RANKS = (
    COMMON
    + """
data = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
model, optimizer = make()
step(model, optimizer, data)
random.seed(100 + rank); torch.manual_seed(200 + rank)
run = bundle(model, optimizer, dataloaders=[Place(32)], rank_state=Pending(rank), progress={"step": 1})

# One folder, each rank its own random states.
first = root / "checkpoint_0"
save_run(run, first, process=state)
expected = (random.random(), torch.rand(()).item())
manifest = verify(first)
assert manifest.world_size == 2 and {"random_states_0.json", "random_states_1.json"} <= set(manifest.files)

other, other_optimizer = make(1)
place, pending = Place(), Pending(-1)
loaded = bundle(other, other_optimizer, dataloaders=[place], rank_state=pending)
report = load_run(loaded, first, process=state)
assert report.progress == {"step": 1} and report.notes == [] and place.consumed == 32 and pending.consumed == rank
assert (random.random(), torch.rand(()).item()) == expected
for _ in range(3):
    step(model, optimizer, data)
    step(other, other_optimizer, data)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))

# An error on one rank is an error on both, and the older checkpoint stays.
class Broken(Place):
    def state_dict(self):
        if rank == 1:
            raise OSError(28, "No space left on device")
        return {"consumed": 0}
before = verify(first)
broken = bundle(model, optimizer, dataloaders=[Broken()])
fails(CheckpointError, "rank 1: OSError: [Errno 28]", save_run, broken, first, process=state)
assert verify(first) == before
assert rank == 1 or [p.name for p in root.iterdir()] == ["checkpoint_0"], list(root.iterdir())

# Folders that differ between the ranks.
fails(CheckpointError, "another folder", save_run, run, root / f"mine_{rank}", process=state)

impatient = Options(arrival_timeout=1.0)
# A rank that does not call: named in seconds on the rank that did, and on itself when it calls late.
started = time.monotonic()
if rank == 0:
    lonely = (save_run, run, root / "lonely")
    error = fails(CheckpointError, "rank 1 did not come", *lonely, process=state, options=impatient)
    assert "is_main_process" in str(error) and time.monotonic() - started < 5
    state.wait_for_everyone()
else:
    state.wait_for_everyone()
    fails(CheckpointError, "rank 1 did not come", save_run, run, root / "lonely", process=state)
assert not (root / "lonely").exists()
state.wait_for_everyone()
started = time.monotonic()
if rank == 1:
    fails(CheckpointError, "rank 0 did not come", save_run, run, root / "lonely", process=state, options=impatient)
    state.wait_for_everyone()
else:
    state.wait_for_everyone()
    fails(CheckpointError, "rank 0 did not come", save_run, run, root / "lonely", process=state)
assert rank == 1 or [p.name for p in root.iterdir()] == ["checkpoint_0"], list(root.iterdir())

# After all that, saving works; in the background too, with training going on meanwhile.
writer = Writer()
save_run(run, root / "checkpoint_1", process=state, writer=writer)
saved = [p.clone() for p in model.parameters()]
step(model, optimizer, data)
gathered = [torch.zeros(3) for _ in range(2)]
torch.distributed.all_gather(gathered, torch.full((3,), float(rank)))
writer.wait()
load_run(loaded, root / "checkpoint_1", process=state)
assert all(torch.equal(a, b) for a, b in zip(saved, other.parameters()))

# A flipped byte in the newest: all ranks take the one before, and say why.
state.wait_for_everyone()
if rank == 0:
    path = root / "checkpoint_1" / "optimizer.safetensors"
    content = bytearray(path.read_bytes()); content[-5] ^= 1; path.write_bytes(content)
state.wait_for_everyone()
fails(CorruptCheckpoint, "optimizer.safetensors", load_run, loaded, root / "checkpoint_1", process=state)
report = load_newest(loaded, root, process=state)
assert report.folder == first and [path.name for path, _ in report.skipped] == ["checkpoint_1"]
assert "optimizer.safetensors" in report.skipped[0][1]
assert resume(loaded, root / "empty", process=state) is None

# Another model, on one rank only: nothing is loaded on either.
if rank == 0:
    wrong = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
else:
    wrong, _ = make(3)
kept = [p.clone() for p in wrong.parameters()]
wrong_run = bundle(wrong, torch.optim.AdamW(wrong.parameters()), dataloaders=[Place()])
fails(CheckpointMismatch, "0.weight (saved [8, 4], here [9, 4])", load_run, wrong_run, first, process=state)
assert all(torch.equal(a, b) for a, b in zip(kept, wrong.parameters()))

# Background error: told at the next call, on both ranks.
save_run(run, root / "checkpoint_2", process=state, writer=writer)
writer.wait()
import accelerate.checkpointing.saving as saving
original = saving._write
def full_disk(draft, io):
    if rank == 0:
        raise OSError(28, "No space left on device")
    return original(draft, io)
saving._write = full_disk
save_run(run, root / "checkpoint_3", process=state, writer=writer)
fails(CheckpointError, "No space left", save_run, run, root / "checkpoint_4", process=state, writer=writer)
saving._write = original
assert not (root / "checkpoint_3").exists()
print("both fine")
"""
)


def test_ranks_agree_or_nothing_is_saved(tmp_path):
    for result in run_ranks(TWO_RANKS, 2, tmp_path, timeout=120):
        assert "both fine" in result.stdout


SHARDED = (
    COMMON
    + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from accelerate.parallel.fsdp.fsdp2 import Fsdp2Model
from accelerate.precision.base import Precision

data = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
layout, names = sys.argv[2], sys.argv[3:]

def lay_out(model):
    '''One process, all sharded, or tensor parallel pairs whose halves are sharded again.'''
    mesh = init_device_mesh("cpu", (2, 2) if layout == "both" else (state.num_processes,),
                            mesh_dim_names=("dp", "tp") if layout == "both" else ("dp",))
    if layout == "both":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])

def build(seed, width=8):
    if layout == "one":
        model, optimizer = make(seed)
        return model, optimizer, bundle(model, optimizer)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))
    lay_out(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    prepared = Fsdp2Model(model, Precision(), torch.device("cpu"), saves_shards=True)
    models, optimizers = [prepared], [PreparedOptimizer(optimizer, prepared)]
    part = ShardedState(models, optimizers)
    return model, optimizer, RunState(models=models, optimizers=optimizers, sharded=part)

def stream():
    '''Rank 0 reads it for all.'''
    return prepare_data_loader(DataLoader(list(range(40)), 2), dispatch_batches=True, exact=True)

def real(loader, batch):
    return batch.tolist()[: loader.batch_counts[rank]]

def everyone(samples):
    parts = [None] * state.num_processes
    if state.num_processes == 1:
        return samples
    dist.all_gather_object(parts, samples)
    return [sample for part in parts for sample in part]

def full(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]

# The reference: plain PyTorch, three steps.
plain, plain_optimizer = make(0)
for _ in range(3):
    step(plain, plain_optimizer, data)
def as_plain(model):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(full(model), plain.parameters()))

model, optimizer, run = build(0)
step(model, optimizer, data); step(model, optimizer, data)
run.dataloaders = [stream()]
reading = iter(run.dataloaders[0])
next(reading), next(reading)
save_run(run, root / layout, process=state)
writer = Writer()
for number in range(2):  # the second one in the memory of the first
    save_run(run, root / f"{layout}-background", process=state, writer=writer)
step(model, optimizer, data)
writer.wait()
assert as_plain(model)
if layout != "one":
    listed = set(verify(root / layout).files)
    assert any(name.startswith("pytorch_model_fsdp_0/") for name in listed) and "optimizer_0/options.json" in listed
for name in [*names, layout, f"{layout}-background"]:
    verify(root / name)
    model, optimizer, run = build(5)
    run.dataloaders = [stream()]
    saved_by = load_run(run, root / name, process=state).world_size
    step(model, optimizer, data)
    assert as_plain(model), name
    left = everyone([sample for batch in run.dataloaders[0] for sample in real(run.dataloaders[0], batch)])
    assert sorted(left) == list(range(4 * saved_by, 40)), (name, left)

# In the API's own format, which tools that look inside read; the rate too, which is no tensor.
if layout == "dp":
    model, optimizer, run = build(0)
    step(model, optimizer, data); step(model, optimizer, data)
    optimizer.param_groups[0]["lr"] = 0.0625
    save_run(run, root / "compat", process=state, options=Options(layout="compat"), writer=writer)
    writer.wait()
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert (root / "compat" / folder / ".metadata").exists()
    optimizer.param_groups[0]["lr"] = 0.05
    verify(root / "compat")
if (root / "compat").exists():
    for file in (root / "compat" / "checkpoint_manifest.json", root / "compat" / "optimizer_0" / "options.json"):
        for _ in range(2):
            model, optimizer, run = build(5)
            load_run(run, root / "compat", process=state)
            assert optimizer.param_groups[0]["lr"] == 0.0625, file
            optimizer.param_groups[0]["lr"] = 0.05
            step(model, optimizer, data)
            assert as_plain(model), file
            # Then as another library leaves it: no manifest, no document of ours.
            state.wait_for_everyone()
            if rank == 0:
                file.unlink(missing_ok=True)
            state.wait_for_everyone()

# Another model: its differences are listed, and nothing is loaded, not even an optimizer's first state.
if layout == "dp":
    for name in names:
        model, optimizer, run = build(5, width=9)
        before = full(model)
        fails(CheckpointMismatch, "0.weight (saved [8, 4], here [9, 4])", load_run, run, root / name, process=state)
        assert all(map(torch.equal, full(model), before)) and not optimizer.state, name
        report = load_run(run, root / name, process=state, strict=False, models_only=True)
        assert "0.weight" in report.notes[0] and torch.equal(full(model)[3], full(build(5)[0])[3]) is False
    # A shard that was put there by somebody else.
    state.wait_for_everyone()
    if rank == 0:
        shard = next((root / "both" / "pytorch_model_fsdp_0").glob("*.safetensors"))
        (shard.parent / "shard-99999-model-00001-of-00001.safetensors").write_bytes(shard.read_bytes())
    state.wait_for_everyone()
    fails(CorruptCheckpoint, "shard-99999", load_run, build(5)[2], root / "both", process=state)
print("as plain")
"""
)


@pytest.mark.timeout(500)
def test_any_layout_loads_any_other_and_whole_states(tmp_path):
    for nproc, layout, names in (
        (4, "both", []),
        (1, "one", ["both", "both-background"]),
        (3, "dp", ["both", "one"]),
        (1, "one", ["dp", "dp-background"]),  # and of "compat", which is left without manifest
    ):
        for result in run_ranks(SHARDED, nproc, tmp_path, layout, *names, timeout=170):
            assert "as plain" in result.stdout

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks: agreed on, refused together, loaded by another number of processes."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from accelerate.checkpointing import (
    CheckpointMismatch,
    CorruptCheckpoint,
    Options,
    PreparedModel,
    PreparedOptimizer,
    RunState,
    ShardedState,
    Writer,
    load_newest,
    load_run,
    resume,
    save_run,
    saving,
    verify,
)
from accelerate.core.errors import CheckpointError
from accelerate.data_loader import prepare_data_loader
from accelerate.parallel.fsdp.strategy import Fsdp2Model
from accelerate.precision.base import Precision
from accelerate.runtime.agreement import Agreement
from accelerate.state import PartialState


class Place:
    """A loader as far as a checkpoint sees it."""

    def __init__(self, consumed=0):
        self.consumed = consumed

    def state_dict(self):
        return {"consumed": self.consumed}

    def load_state_dict(self, saved):
        self.consumed = saved["consumed"]


def make(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer


def inputs():
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(7))


def bundle(model, optimizer, **more):
    return RunState(
        models=[PreparedModel(model)], optimizers=[PreparedOptimizer(optimizer)], **more
    )


def step(model, optimizer):
    model(inputs()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal(model, other):
    return all(map(torch.equal, model.parameters(), other.parameters()))


def trained(**more):
    """A model after one step, its optimizer, and both as a run at its first step."""
    model, optimizer = make()
    step(model, optimizer)
    return (
        model,
        optimizer,
        bundle(model, optimizer, dataloaders=[Place(32)], progress={"step": 1}, **more),
    )


def only(root, *names):
    """The folder has these entries, seen by all ranks at the same time."""
    state = PartialState()
    state.wait_for_everyone()
    found = sorted(path.name for path in root.iterdir())
    state.wait_for_everyone()
    return found == sorted(names)


@on_ranks(2)
def test_each_rank_gets_its_own_state_back(tmp_path):
    state = PartialState(cpu=True)
    rank = state.process_index
    model, optimizer, run = trained(rank_state=Place(rank))
    random.seed(100 + rank), torch.manual_seed(200 + rank)
    # One folder, each rank its own random states.
    save_run(run, tmp_path / "checkpoint_0", process=state)
    expected = (random.random(), torch.rand(()).item())
    manifest = verify(tmp_path / "checkpoint_0")
    assert manifest.world_size == 2 and {"random_states_0.json", "random_states_1.json"} <= set(
        manifest.files
    )

    other, other_optimizer = make(1)
    place, own = Place(), Place(-1)
    loaded = bundle(other, other_optimizer, dataloaders=[place], rank_state=own)
    report = load_run(loaded, tmp_path / "checkpoint_0", process=state)
    assert (
        report.progress == {"step": 1}
        and report.notes == []
        and place.consumed == 32
        and own.consumed == rank
    )
    assert (random.random(), torch.rand(()).item()) == expected
    for _ in range(3):
        step(model, optimizer)
        step(other, other_optimizer)
    assert equal(model, other)


@on_ranks(2)
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path):
    state = PartialState(cpu=True)
    rank = state.process_index

    class Broken(Place):
        def state_dict(self):
            if rank == 1:
                raise OSError(28, "No space left on device")
            return super().state_dict()

    model, optimizer, run = trained()
    first = tmp_path / "checkpoint_0"
    save_run(run, first, process=state)
    before = verify(first)
    with pytest.raises(CheckpointError, match=r"rank 1: OSError: \[Errno 28\]"):
        save_run(bundle(model, optimizer, dataloaders=[Broken()]), first, process=state)
    assert verify(first) == before and only(tmp_path, "checkpoint_0")
    with pytest.raises(CheckpointError, match="a different folder"):
        save_run(run, tmp_path / f"mine_{rank}", process=state)
    assert only(tmp_path, "checkpoint_0")


@on_ranks(2)
@pytest.mark.parametrize("late", [1, 0])
def test_a_rank_that_does_not_call_is_named(late, tmp_path):
    """In time on the rank that did, and on itself when it calls late; after that, saving works."""
    state = PartialState(cpu=True)
    _, _, run = trained()
    run.models[0].is_partial = True  # rank 0 does not have all of it
    waits = state.process_index != late
    if not waits:
        state.wait_for_everyone()
    options = Options(timeout=1.0) if waits else Options()
    with pytest.raises(CheckpointError, match=f"rank {late} did not reach"):
        save_run(run, tmp_path / "lonely", process=state, options=options)
    if waits:
        state.wait_for_everyone()
    assert only(tmp_path)
    save_run(run, tmp_path / "checkpoint_0", process=state)
    verify(tmp_path / "checkpoint_0")


@on_ranks(2)
def test_a_save_takes_two_exchanges(tmp_path, monkeypatch):
    """With states that differ between ranks, in the foreground and in the background; three with a hook."""
    state = PartialState(cpu=True)
    subjects = []
    exchange = Agreement.exchange

    def counted(self, subject, *args, **kwargs):
        subjects.append(subject)
        return exchange(self, subject, *args, **kwargs)

    monkeypatch.setattr(Agreement, "exchange", counted)
    writer = Writer()
    for number, (expected, hooks) in enumerate(
        [(2, []), (2, []), (3, [lambda models, weights, folder: None])]
    ):
        _, _, run = trained(custom=[Place(state.process_index)], save_hooks=hooks)
        subjects.clear()
        save_run(
            run,
            tmp_path / f"checkpoint_{number}",
            process=state,
            writer=writer if number == 1 else None,
        )
        writer.wait()
        assert len(subjects) == expected, subjects
        assert "session_rank_1.json" in verify(tmp_path / f"checkpoint_{number}").files


@on_ranks(2)
def test_saving_in_the_background(tmp_path):
    state = PartialState(cpu=True)
    rank, writer = state.process_index, Writer()
    model, optimizer, run = trained()
    # Training goes on meanwhile.
    save_run(run, tmp_path / "checkpoint_1", process=state, writer=writer)
    saved = [p.clone() for p in model.parameters()]
    step(model, optimizer)
    dist.all_gather([torch.zeros(3) for _ in range(2)], torch.full((3,), float(rank)))
    writer.wait()
    other, other_optimizer = make(1)
    load_run(
        bundle(other, other_optimizer, dataloaders=[Place()]),
        tmp_path / "checkpoint_1",
        process=state,
    )
    assert all(map(torch.equal, saved, other.parameters()))

    # An error of one rank is raised at the next call, on both.
    with full_disk_on(rank == 0):
        save_run(run, tmp_path / "checkpoint_2", process=state, writer=writer)
        with pytest.raises(CheckpointError, match="No space left"):
            save_run(run, tmp_path / "checkpoint_3", process=state, writer=writer)
    assert only(tmp_path, "checkpoint_1")


@contextmanager
def full_disk_on(this_rank):
    """No file of a checkpoint can be written by this rank."""

    def no_space(pending):
        raise OSError(28, "No space left on device")

    original = saving._write
    if this_rank:
        saving._write = no_space
    yield
    saving._write = original


@on_ranks(2)
def test_damage_and_other_models_are_refused_on_all_ranks(tmp_path):
    state = PartialState(cpu=True)
    rank = state.process_index
    _, _, run = trained()
    first, newest = tmp_path / "checkpoint_0", tmp_path / "checkpoint_1"
    for folder in (first, newest):
        save_run(run, folder, process=state)
    # A flipped byte in the newest: all ranks take the one before, and report why.
    if rank == 0:
        path = newest / "optimizer.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    state.wait_for_everyone()
    with pytest.raises(CorruptCheckpoint, match=r"optimizer\.safetensors"):
        load_run(run, newest, process=state)
    report = load_newest(run, tmp_path, process=state)
    assert report.folder == first and [path.name for path, _ in report.skipped] == ["checkpoint_1"]
    assert "optimizer.safetensors" in report.skipped[0][1]
    assert resume(run, tmp_path / "empty", process=state) is None

    # Another model, on one rank only: nothing is loaded on either.
    wrong, _ = make(3)
    if rank == 0:
        wrong = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    kept = [p.clone() for p in wrong.parameters()]
    other = bundle(wrong, torch.optim.AdamW(wrong.parameters()), dataloaders=[Place()])
    with pytest.raises(CheckpointMismatch, match=r"0\.weight \(saved \[8, 4\], here \[9, 4\]\)"):
        load_run(other, first, process=state)
    assert all(map(torch.equal, kept, wrong.parameters()))


def lay_out(model, layout):
    """All sharded, or tensor parallel pairs whose halves are sharded again."""
    world = PartialState().num_processes
    mesh = init_device_mesh(
        "cpu",
        (2, 2) if layout == "both" else (world,),
        mesh_dim_names=("dp", "tp") if layout == "both" else ("dp",),
    )
    if layout == "both":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])


def build(layout, seed, width=8):
    if layout == "one":
        model, optimizer = make(seed)
        return model, optimizer, bundle(model, optimizer)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)
    )
    lay_out(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    prepared = Fsdp2Model(model, Precision(), torch.device("cpu"), saves_shards=True)
    models, optimizers = [prepared], [prepared.prepared_optimizer(optimizer)]
    return (
        model,
        optimizer,
        RunState(models=models, optimizers=optimizers, sharded=ShardedState(models, optimizers)),
    )


def stream():
    """Rank 0 reads it for all."""
    return prepare_data_loader(DataLoader(list(range(40)), 2), dispatch_batches=True, exact=True)


def samples_left(loader):
    """What all ranks read from here on, without padding."""
    state = PartialState()
    mine = [
        sample
        for batch in loader
        for sample in batch.tolist()[: loader.batch_counts[state.process_index]]
    ]
    if state.num_processes == 1:
        return mine
    parts = [None] * state.num_processes
    dist.all_gather_object(parts, mine)
    return [sample for part in parts for sample in part]


def full(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def is_plain(model):
    """Whether the model is what plain PyTorch makes of it in three steps."""
    plain, optimizer = make(0)
    for _ in range(3):
        step(plain, optimizer)
    return all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(full(model), plain.parameters(), strict=True)
    )


def save_and_load(root, layout, names):
    """Save in this layout, in the foreground and in the background; load that and the checkpoints `names`."""
    state = PartialState(cpu=True)
    model, optimizer, run = build(layout, 0)
    step(model, optimizer), step(model, optimizer)
    run.dataloaders = [stream()]
    reading = iter(run.dataloaders[0])
    next(reading), next(reading)
    save_run(run, root / layout, process=state)
    writer = Writer()
    for _ in range(2):  # the second one in the memory of the first
        save_run(run, root / f"{layout}-background", process=state, writer=writer)
    step(model, optimizer)
    writer.wait()
    assert is_plain(model)
    if layout != "one":
        listed = set(verify(root / layout).files)
        assert any(name.startswith("pytorch_model_fsdp_0/") for name in listed)
        assert "optimizer_0/options.json" in listed
    for name in [*names, layout, f"{layout}-background"]:
        verify(root / name)
        model, optimizer, run = build(layout, 5)
        run.dataloaders = [stream()]
        saved_by = load_run(run, root / name, process=state).world_size
        step(model, optimizer)
        assert is_plain(model), name
        left = samples_left(run.dataloaders[0])
        assert sorted(left) == list(range(4 * saved_by, 40)), (name, left)


def save_compatible(root):
    """In the API's own format, which tools that look inside read; the rate too, which is no tensor."""
    state = PartialState()
    model, optimizer, run = build("dp", 0)
    step(model, optimizer), step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0625
    writer = Writer()
    save_run(run, root / "compat", process=state, options=Options(layout="compat"), writer=writer)
    writer.wait()
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert (root / "compat" / folder / ".metadata").exists()
    verify(root / "compat")


def load_compatible(root, layout):
    """Complete, then as another library leaves it: no manifest, no document of ours."""
    state = PartialState(cpu=True)
    for file in (
        root / "compat" / "checkpoint_manifest.json",
        root / "compat" / "optimizer_0" / "options.json",
    ):
        for _ in range(2):
            model, optimizer, run = build(layout, 5)
            load_run(run, root / "compat", process=state)
            assert optimizer.param_groups[0]["lr"] == 0.0625, file
            optimizer.param_groups[0]["lr"] = 0.05
            step(model, optimizer)
            assert is_plain(model), file
            state.wait_for_everyone()
            if state.is_main_process:
                file.unlink(missing_ok=True)
            state.wait_for_everyone()


def refuse_others(root, names):
    """Another model: its differences are listed, and nothing is loaded, not even an optimizer's first state."""
    state = PartialState()
    for name in names:
        model, optimizer, run = build("dp", 5, width=9)
        before = full(model)
        with pytest.raises(
            CheckpointMismatch, match=r"0\.weight \(saved \[8, 4\], here \[9, 4\]\)"
        ):
            load_run(run, root / name, process=state)
        assert all(map(torch.equal, full(model), before)) and not optimizer.state, name
        report = load_run(run, root / name, process=state, strict=False, models_only=True)
        assert "0.weight" in report.notes[0] and not torch.equal(
            full(model)[3], full(build("dp", 5)[0])[3]
        )
    # A shard that somebody else has put there.
    state.wait_for_everyone()
    if state.is_main_process:
        shard = next((root / "both" / "pytorch_model_fsdp_0").glob("*.safetensors"))
        (shard.parent / "shard-99999-model-00001-of-00001.safetensors").write_bytes(
            shard.read_bytes()
        )
    state.wait_for_everyone()
    with pytest.raises(CorruptCheckpoint, match="shard-99999"):
        load_run(build("dp", 5)[2], root / "both", process=state)


def sharded_run(root, names):
    save_and_load(root, "dp", names)
    save_compatible(root)
    load_compatible(root, "dp")
    refuse_others(root, names)


def single_run(root):
    save_and_load(root, "one", ["dp", "dp-background"])
    load_compatible(root, "one")


def test_any_layout_loads_any_other_and_whole_states(ranks, tmp_path):
    ranks(4).run(save_and_load, tmp_path, "both", [])
    ranks(1).run(save_and_load, tmp_path, "one", ["both", "both-background"])
    ranks(3).run(sharded_run, tmp_path, ["both", "one"])
    ranks(1).run(single_run, tmp_path)

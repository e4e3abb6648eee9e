# SPDX-License-Identifier: Apache-2.0
"""Several ranks under faults: killed in the middle of saves, machines without a shared folder, signals, shards."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
import types
import warnings
from unittest import mock

import pytest
import torch
from rank_pool import on_ranks, rank_environment
from ranks import Script
from safetensors.torch import load_file
from torch.distributed import TCPStore
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelerate.checkpointing import (
    Options,
    PreemptionWatch,
    PreparedModel,
    RunState,
    load_fsdp_model,
    load_fsdp_optimizer,
    load_newest,
    load_run,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
    save_run,
    saving,
    verify,
)
from accelerate.core.errors import CheckpointError
from accelerate.state import PartialState
from accelerate.utils import fsdp_utils, gather_object

KILLED = """
import sys, torch
from pathlib import Path
from accelerate.checkpointing import PreparedModel, Options, RunState, Writer, load_newest, resume, save_run
from accelerate.state import PartialState

state = PartialState(cpu=True)
root, model = Path(sys.argv[1]), torch.nn.Linear(700, 700)
part = PreparedModel(model)
report = resume(RunState(models=[part]), root, process=state)
number = -1 if report is None else report.progress["number"]
assert report is None or torch.equal(model.weight, torch.full((700, 700), float(number)))
print("from", number, flush=True)
writer = Writer()
while True:
    number += 1
    with torch.no_grad():
        model.weight.fill_(number)
    run = RunState(models=[part], progress={"number": number})
    save_run(run, root / f"checkpoint_{number}", process=state, writer=writer if number % 2 else None,
             options=Options(checkpoints=root, total_limit=2))
    print("saved", number, flush=True)
"""


def start(script, root):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = Script(script, root, env=rank_environment(0, 2, store, None), stdout=subprocess.PIPE)
    return store, [first, Script(script, root, env=rank_environment(1, 2, store, None))]


def test_ranks_killed_in_the_middle_lose_nothing(tmp_path):
    """SIGKILL of one rank or of both while they save all the time; the next start goes on from what was saved."""
    script, root = tmp_path / "script.py", tmp_path / "root"
    script.write_text(textwrap.dedent(KILLED))
    chance = random.Random(11)
    last = -1
    for victims in ([0, 1], [1, 0]):
        store, processes = start(script, root)
        assert int(processes[0].stdout.readline().split()[1]) >= last - 1
        for _ in range(chance.randint(3, 6)):
            last = int(processes[0].stdout.readline().split()[1])
        time.sleep(chance.random() * 0.03)
        for victim in victims:
            processes[victim].send_signal(signal.SIGKILL)
            processes[victim].wait()
        del store
        model = torch.nn.Linear(700, 700)
        report = load_newest(
            RunState(models=[PreparedModel(model)]), root, process=PartialState(cpu=True)
        )
        # A background save counts when the next call has come back.
        assert report.progress["number"] >= last - 1 and report.skipped == []
        assert torch.equal(model.weight, torch.full((700, 700), float(report.progress["number"])))
        assert report.world_size == 2
        for entry in root.iterdir():
            assert entry.name.startswith(".") or verify(entry)


# Each rank is a machine of its own, and sees its own disk only.
MACHINES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(30, 4)


@on_ranks(2, env=MACHINES)
def test_machines_with_their_own_disks(tmp_path):
    state = PartialState(cpu=True)
    rank = state.process_index
    mine = tmp_path / f"machine_{rank}"
    mine.mkdir()
    os.chdir(mine)
    model = linear(3)
    run = RunState(models=[PreparedModel(model)], progress={"step": 1})
    saving._VISIBLE = 0.5
    with pytest.raises(CheckpointError, match="save_on_each_node=True") as caught:
        save_run(run, "out/checkpoint_0", process=state)
    assert "rank 1" in str(caught.value)
    assert list(mine.rglob("*")) in ([mine / "out"], [])
    save_run(run, "out/checkpoint_0", process=state, options=Options(save_on_each_node=True))
    names = set(verify("out/checkpoint_0").files)
    assert f"random_states_{rank}.json" in names and f"random_states_{1 - rank}.json" not in names
    assert "model.safetensors" in names
    drawn = torch.rand(3)
    other = linear(4)
    report = load_run(RunState(models=[PreparedModel(other)]), "out/checkpoint_0", process=state)
    assert (
        torch.equal(other.weight, model.weight)
        and torch.equal(torch.rand(3), drawn)
        and report.notes == []
    )
    # On a shared disk the same option writes one checkpoint.
    save_run(run, tmp_path / "shared", process=state, options=Options(save_on_each_node=True))
    assert {"random_states_0.json", "random_states_1.json"} <= set(
        verify(tmp_path / "shared").files
    )


@on_ranks(2)
def test_a_signal_to_one_rank_is_reported_on_both_at_the_same_call():
    state = PartialState(cpu=True)
    watch = PreemptionWatch(state, ["SIGUSR1"], interval=4)
    answers = []
    for step in range(12):
        if state.process_index == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        answers.append(watch.requested())
    first = answers.index(True)
    # The interval is at most 4; the first exchange is at the first call.
    assert 5 <= first <= 9 and all(answers[first:]) and watch.received == "SIGUSR1", answers
    assert gather_object([first]) == [first] * 2
    watch.close()


class Plugin:
    def __init__(self, state_dict_type):
        self.state_dict_type = state_dict_type


class Trap:
    """Unpickled, it would make a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def sharded(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adapter_weights(model, state_dict, adapter_name):
    """As peft's function, which leaves the name of the adapter out."""
    return {"weight": state_dict[f"{adapter_name}.weight"]}


@on_ranks(2)
@pytest.mark.parametrize("full", [False, True])
def test_the_state_dict_of_a_sharded_model_and_of_its_adapter(full):
    get, put = fsdp_utils._get_model_state_dict, fsdp_utils._set_model_state_dict
    model, other = sharded(0)[0], sharded(1)[0]
    model.peft_config = other.peft_config = {}
    model.active_adapter = other.active_adapter = "0"

    def differing():
        pairs = zip(model.named_parameters(), other.parameters(), strict=True)
        return [name for (name, a), b in pairs if not torch.equal(a.full_tensor(), b.full_tensor())]

    with mock.patch.dict(
        sys.modules, peft=types.SimpleNamespace(get_peft_model_state_dict=adapter_weights)
    ):
        weights = get(model, True, StateDictOptions(full_state_dict=full))
        assert list(weights) == ["weight"] and isinstance(weights["weight"], DTensor) != full
        put(other, weights, True, StateDictOptions(full_state_dict=full, strict=False))
    assert differing() == ["0.bias", "1.weight", "1.bias"]
    put(other, get(model))
    assert not differing()


@on_ranks(2)
def test_the_functions_of_the_api_for_sharded_models(tmp_path):
    state, seen = PartialState(cpu=True), []
    waits = types.SimpleNamespace(
        wait_for_everyone=lambda: seen.append(folder.exists()) or state.wait_for_everyone()
    )
    model, optimizer = sharded(0)
    train(model, optimizer)
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        plugin, folder = Plugin(kind), tmp_path / kind
        save_fsdp_model(plugin, waits, model, folder)
        save_fsdp_optimizer(plugin, state, optimizer, model, folder)
        other, other_optimizer = sharded(1)
        load_fsdp_model(plugin, state, other, folder)
        with warnings.catch_warnings(action="error"):
            load_fsdp_optimizer(plugin, state, other_optimizer, other, folder)
        reference, reference_optimizer = sharded(0)
        train(reference, reference_optimizer, steps=2)
        train(other, other_optimizer)
        for a, b in zip(reference.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b.full_tensor())
    assert seen == [False, True] * 2  # Trainer's ranks look for the folder before they save
    index = folder / "pytorch_model_fsdp_0" / ".metadata"
    assert (folder / "optimizer_0").is_dir() and (
        tmp_path / "FULL_STATE_DICT" / "pytorch_model_fsdp.bin"
    ).exists()
    merge_fsdp_weights(index.parent, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(merged[name], parameter.full_tensor()), name

    # An index of shards that would run something is refused.
    state.wait_for_everyone()
    if state.is_main_process:
        index.write_bytes(pickle.dumps(Trap(str(tmp_path / "owned"))))
    with pytest.raises(CheckpointError, match="mkdir"):
        load_fsdp_model(plugin, state, model, folder)
    assert not (tmp_path / "owned").exists()

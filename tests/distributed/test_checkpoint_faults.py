# SPDX-License-Identifier: Apache-2.0
"""Several ranks under faults: killed in the middle of saves, machines without a shared folder, signals, shards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import torch
from ranks import run_ranks
from torch.distributed import TCPStore

from accelerate.checkpointing import PreparedModel, RunState, load_newest, verify
from accelerate.state import PartialState

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
    processes = []
    for rank in range(2):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, str(script), str(root)]
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.DEVNULL, text=True))
    return store, processes


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
        report = load_newest(RunState(models=[PreparedModel(model)]), root, process=PartialState(cpu=True))
        # A background save counts when the next call has come back.
        assert report.progress["number"] >= last - 1 and report.skipped == []
        assert torch.equal(model.weight, torch.full((700, 700), float(report.progress["number"])))
        assert report.world_size == 2
        for entry in root.iterdir():
            assert entry.name.startswith(".") or verify(entry)


NODES = """
import os, signal, sys
from pathlib import Path
os.environ["LOCAL_RANK"] = "0"
os.environ["LOCAL_WORLD_SIZE"] = "1"
root = Path(sys.argv[1])
rank = int(os.environ["RANK"])
mine = root / f"machine_{rank}"
mine.mkdir()
os.chdir(mine)

import torch
from accelerate.checkpointing import (
    ShardedState, Options, PreemptionWatch, PreparedModel, PreparedOptimizer, RunState, load_fsdp_model,
    load_fsdp_optimizer, load_run, merge_fsdp_weights, save_fsdp_model, save_fsdp_optimizer, save_run, opening, verify,
)
from accelerate.core.errors import CheckpointError
from accelerate.state import PartialState

state = PartialState(cpu=True)
torch.manual_seed(3)
model = torch.nn.Linear(30, 4)
run = RunState(models=[PreparedModel(model)], progress={"step": 1})

# Each machine sees its own disk only.
opening._VISIBLE = 0.5
try:
    save_run(run, "out/checkpoint_0", process=state)
    raise AssertionError("no error")
except CheckpointError as error:
    assert "rank 1" in str(error) and "save_on_each_node=True" in str(error), error
assert list(mine.rglob("*")) == [mine / "out"] or not list(mine.rglob("*"))
save_run(run, "out/checkpoint_0", process=state, options=Options(save_on_each_node=True))
names = set(verify("out/checkpoint_0").files)
assert f"random_states_{rank}.json" in names and f"random_states_{1 - rank}.json" not in names
assert "model.safetensors" in names
drawn = torch.rand(3)
other = torch.nn.Linear(30, 4)
report = load_run(RunState(models=[PreparedModel(other)]), "out/checkpoint_0", process=state)
assert torch.equal(other.weight, model.weight) and torch.equal(torch.rand(3), drawn) and report.notes == []
# On a shared disk the same option writes one checkpoint.
save_run(run, root / "shared", process=state, options=Options(save_on_each_node=True))
assert {"random_states_0.json", "random_states_1.json"} <= set(verify(root / "shared").files)

# A signal to one rank is an answer on both, at the same call.
watch = PreemptionWatch(state, ["SIGUSR1"], interval=4)
answers = []
for step in range(12):
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGUSR1)
    answers.append(watch.requested())
assert answers == [False] * 7 + [True] * 5, answers
watch.close()

# The API's own functions for sharded models.
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Plugin:
    state_dict_type = "SHARDED_STATE_DICT"

def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def step(model, optimizer):
    model(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()

model, optimizer = build(0)
step(model, optimizer)
for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
    Plugin.state_dict_type = kind
    folder = root / kind
    save_fsdp_model(Plugin, state, model, folder)
    save_fsdp_optimizer(Plugin, state, optimizer, model, folder)
    other, other_optimizer = build(1)
    load_fsdp_model(Plugin, state, other, folder)
    load_fsdp_optimizer(Plugin, state, other_optimizer, other, folder)
    reference, reference_optimizer = build(0)
    step(reference, reference_optimizer); step(reference, reference_optimizer)
    step(other, other_optimizer)
    for a, b in zip(reference.parameters(), other.parameters()):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor())
assert (root / "SHARDED_STATE_DICT/pytorch_model_fsdp_0/.metadata").exists()
assert (root / "SHARDED_STATE_DICT/optimizer_0").is_dir()
assert (root / "FULL_STATE_DICT/pytorch_model_fsdp.bin").exists()
merge_fsdp_weights(root / "SHARDED_STATE_DICT/pytorch_model_fsdp_0", root / "merged")
from safetensors.torch import load_file
merged = load_file(root / "merged/model.safetensors")
for name, parameter in model.named_parameters():
    assert torch.equal(merged[name], parameter.full_tensor()), name

# An index of shards that would run something is refused.
state.wait_for_everyone()
import pickle
class Trap:
    def __reduce__(self): return os.mkdir, (str(root / "owned"),)
if rank == 0:
    (root / "SHARDED_STATE_DICT/pytorch_model_fsdp_0/.metadata").write_bytes(pickle.dumps(Trap()))
state.wait_for_everyone()
Plugin.state_dict_type = "SHARDED_STATE_DICT"
try:
    load_fsdp_model(Plugin, state, model, root / "SHARDED_STATE_DICT")
    raise AssertionError("no error")
except CheckpointError as error:
    assert "mkdir" in str(error), error
assert not (root / "owned").exists()
print("all of it")
"""


def test_machines_of_their_own_signals_and_the_api_s_shards(tmp_path):
    for result in run_ranks(NODES, 2, tmp_path, timeout=150):
        assert "all of it" in result.stdout

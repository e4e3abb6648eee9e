# SPDX-License-Identifier: Apache-2.0
"""Asked to stop, a run saves on all ranks, exits with a code, and goes on to the parameters it would have had."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from rank_pool import on_ranks
from ranks import run_ranks, run_script

from accelerate import Accelerator
from accelerate.checkpointing.layout import read_manifest
from accelerate.utils import ProjectConfiguration

WORKER = Path(__file__).parents[1] / "distributed" / "workers" / "preempted.py"


def parameters(folder):
    return torch.load(folder / "end.pt", weights_only=True)


@pytest.mark.parametrize(("world", "exit_code"), [(1, 0), (2, None)])
def test_stopped_and_gone_on(world, exit_code, ranks, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    ranks(world).run(run_script, WORKER, whole, 0)
    stopped = run_ranks(
        WORKER, world, cut, 13, *([] if exit_code is None else [exit_code]), check=False
    )
    # Only the last rank has received the signal.
    assert [rank.returncode for rank in stopped] == [
        143 if exit_code is None else exit_code
    ] * world, stopped
    assert not (cut / "end.pt").exists()
    assert "saved" in stopped[0].stderr
    ranks(world).run(run_script, WORKER, cut, 0)
    expected = parameters(whole)
    for name, value in parameters(cut).items():
        assert torch.equal(value, expected[name]), name


# Of a save of more than 1.8 seconds: all, all but the average of the weights, or nothing fits.
@on_ranks(1)
@pytest.mark.parametrize(("seconds", "saved"), [("9", "whole"), ("2", "brief"), ("1", None)])
def test_what_is_saved_depends_on_the_time(seconds, saved, tmp_path):
    os.environ["ACCELERATE_STOP_WITHIN"] = seconds
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accelerate").addHandler(handler)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 64), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = accelerator.track_average(model)
    state_dict = average.state_dict

    def slow_state_dict():
        time.sleep(1.8)
        return state_dict()

    average.state_dict = slow_state_dict
    accelerator.resume()
    with pytest.raises(SystemExit) as stopped:
        for step, batch in enumerate(loader):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                begin = time.monotonic()
                accelerator.save_state()
                taken = time.monotonic() - begin
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                if saved == "brief":
                    # Less than the save takes, and more than half of it.
                    time.sleep(2 - 0.3 - 0.75 * taken)
    assert stopped.value.code == 143
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    [text] = [text for text in records if "stop requested by SIGTERM" in text]
    if saved is None:
        assert names == ["checkpoint_0"]
        assert "checkpoint_0" in text and "3 steps old" in text
        return
    assert names == ["checkpoint_0", "checkpoint_1"]
    assert read_manifest(tmp_path / "checkpoints" / "checkpoint_1").progress["step"] == 5
    size = (tmp_path / "checkpoints" / "checkpoint_1" / "session.safetensors").exists()
    assert size == (saved == "whole")


STUCK = """
import os, signal, sys, time, torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        accelerator.save_state()
    if step == 4:
        if accelerator.is_main_process:
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        accelerator.wait_for_everyone()
"""


def test_ranks_that_do_not_meet_end_at_the_deadline(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    ended = run_ranks(script, 2, tmp_path, env={"ACCELERATE_STOP_WITHIN": "2"}, check=False)
    seconds = time.time() - float(ended[0].stdout)
    assert [rank.returncode for rank in ended] == [143, 143], ended
    assert seconds < 6
    assert "3 steps old" in ended[0].stderr and "checkpoint_0" in ended[0].stderr


# A run whose forward takes long at the seventh batch, as a compilation does: on all ranks ("both"), or on the last
# one, for which the others wait in a collective ("one").
COMPILING = """
import os, signal, sys, time, torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed

folder, seconds, layout, how = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4]

class Data(torch.utils.data.Dataset):
    # Each read draws: from where the generator was before the batch.
    def __len__(self):
        return 28

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.randn(4)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x):
        if how != "dynamo" and step == 6:
            wait()
        return self.linear(torch.nn.functional.dropout(self.first(x), 0.1))

def wait():
    if seconds and accelerator.is_last_process:
        os.kill(os.getpid(), signal.SIGTERM)
        print(time.time(), flush=True)
    if how != "one" or accelerator.is_last_process:
        for _ in range(int(100 * seconds)):
            time.sleep(0.01)

def backend(graph, inputs):
    if step == 6:
        wait()
    return graph.forward

set_seed(0)
plugin = config = None
if layout in ("shards", "full"):
    kind = {"shards": "SHARDED_STATE_DICT", "full": "FULL_STATE_DICT"}[layout]
    units = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, **units)
if layout == "tp":
    config = ParallelismConfig(tp_size=2)
project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project, fsdp_plugin=plugin, parallelism_config=config)
model = Model()
if layout == "tp":
    model._tp_plan = {"first": "colwise", "linear": "rowwise"}
if how == "dynamo":
    model = torch.compile(model, backend=backend, dynamic=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = accelerator.resume()
step = start.step if start else 0
for epoch in range(start.epoch if start else 0, 2):
    for x in loader:
        # A program of another size is compiled.
        accelerator.backward(model(x[:1] if step == 6 else x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(state, f"{folder}/end.pt")
"""

LONG = pytest.mark.thorough


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("replicas", "both"),
        ("shards", "one"),
        pytest.param("replicas", "one", marks=LONG),
        pytest.param("replicas", "dynamo", marks=LONG),
        pytest.param("shards", "both", marks=LONG),
        pytest.param("full", "both", marks=LONG),
        pytest.param("tp", "both", marks=LONG),
        pytest.param("tp", "one", marks=LONG),
    ],
)
def test_a_save_from_within_a_compilation(layout, how, tmp_path):
    script = tmp_path / "compiling.py"
    script.write_text(COMPILING)
    limit = {"ACCELERATE_STOP_WITHIN": "4"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    run_ranks(script, 2, whole, 0, layout, how, env=limit)
    ended = run_ranks(script, 2, cut, 60, layout, how, env=limit, check=False)
    seconds = time.time() - float(ended[1].stdout)
    assert [rank.returncode for rank in ended] == [143, 143], ended
    assert seconds < 8
    [checkpoint] = (cut / "checkpoints").iterdir()
    assert read_manifest(checkpoint).progress["step"] == 6, ended
    run_ranks(script, 2, cut, 0, layout, how, env=limit)
    expected = parameters(whole)
    for name, value in parameters(cut).items():
        assert torch.equal(value, expected[name]), name

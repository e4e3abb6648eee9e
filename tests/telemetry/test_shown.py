# SPDX-License-Identifier: Apache-2.0
"""What is printed and shown: checkpoints in one line, short representations, a report once, and profiles of steps."""

from __future__ import annotations

import json

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError
from accelerate.telemetry.display import tqdm
from accelerate.telemetry.profile import StepProfile
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration


def make_run(**arguments):
    accelerator = Accelerator(cpu=True, **arguments)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(12, 4)), 4)
    return accelerator, *accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )


def save_and_resume(folder):
    """In a process without pytest's handlers of logging."""
    import logging

    logging.getLogger().handlers.clear()
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator, model, _, _ = make_run(project_config=project)
    accelerator.save_state()
    accelerator.save_model(model, f"{folder}/weights")
    shown = repr(accelerator.resume(signals=()))
    return repr(accelerator), shown


def test_checkpoints_are_told_in_one_line(ranks, tmp_path):
    for quiet in (False, True):
        case = ranks(2)
        env = {"ACCELERATE_QUIET": "true"} if quiet else {}
        folder = str(tmp_path / str(quiet))
        (accelerator, report), _ = case.run(save_and_resume, folder, env=env)
        saved = f"{folder}/checkpoints/checkpoint_0"
        expected = [
            f"accelerate: saved {saved}: epoch 0, step 0",
            f"accelerate: saved the weights of Linear in {folder}/weights",
            f"accelerate: resumed {saved}: epoch 0, step 0",
        ]
        lines = [
            [line for line in out.stderr.splitlines() if "accelerate:" in line]
            for out in case.outputs
        ]
        assert lines == [[] if quiet else expected, []]
        assert (
            accelerator
            == "<Accelerator: rank 0 of 2, DistributedDataParallel, cpu, 1 model, 1 optimizer, 1 loader>"
        )
        assert report == f"<LoadReport of {saved}: epoch 0, step 0, saved by 2 processes>"


def show_at_the_end(folder, sharded):
    import logging

    logging.getLogger().handlers.clear()
    plugin = {
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    }
    accelerator, model, optimizer, loader = make_run(**plugin if sharded else {})
    stepped = []
    for (inputs,) in loader:
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
        stepped.append("before the first step" in str(accelerator.explain()))
    accelerator.save_model(model, folder)
    accelerator.end_training()
    return stepped, str(accelerator.explain()), repr(accelerator)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_shown_after_end_training(ranks, sharded, tmp_path):
    case = ranks(2)
    for rank, (stepped, report, accelerator) in enumerate(
        case.run(show_at_the_end, str(tmp_path), sharded)
    ):
        # The state of SGD stays empty.
        assert stepped == [False, False]
        assert "model: Linear\n" in report and report.count("the process group has ended") == 2
        assert accelerator.startswith(f"<Accelerator: rank {rank} of 2, ")
    saved = f"accelerate: saved the weights of Linear in {tmp_path}\n"
    assert [saved in out.stderr for out in case.outputs] == [True, False]


def test_a_bar_counts_samples_of_all_processes():
    pytest.importorskip("tqdm")
    _, _, _, loader = make_run()
    bar = tqdm(loader)
    assert (bar.unit, bar.unit_scale) == (" samples", 4) and len(list(bar)) == 3
    assert tqdm(loader, unit="batch").unit == "batch" and tqdm([1]).unit == "it"


def test_chosen_steps_are_profiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_PROFILE", "2:3:0")
    accelerator, model, optimizer, loader = make_run(telemetry=tmp_path)
    for _ in range(2):
        for (x,) in loader:
            with torch.profiler.record_function(f"step {optimizer.steps_made + 1}"):
                accelerator.backward(model(x).sum())
            optimizer.step()
    accelerator.end_training()
    path = tmp_path / "profile" / "rank_00000.json"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {name for name in names if name and name.startswith("step ")} == {"step 2", "step 3"}
    lines = (tmp_path / "telemetry" / "rank_00000.events.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines if '"profile"' in line] == [str(path)]
    assert "steps 2 to 3 of rank 0" in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_PROFILE", "2:3:1")
    assert not any(
        isinstance(observer, StepProfile) for observer in Accelerator(cpu=True)._loop.active
    )
    monkeypatch.setenv("ACCELERATE_PROFILE", "3:2")
    with pytest.raises(ConfigurationError, match="first and last step"):
        Accelerator(cpu=True)


@pytest.mark.parametrize(
    ("asked", "message", "steps"),
    [
        ("5:90", "the profile of steps 5 to 6 of rank 0 is in ", {"step 5", "step 6"}),
        ("6:6", "the profile of steps 6 to 6 of rank 0 is in ", {"step 6"}),
        (
            "7:9",
            "nothing was profiled on rank 0: the run ended after 6 steps, before step 7",
            None,
        ),
        (
            "2:3:0,4",
            "--profile=2:3:0,4: this run of 1 process does not have rank 4",
            {"step 2", "step 3"},
        ),
    ],
)
def test_a_profile_of_a_run_that_is_shorter_or_smaller(
    tmp_path, monkeypatch, capsys, asked, message, steps
):
    monkeypatch.setenv("ACCELERATE_PROFILE", asked)
    accelerator, model, optimizer, loader = make_run(telemetry=tmp_path)
    for _ in range(2):
        for (x,) in loader:
            with torch.profiler.record_function(f"step {optimizer.steps_made + 1}"):
                accelerator.backward(model(x).sum())
            optimizer.step()
    accelerator.end_training()
    assert message in capsys.readouterr().err
    path = tmp_path / "profile" / "rank_00000.json"
    assert path.exists() == (steps is not None)
    if steps:
        names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
        assert {name for name in names if name.startswith("step ")} == steps
    events = (tmp_path / "telemetry" / "rank_00000.events.jsonl").read_text()
    assert events.count('"profile"') == 1 and ('"path"' in events) == (steps is not None)


def test_a_profile_of_a_run_that_fails(tmp_path):
    script = f"""
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, telemetry={str(tmp_path)!r})
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
        raise KeyError("stop")
    """
    (done,) = run_ranks(script, 1, env={"ACCELERATE_PROFILE": "2:9"}, check=False)
    assert done.returncode == 1 and "KeyError: 'stop'" in done.stderr
    assert "steps 2 to 3 of rank 0" in done.stderr
    assert json.loads((tmp_path / "profile" / "rank_00000.json").read_text())["traceEvents"]

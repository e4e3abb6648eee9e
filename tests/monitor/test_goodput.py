# SPDX-License-Identifier: Apache-2.0
"""Goodput: known seconds of a constructed run come out as shares, the same ones in each output."""

import base64
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from machines import clean_environment
from planted_runs import START, unpacked, write_lines, write_steps

from accelerate import Accelerator
from accelerate.commands import report as command
from accelerate.monitor.current import current_state, metrics
from accelerate.monitor.goodput import BADPUT, goodput
from accelerate.monitor.run import open_runs
from accelerate.monitor.sentences import sentences
from accelerate.monitor.summary import summarize
from accelerate.telemetry.records import FLAG_FIRST, STEP, events_file
from accelerate.telemetry.writer import merged
from accelerate.utils import ProjectConfiguration


def opened(folder, **options):
    (run,) = open_runs([str(folder)], **options)
    run.read_all()
    return run


def steps_from(first, count, begin, seconds=0.5, data=0.05, backward=0.3, communication=0.02):
    """Records of a process whose first step begins at `begin`."""
    records = np.zeros(count, STEP)
    records["step"] = np.arange(first, first + count)
    records["steps"] = 1
    records["flags"][0] = FLAG_FIRST
    records["seconds"] = records["longest"] = seconds
    records["data"], records["backward"] = data, backward
    records["communication"] = communication
    records["time"] = begin + seconds * np.arange(1, count + 1)
    return records


def add_to(records, at, phase, seconds):
    """Make one step longer."""
    if phase is not None:
        records[phase][at] += seconds
    records["seconds"][at] += seconds
    records["time"][at:] += seconds


def planted(folder, ranks=2, edit=lambda records: records):
    """1 kill after step 300, a restart from the checkpoint of step 200, and an evaluation; waits in the backward.

    Returns the seconds of each cause, of the steps that count, and of the run.
    """
    for rank in range(ranks):
        # Rank 1 works 0.1 s longer before its backward, in which rank 0 waits.
        backward = 0.3 if rank == 0 else 0.2
        first = steps_from(1, 300, START + 20, backward=backward)
        add_to(first, 0, "forward", 30.0)
        add_to(first, 1, "forward", 4.0)
        add_to(first, 99, "checkpoint", 3.0)
        first["time"][150:] += 25.0  # an evaluation
        add_to(first, 199, "checkpoint", 3.0)
        add_to(first, 250, None, 6.0)
        killed = float(first["time"][-1])
        # 40 s until the launcher has a new process, which takes 12 s and loads for 8 s more.
        again = steps_from(201, 400, killed + 60, backward=backward)
        add_to(again, 0, "forward", 10.0)
        end = float(again["time"][-1])
        write_steps(folder, rank, ranks, edit(np.concatenate([first, again])))
        evaluation = float(first["time"][149])
        write_lines(
            events_file(folder, rank),
            {"time": START + 15, "event": "start", "seconds": 15.0, "restart": 0},
            {"time": float(first["time"][99]), "event": "save", "step": 100, "seconds": 3.0},
            {"time": evaluation, "event": "evaluation_begin", "step": 150},
            {"time": evaluation + 25, "event": "evaluation_end", "step": 150},
            {"time": float(first["time"][199]), "event": "save", "step": 200, "seconds": 3.0},
            {"time": killed + 47, "event": "start", "seconds": 7.0, "restart": 1},
            {"time": killed + 56, "event": "resume", "step": 200, "seconds": 8.0},
            # Saved after the last step; 1 s later the process ends.
            {"time": end + 5, "event": "save", "step": 600, "seconds": 5.0},
            {"time": end + 6, "event": "end"},
        )
    seconds = {
        "start": 20 + 12,
        "compile": 30 + 4 + 10,
        "data": 600 * 0.05,
        "save": 3 + 3 + 5,
        "load": 8,
        "evaluation": 25,
        "waiting": 600 * 0.1,
        "repeated": 100 * 0.5 + 6,
        "restart": 40,
        "other": 1,
    }
    return seconds, 600 * 0.35, end + 6 - START


@pytest.mark.parametrize("edit", [np.copy, merged], ids=["new", "merged"])
def test_known_seconds_are_the_shares(edit, tmp_path):
    """Also where the records of a long run cover two steps each."""
    expected, good, elapsed = planted(tmp_path, edit=edit)
    run = opened(tmp_path)
    found = goodput(run)
    assert found.seconds == pytest.approx(elapsed, rel=1e-6)
    assert list(found.badput) == list(expected) == list(BADPUT)
    assert found.share + sum(found.badput.values()) == pytest.approx(1)
    for cause, seconds in expected.items():
        assert found.badput[cause] * elapsed == pytest.approx(seconds, abs=0.05), cause
    assert found.share * elapsed == pytest.approx(good, abs=0.05)


def test_each_output_has_the_same_figures(tmp_path, capsys):
    folder = tmp_path / "run"
    planted(folder)
    expected = goodput(opened(folder))
    figures = {"goodput": expected.share, **expected.badput}
    # What reads other ranks only in part: they have more steps than it reads.
    state = current_state(opened(folder, are_partial=True))
    assert {"goodput": state.goodput, **state.badput} == figures
    samples = dict(
        re.findall(r'accelerate_(?:good|bad)put\{run="run"(.*)\} (\S+)', metrics([opened(folder)]))
    )
    expected_samples = {
        f',cause="{cause}"': repr(share) for cause, share in expected.badput.items()
    }
    assert samples == {"": repr(expected.share), **expected_samples}
    command.main([str(folder), "--format", "json"])
    summary = json.loads(capsys.readouterr().out)["summary"]
    found = summary["goodput"]
    assert {"goodput": found["share"], **found["badput"]} == figures
    assert found["seconds"] == expected.seconds
    command.main([str(folder), "-o", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = re.search(r'id="data">([^<]*)<', page)[1]
    (sent,) = unpacked(base64.b64decode(data))["runs"]
    assert sent["summary"]["goodput"] == found
    capsys.readouterr()
    command.main([str(folder)])
    text = capsys.readouterr().out
    for name, share in figures.items():
        start = {"goodput": "steps that count"}.get(name, f"{name}: ")
        row = re.search(rf"^\| {start}[^|]*\| ([\d.]+) \| ([\d.]+)% \|$", text, re.M)
        assert float(row[1]) == pytest.approx(share * expected.seconds, abs=0.051)
        assert float(row[2]) == pytest.approx(share * 100, abs=0.051)
    (sentence,) = [line for line in sentences(summarize(opened(folder))) if "goodput" in line]
    sentence = sentence.replace("\u00a0", " ")
    assert f"{expected.share * 100:.0f}% of 8 min 37 s" in sentence and f"- {sentence}" in text
    percents = [int(percent) for percent in re.findall(r"\((\d+)%\)", sentence)]
    shown = sorted((share for share in expected.badput.values() if share >= 0.005), reverse=True)
    assert percents == [round(100 * share) for share in shown]


def shares_of(folder):
    found = goodput(opened(folder))
    assert found.share + sum(found.badput.values()) == pytest.approx(1)
    assert min(found.share, *found.badput.values()) >= 0
    return found


def test_a_restart_without_a_checkpoint_and_a_start_that_fails(tmp_path):
    """All steps are made again; two processes in between end before a first step."""
    first = steps_from(1, 50, START + 10, data=0)
    killed = float(first["time"][-1])
    again = steps_from(1, 70, killed + 100, data=0)
    write_steps(tmp_path, 0, 1, np.concatenate([first, again]))
    write_lines(
        events_file(tmp_path, 0),
        {"time": START + 5, "event": "start", "seconds": 5.0},
        {"time": killed + 30, "event": "start", "seconds": 4.0},
        {"time": killed + 33, "event": "warning"},
        {"time": killed + 60, "event": "start", "seconds": 4.0},
        {"time": killed + 90, "event": "start", "seconds": 4.0},
    )
    found = shares_of(tmp_path)
    assert found.seconds == pytest.approx(10 + 25 + 100 + 35)
    seconds = {
        cause: share * found.seconds for cause, share in found.badput.items() if share > 1e-6
    }
    expected = {"start": 10 + 7 + 4 + 14, "restart": 26 + 23 + 26, "repeated": 25}
    assert seconds == pytest.approx(expected, abs=0.01)
    # Before the first step of a process, what is new of it counts as its start.
    write_lines(events_file(tmp_path, 0), {"time": killed + 150, "event": "start", "seconds": 6.0})
    found = shares_of(tmp_path)
    assert found.badput["start"] * found.seconds == pytest.approx(expected["start"] + 6, abs=0.01)
    assert found.badput["restart"] * found.seconds == pytest.approx(75 + 9, abs=0.01)


def test_old_and_odd_runs_have_shares_too(tmp_path):
    """Without events, with a single step, and with fields that no run writes."""
    records = steps_from(1, 40, START, data=0)
    write_steps(tmp_path / "bare", 0, 1, records)
    assert shares_of(tmp_path / "bare").share == pytest.approx(1)
    write_steps(tmp_path / "single", 0, 1, records[:1])
    assert shares_of(tmp_path / "single").share == pytest.approx(1)
    write_steps(tmp_path / "other", 1, 2, records)
    run = opened(tmp_path / "other")
    assert goodput(run) is None and np.isnan(current_state(run).goodput)
    assert "accelerate_goodput{" not in metrics([run])
    records["seconds"][0] = records["data"][3] = np.nan
    write_steps(tmp_path / "odd", 0, 1, records)
    for seconds in ("long", None, -5, 1e300, [1], True, float("nan")):
        times = {"time": START - 9, "seconds": seconds}
        for event in ("start", "resume", "save", "evaluation_end", "first step", "x", 7):
            write_lines(events_file(tmp_path / "odd", 0), {**times, "event": event})
    shares_of(tmp_path / "odd")
    # A clock that was set back, and loads that are longer than the time before the first step.
    write_lines(
        events_file(tmp_path / "odd", 0),
        {"time": START + 500, "event": "start"},
        {"time": START + 1, "event": "resume", "seconds": 1e6},
    )
    shares_of(tmp_path / "odd")


def train(folder, steps):
    """Resume, and train to a step; the run is saved after step 4."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, telemetry=folder, project_config=project)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(torch.ones(40, 4), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    resumed = accelerator.resume()
    step = 0 if resumed is None else resumed.step
    for batch in loader:
        time.sleep(0.02)
        accelerator.backward(model(batch).mean())
        optimizer.step()
        step += 1
        if step == 4:
            accelerator.save_state()
        if step == steps:
            break
    accelerator.end_training()


def test_a_run_that_repeats_steps(tmp_path, caplog):
    train(tmp_path, 8)
    caplog.set_level("INFO", "accelerate")
    train(tmp_path, 10)
    found = shares_of(tmp_path)
    seconds = {cause: share * found.seconds for cause, share in found.badput.items()}
    assert 4 * 0.02 < seconds["repeated"] < 4 * 0.02 + 0.5
    assert min(seconds[cause] for cause in ("start", "save", "load")) > 0
    assert 9 * 0.02 < found.seconds * found.share < 10 * 0.02 + 0.5
    (message,) = [line for line in caplog.messages if "goodput" in line]
    assert found.seconds > 59 or f"of {found.seconds:.3g} s" in message


KILLED = """
import os, signal, sys, time
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

folder, first_attempt = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, telemetry=folder, project_config=project)
model = torch.nn.Linear(4, 1)
model, optimizer, loader, other = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.01),
    torch.utils.data.DataLoader(torch.ones(160, 4), 2), torch.utils.data.DataLoader(torch.ones(8, 4), 2),
)
accelerator.resume()
step = 0 if first_attempt else 10
for batch in loader:
    step += 1
    time.sleep(0.04 if accelerator.is_main_process else 0.08)
    accelerator.backward(model(batch).mean())
    optimizer.step()
    if step == 10 and first_attempt:
        accelerator.save_state()
        for _ in other:
            time.sleep(0.2)
    if step == 20 and first_attempt:
        time.sleep(0.5)  # until the records are written
        if accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
accelerator.end_training()
"""


@pytest.mark.thorough
def test_a_run_that_is_killed_and_restarted(tmp_path):
    """Two processes; the second one is killed 10 steps after the checkpoint, and is the slow one."""
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    folder = tmp_path / "run"
    command_line = [sys.executable, "-m", "accelerate.commands.main", "launch", "--cpu"]
    begin = time.time()
    launch = subprocess.run(
        [*command_line, "--num_processes", "2", "--max_restarts", "1", script, folder],
        env=clean_environment(tmp_path), text=True, capture_output=True, timeout=100,
    )  # fmt: skip
    elapsed = time.time() - begin
    assert launch.returncode == 0, launch.stderr
    found = shares_of(folder)
    assert 0.6 * elapsed < found.seconds < elapsed
    seconds = {cause: share * found.seconds for cause, share in found.badput.items()}
    # Lower limits are sleeps; upper ones leave time for a busy machine.
    assert 10 * 0.08 - 0.05 < seconds["repeated"] < 10 * 0.08 + 2
    assert 2 * 0.2 < seconds["evaluation"] < 2 * 0.2 + 2
    assert seconds["restart"] > 0.5 and seconds["start"] > 1
    assert 0 < seconds["save"] < 2 and 0 < seconds["load"] < 2
    # 40 steps of 0.08 s in which rank 0 waits for half of the time.
    steps = found.seconds * found.share + seconds["waiting"]
    assert 40 * 0.08 - 0.1 < steps < 40 * 0.08 + 4
    assert 0.3 < seconds["waiting"] / steps < 0.6
    (message,) = [line for line in launch.stderr.splitlines() if "goodput" in line]
    assert f"{found.share * 100:.0f}% of " in message

# SPDX-License-Identifier: Apache-2.0
"""The local tracker: values as lines of JSON in the project folder."""

import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch

from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError
from accelerate.tracking import LocalTracker, read_values

VALUES = {
    "loss": torch.tensor(0.5),
    "scale": numpy.float32(2.0),
    "count": 3,
    "note": "né",
    "bad": float("nan"),
    "eval": {"f1": 1, "far": float("-inf")},
}
READ = {
    "loss": 0.5,
    "scale": 2.0,
    "count": 3,
    "note": "né",
    "bad": "nan",
    "eval/f1": 1,
    "eval/far": "-inf",
}


def events(folder):
    lines = (folder / "values.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["event"] for line in lines if "event" in line]


@pytest.mark.parametrize("log_with", ["local", None])
def test_values_are_read_back(log_with, tmp_path):
    accelerator = Accelerator(cpu=True, log_with=log_with, project_dir=tmp_path)
    accelerator.init_trackers("first", config={"rate": 0.1, "model": {"path": tmp_path}})
    assert len(accelerator.trackers) == (log_with is not None)
    accelerator.log(VALUES, step=3)
    accelerator.log({"loss": 1}, step=4)
    # Written before the end.
    assert [(record["step"], record["values"]) for record in read_values(tmp_path / "first")] == [
        (3, READ),
        (4, {"loss": 1}),
    ]
    accelerator.end_training()
    assert events(tmp_path / "first") == ["start", "end"]
    assert json.loads((tmp_path / "first/config.json").read_text()) == {
        "rate": 0.1,
        "model": {"path": str(tmp_path)},
    }


def test_a_folder_that_cannot_be_made_stops_no_run(tmp_path, caplog):
    (tmp_path / "first").write_text("a file")
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("first")
    accelerator.log({"loss": 1.0}, step=0)
    assert "its project folder" in caplog.text
    with pytest.raises(FileExistsError):
        LocalTracker("first", tmp_path).start()


def test_values_before_the_start_are_missed_with_a_warning(tmp_path, caplog):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.log({"loss": 1.0}, step=0)
    assert not caplog.text
    line = inspect.currentframe().f_lineno - 2
    accelerator.init_trackers("run")
    accelerator.log({"loss": 2.0}, step=1)
    (record,) = caplog.records
    assert (
        f"{Path(__file__).name}:{line}" in record.getMessage()
        and "init_trackers" in record.getMessage()
    )
    assert [row["step"] for row in read_values(tmp_path / "run")] == [1]


def test_a_run_that_continues(tmp_path):
    for first in (0, 2):
        tracker = LocalTracker("run", tmp_path)
        tracker.start()
        for step in range(first, first + 3):
            tracker.log({"loss": 10 * first + step}, step=step)
            tracker.log({"rate": first}, step=step)
        tracker.finish()
        with open(tmp_path / "run/values.jsonl", "a") as file:
            file.write('{"time": 1, "step": 2, "values": {"lo')
    losses = [
        (r["step"], r["values"]["loss"])
        for r in read_values(tmp_path / "run")
        if "loss" in r["values"]
    ]
    assert losses == [(0, 0), (1, 1), (2, 22), (3, 23), (4, 24)]
    assert events(tmp_path / "run") == ["start", "end", "start", "end"]


def test_a_killed_process_loses_nothing(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True, project_dir={str(tmp_path)!r})
        accelerator.init_trackers("run")
        for step in range(100):
            accelerator.log({{"loss": step}}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    assert [record["values"]["loss"] for record in read_values(tmp_path / "run")] == list(
        range(100)
    )


def test_values_that_json_has_not(tmp_path, caplog):
    accelerator = Accelerator(cpu=True, log_with="local", project_dir=tmp_path)
    name = os.fsdecode(b"data-\xff")  # a file whose name is no text
    accelerator.init_trackers(
        "first", config={"file": name, "limit": float("inf"), "all": [float("nan")], "n": 10**400}
    )
    odd = {"file": name, "huge": 10**5000, "least": -(10**400), name: 1, 7: 2, None: 3, ("a", 1): 4}
    accelerator.log(odd, step=1)
    accelerator.log({"nothing": torch.empty(1, device="meta"), "none": None}, step=2)
    for step in (2.5, numpy.int64(3), torch.tensor(4), 4, None, -1):
        accelerator.log({"x": step or 0}, step=step)
    for step in ("a", float("nan"), [1, 2]):
        with pytest.raises(ConfigurationError, match="use a number or None"):
            accelerator.log({"x": 1}, step=step)
    accelerator.end_training()
    accelerator.log({"late": 1}, step=9)
    assert "log was called after accelerator.end_training()" in caplog.text
    records = read_values(tmp_path / "first")
    expected = {
        "file": name,
        "huge": "inf",
        "least": "-inf",
        name: 1,
        "7": 2,
        "None": 3,
        "('a', 1)": 4,
    }
    assert records[0]["values"] == expected
    assert [record["step"] for record in records] == [1, 2.5, 3, 4, None, -1]
    # Valid JSON: other parsers know no NaN.
    text = (tmp_path / "first" / "config.json").read_text(encoding="utf-8")
    config = json.loads(text, parse_constant=pytest.fail)
    assert config == {"file": name, "limit": "inf", "all": ["nan"], "n": "inf"}

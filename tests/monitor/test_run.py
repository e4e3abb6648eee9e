# SPDX-License-Identifier: Apache-2.0
"""Opening runs: folders that are none, files that are damaged, and events."""

import os

import pytest
from planted_runs import START, planted_records, planted_run, write_lines, write_steps

from accelerate.core.errors import ConfigurationError
from accelerate.monitor.lines import Tail
from accelerate.monitor.run import open_runs
from accelerate.monitor.server import grouped_events
from accelerate.telemetry.records import events_file, steps_file


def test_folders_that_are_no_run(tmp_path):
    (tmp_path / "file").write_text("x")
    planted_run(tmp_path / "runs" / "one", 10)
    cases = {
        "absent": "there is no folder",
        "file": "is a file: give the folder of a run",
        "runs": r"it has neither telemetry/ nor values.jsonl. These folders in it are: one",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            open_runs([str(tmp_path / name)])


def test_names_of_runs(tmp_path):
    for name in ("a/x", "b/x", "c"):
        (tmp_path / name / "telemetry").mkdir(parents=True)
    assert [run.name for run in open_runs([str(tmp_path / "a/x"), str(tmp_path / "c")])] == ["x", "c"]
    assert [run.name for run in open_runs([str(tmp_path / "a/x"), str(tmp_path / "b/x")])] == [
        str(tmp_path / "a/x"), str(tmp_path / "b/x")
    ]  # fmt: skip


def test_a_damaged_rank_leaves_the_others(tmp_path):
    planted_run(tmp_path, 100, 3)
    steps_file(tmp_path, 1).write_bytes(b"x" * 9000)
    with open(events_file(tmp_path, 0), "a") as file:
        file.write('{"broken\n[1]\n{"no": "time"}\n{"time": 1, "ev')
    (run,) = open_runs([str(tmp_path)])
    run.refresh()
    assert sorted(run.ranks) == [0, 2]
    notes = " ".join(run.notes())
    assert "rank_00001.steps is not a telemetry file" in notes and "events.jsonl: 2 lines are no JSON" in notes
    # A file that a restarted run writes anew is found.
    write_steps(tmp_path, 1, 3, planted_records(100, 1))
    run._searched = -10.0
    run.refresh()
    assert sorted(run.ranks) == [0, 1, 2] and "rank_00001" not in " ".join(run.notes())


def test_a_run_that_has_not_begun(tmp_path):
    (run,) = open_runs([str(tmp_path)])
    run.refresh()
    assert run.is_empty and run.last_step == 0 and not run.has_ended
    planted_run(tmp_path, 10, 1)
    run._searched = -10.0
    before = run.version
    assert run.refresh() > before and run.last_step == 10


def test_lines_are_followed(tmp_path):
    tail = Tail(tmp_path / "x.jsonl")
    assert tail.read() == ([], False)
    write_lines(tail.path, {"a": 1}, {"a": 2})
    assert tail.read() == ([{"a": 1}, {"a": 2}], False)
    with open(tail.path, "a") as file:
        file.write('{"a": ')
    assert tail.read() == ([], False)
    with open(tail.path, "a") as file:
        file.write("3}\n")
    assert tail.read() == ([{"a": 3}], False)
    write_lines(tmp_path / "other", {"a": 4})
    os.replace(tmp_path / "other", tail.path)
    assert tail.read() == ([{"a": 4}], True)


def test_equal_events_of_ranks_are_one(tmp_path):
    planted_run(tmp_path, 10, 3)
    write_lines(events_file(tmp_path, 1), {"time": START + 2, "event": "hang", "message": "stuck", "path": 7})
    for rank in range(3):
        write_lines(events_file(tmp_path, rank), {"time": START + 9, "event": "end"})
    (run,) = open_runs([str(tmp_path)])
    run.refresh()
    found = grouped_events(run)
    assert [(event["event"], sorted(event["ranks"])) for event in found] == [
        ("start", [0, 1, 2]), ("hang", [1]), ("end", [0, 1, 2])
    ]  # fmt: skip
    assert found[1]["message"] == "stuck" and run.has_ended

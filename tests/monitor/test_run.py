# SPDX-License-Identifier: Apache-2.0
"""Opening runs: folders that are none, files that are damaged, and events."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from planted_runs import START, planted_records, planted_run, write_lines, write_steps
from rich.console import Console

from accelerate.core.errors import ConfigurationError
from accelerate.monitor import report
from accelerate.monitor.current import current_state
from accelerate.monitor.lines import Tail
from accelerate.monitor.page_data import grouped_events
from accelerate.monitor.run import open_runs
from accelerate.monitor.server import Server
from accelerate.monitor.steps import RankSteps
from accelerate.monitor.summary import summarize
from accelerate.monitor.terminal import picture
from accelerate.monitor.view import view
from accelerate.telemetry.records import events_file, steps_file


def test_folders_that_are_no_run(tmp_path):
    (tmp_path / "file").write_text("x")
    planted_run(tmp_path / "runs" / "one", 10)
    cases = {
        "absent": "does not exist",
        "file": "is a file: pass the folder of a run",
        "runs": r"it contains neither telemetry/ nor values.jsonl. It contains these run folders: one",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            open_runs([str(tmp_path / name)])


def test_a_run_that_has_no_folder_yet(tmp_path):
    (run,) = open_runs([str(tmp_path / "run")], may_be_absent=True)
    run.read_all()
    assert run.is_empty and run.notes() == []
    planted_run(tmp_path / "run", 10)
    run._searched = -10.0
    run.read_all()
    assert run.last_step == 10 and run.notes() == []


def test_names_of_runs(tmp_path):
    for name in ("a/x", "b/x", "c"):
        (tmp_path / name / "telemetry").mkdir(parents=True)
    assert [run.name for run in open_runs([str(tmp_path / "a/x"), str(tmp_path / "c")])] == [
        "x",
        "c",
    ]
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
    assert (
        "rank_00001.steps is not a telemetry file" in notes
        and "events.jsonl: 2 lines that are not JSON" in notes
    )
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
    write_lines(
        events_file(tmp_path, 1),
        {"time": START + 2, "event": "hang", "message": "stuck", "path": 7},
    )
    for rank in range(3):
        write_lines(events_file(tmp_path, rank), {"time": START + 9, "event": "end"})
    (run,) = open_runs([str(tmp_path)])
    run.refresh()
    found = grouped_events(run)
    assert [(event["event"], sorted(event["ranks"])) for event in found] == [
        ("start", [0, 1, 2]), ("hang", [1]), ("end", [0, 1, 2])
    ]  # fmt: skip
    assert found[1]["message"] == "stuck" and run.has_ended


def looked_at(folder):
    """The run, after everything that shows it has."""
    (run,) = open_runs([str(folder)])
    run.read_all()
    with Server([run], port=0) as server:
        server.answer(None, None, 100, "")
    Console(file=io.StringIO()).print(picture(run))
    if not run.is_empty:
        assert (
            report.html(run).encode(errors="replace")
            and report.markdown(run)
            and json.loads(report.to_json(run))
        )
    return run


def test_events_of_any_form_are_shown(tmp_path):
    planted_run(tmp_path, 20, 1)
    lines = [
        {"time": time, "event": "x"}
        for time in (None, "1", 10**400, -1e300, 1e300, float("nan"), float("inf"))
    ]
    shown = [
        {
            "time": START,
            "event": ["a"],
            "step": [1],
            "seconds": {},
            "message": {"a": 1},
            "path": ["x"],
        },
        {
            "time": START,
            "event": None,
            "step": float("nan"),
            "seconds": float("inf"),
            "path": "a\0b" * 9000,
        },
        {"time": START, "event": "hang", "step": 10**400, "message": "\ud800"},
    ]
    write_lines(events_file(tmp_path, 0), *lines, *shown)
    run = looked_at(tmp_path)
    assert len(run.events) == 4 and len(grouped_events(run)) == 4


@pytest.mark.parametrize("has_steps", [True, False])
def test_logged_values_of_any_form_are_shown(tmp_path, has_steps):
    if has_steps:
        write_steps(tmp_path, 0, 1, planted_records(20))
    for step in (None, 10**400, float("inf"), "3", True, -5, 10**17, 2):
        for value in (1, 10**400, True, [1], "text", "-inf", None):
            write_lines(
                tmp_path / "values.jsonl",
                {"time": START, "step": step, "values": {"a": value, "": 1}},
            )
    run = looked_at(tmp_path)
    assert sorted(run.series) == ["", "a"] and len(run.series["a"].values) == 8 * 4


def test_a_run_that_is_deleted_while_it_is_watched(tmp_path):
    run = looked_at(planted_run(tmp_path / "run", 300, 2))
    shutil.rmtree(tmp_path / "run")
    run._searched = -10.0
    before = run.version
    assert run.refresh() > before and run.is_empty and not run.events
    assert run.notes() == [f"the folder {tmp_path / 'run'} was deleted"]
    view(run), summarize(run)
    planted_run(tmp_path / "run", 200, 2)
    run._searched = -10.0
    run.refresh()
    run.refresh()
    assert run.last_step == 200 and run.notes() == [] and len(run.events) == 2


def test_files_that_are_missing(tmp_path):
    planted_run(tmp_path, 10, 5)
    for rank in (1, 2, 4):
        steps_file(tmp_path, rank).unlink()
    steps_file(tmp_path, 4).mkdir()
    events_file(tmp_path, 0).unlink()
    events_file(tmp_path, 0).mkdir()
    notes = looked_at(tmp_path).notes()
    assert len(notes) == 3
    assert re.search("rank_00004.steps cannot be read: .*folder", notes[0])
    assert re.match("5 ranks .*ranks 1, 2: .*missing", notes[1])
    assert re.search("rank_00000.events.jsonl cannot be read: .*folder", notes[2])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    """A named pipe without a writer would stop whoever opens it."""
    planted_run(tmp_path, 20)
    for path in (events_file(tmp_path, 0), steps_file(tmp_path, 1), tmp_path / "values.jsonl"):
        path.unlink()
        os.mkfifo(path)
        os.utime(path, (START, START))
    (run,) = open_runs([str(tmp_path)])
    run.read_all()
    notes = "\n".join(run.notes())
    assert "rank_00000.events.jsonl cannot be read" in notes and "rank_00001.steps" in notes
    assert list(run.ranks) == [0] and run.last_step == 20
    for command in (["monitor", "--json", "--once"], ["report", "--format", "json"]):
        subprocess.run(
            [sys.executable, "-m", "accelerate.commands.main", *command, str(tmp_path)],
            check=True, capture_output=True, timeout=50,
        )  # fmt: skip


def test_a_look_at_many_ranks_reads_what_is_new(tmp_path, monkeypatch):
    """The cost of a look does not grow with the length of the run, and events are sorted once for all ranks."""
    ranks = 40
    planted_run(tmp_path, 2000, ranks, slow=3)
    for rank in range(ranks):
        saves = [{"time": START + at, "event": "save", "step": at} for at in range(1, 150)]
        write_lines(events_file(tmp_path, rank), *saves)
    (run,) = open_runs([str(tmp_path)])
    (part,) = open_runs([str(tmp_path)], are_partial=True)
    counts = Counter()
    read_steps, load = RankSteps._read, json.loads

    def counted_read(self, file, start, stop):
        counts["records"] += stop - start
        return read_steps(self, file, start, stop)

    def counted_load(line):
        counts["lines"] += 1
        return load(line)

    monkeypatch.setattr(RankSteps, "_read", counted_read)
    monkeypatch.setattr("accelerate.monitor.lines.json.loads", counted_load)
    part.read_all()
    assert counts["records"] < ranks * 600 and counts["lines"] < ranks * 100 + 250
    run.read_all()
    assert len(run.events) == ranks * 150 + 4
    state, expected = current_state(part), current_state(run)
    assert replace(state, age_seconds=0) == replace(expected, age_seconds=0)
    assert state.slow_ranks == [3] and state.state == "running"
    counts.clear()
    for rank in range(ranks):
        write_steps(tmp_path, rank, ranks, planted_records(1, rank, begin=2001), "ab")
        write_lines(events_file(tmp_path, rank), {"time": START + 500, "event": "end"})
    for looked in (part, run):
        looked.read_all()
        # One new record and line; the first and the last known record, before and after.
        assert counts["records"] <= ranks * 10 and counts["lines"] == ranks
        assert looked.last_step == 2001 and current_state(looked).state == "ended"
        counts.clear()

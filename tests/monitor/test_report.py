# SPDX-License-Identifier: Apache-2.0
"""The report: one page that loads nothing and has the data inside, and the same figures as Markdown and JSON."""

import base64
import json
import os
import re
import threading

import numpy as np
import pytest
from planted_runs import START, planted_records, planted_run, unpacked, write_lines, write_steps

from accelerate.commands import report as command
from accelerate.monitor import report
from accelerate.monitor.run import open_runs
from accelerate.monitor.view import view
from accelerate.telemetry.records import events_file


@pytest.fixture
def run(tmp_path):
    folder = planted_run(tmp_path / "my <run>", 600, 3, slow=2)
    write_lines(
        events_file(folder, 1),
        {"time": START + 9, "event": "hang", "message": "<script>x</script> | & stuck"},
    )
    return folder


def test_html_is_the_page_with_its_data_inside(run, tmp_path, capsys):
    command.main([str(run), "-o", str(tmp_path / "report.html")])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>my &lt;run&gt; " in text and "<run>" not in text
    # Nothing is loaded, and no text of the run is part of the page's own.
    assert (
        not re.search(r'(src|href)="(?!data:)|url\(|@import|^(import|export) ', text, re.M)
        and "stuck" not in text
    )
    assert re.findall(r"</?script", text) == ["<script", "</script"] * 2
    data = re.search(r'id="data">([^<]*)<', text)[1]
    (sent,) = unpacked(base64.b64decode(data))["runs"]
    (expected,) = open_runs([str(run)])
    expected.read_all()
    shown = view(expected, pixels=1000)
    assert np.allclose(sent["own"], shown.own) and np.allclose(
        sent["curves"]["loss"]["mean"], shown.curves["loss"].mean
    )
    assert any(
        "Rank 2 on node0 was slow in " in sentence for sentence in sent["summary"]["sentences"]
    )
    assert "eval/accuracy" in sent["logged"] and any(
        "stuck" in event.get("message", "") for event in sent["events"]
    )
    assert "report.html, " in capsys.readouterr().err


def test_json_has_the_figures(run, capsys):
    command.main([str(run), "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    (expected,) = open_runs([str(run)])
    expected.refresh()
    assert np.allclose(
        found["curves"]["loss"]["mean"], view(expected, pixels=1000).curves["loss"].mean
    )
    (slow,) = found["summary"]["stragglers"]
    assert (
        slow["rank"] == 2
        and slow["phase"] == "data"
        and slow["excess"] == pytest.approx(0.03, rel=0.05)
    )
    assert sum(found["summary"]["shares"].values()) == pytest.approx(1, rel=1e-3)
    assert found["ranks"][2]["host"] == "node0" and len(found["events"]) == 3


def test_markdown_is_the_default(run, tmp_path, capsys):
    command.main([str(run)])
    text = capsys.readouterr().out
    assert (
        text.startswith("# my \\<run>\n")
        and "| 2 | node0 | " in text
        and "x\\</script> \\| & stuck" in text
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} <= {4, 5, 6}
    command.main([str(run), "-o", str(tmp_path / "x.md")])
    assert (tmp_path / "x.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_short_and_odd_runs(tmp_path, steps):
    records = planted_records(steps)
    for name in ("loss", "gradient_norm", "tokens", "device_memory"):
        records[name] = np.nan
    records["learning_rate"] = 0
    write_steps(tmp_path, 0, 1, records)
    (run,) = open_runs([str(tmp_path)])
    run.read_all()
    assert "nan" not in report.markdown(run) and report.html(run)
    assert "NaN" not in report.to_json(run)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent"], 1, "the folder absent does not exist"),
        (["empty"], 1, "does not contain recorded steps"),
        (["damaged"], 1, "rank_00000.steps is not a telemetry file"),
        (["run", "-o", "no/such/folder/x.html"], 1, "No such file or directory"),
        (["run", "--format", "pdf"], 2, "invalid choice"),
        ([], 2, "required: RUN"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, code, message):
    planted_run(tmp_path / "run", 5, 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged" / "telemetry").mkdir(parents=True)
    (tmp_path / "damaged" / "telemetry" / "rank_00000.steps").write_bytes(b"x" * 5000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    printed = capsys.readouterr().err
    assert error.value.code == code and message in printed and printed.count("\n") == 1


def test_logged_values_alone(tmp_path, capsys):
    for step in range(9):
        write_lines(
            tmp_path / "values.jsonl",
            {"time": START + step, "step": step, "values": {"accuracy": step / 9}},
        )
    command.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "No steps were recorded" in text and "Where the time" not in text
    command.main([str(tmp_path), "--format", "json"])
    assert len(json.loads(capsys.readouterr().out)["logged"]["accuracy"]["mean"]) == 9


def test_a_pipe_is_written_to_and_not_replaced(run, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    read = []
    thread = threading.Thread(
        target=lambda: read.append((tmp_path / "pipe").read_text(encoding="utf-8"))
    )
    thread.start()
    command.main([str(run), "--format", "md", "-o", str(tmp_path / "pipe")])
    thread.join(20)
    assert read[0].startswith("# my \\<run>") and (tmp_path / "pipe").is_fifo()

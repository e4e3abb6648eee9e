# SPDX-License-Identifier: Apache-2.0
"""The report: one file that is well-formed, loads nothing, and has the figures of the records."""

import json
import math
import os
import re
import threading
from html.parser import HTMLParser

import numpy as np
import pytest
from planted_runs import START, planted_records, planted_run, write_lines, write_steps

from accelerate.commands import report as command
from accelerate.monitor import report
from accelerate.monitor.run import open_runs
from accelerate.monitor.svg import ticks
from accelerate.monitor.view import view
from accelerate.telemetry.records import events_file

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Notes elements that are not closed, and everything that a browser would load."""

    def __init__(self):
        super().__init__()
        self.stack, self.loads, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.stack.append(tag)
        self.loads += [
            value for name, value in attributes if name in ("src", "href") and not value.startswith("data:")
        ]

    def handle_startendtag(self, tag, attributes):
        self.loads += [
            value for name, value in attributes if name in ("src", "href") and not value.startswith("data:")
        ]

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


@pytest.fixture
def run(tmp_path):
    folder = planted_run(tmp_path / "my run", 600, 3, slow=2)
    write_lines(
        events_file(folder, 1), {"time": START + 9, "event": "hang", "message": "<script>x</script> | & stuck"}
    )
    return folder


def test_html_is_one_file_without_scripts(run, tmp_path, capsys):
    command.main([str(run), "-o", str(tmp_path / "report.html")])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.stack == [] and checker.loads == [] and "script" not in checker.tags
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    assert "&lt;script&gt;x&lt;/script&gt; | &amp; stuck" in text
    assert checker.tags.count("svg") == 11
    for part in ("Rank 2 on node0 was slow in ", "▲ 2", "Phases of a step", "eval/accuracy"):
        assert part in text
    coordinates = re.findall(r'points="([^"]+)"', text)
    assert coordinates and all(
        math.isfinite(float(number)) for text in coordinates for number in re.split("[ ,]", text)
    )
    assert f"{len(text.encode()):,} bytes" in capsys.readouterr().out


def test_json_has_the_figures(run, capsys):
    command.main([str(run), "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    (expected,) = open_runs([str(run)])
    expected.refresh()
    assert np.allclose(found["curves"]["loss"]["mean"], view(expected, pixels=1000).curves["loss"].mean)
    (slow,) = found["summary"]["stragglers"]
    assert slow["rank"] == 2 and slow["phase"] == "data" and slow["excess"] == pytest.approx(0.03, rel=0.05)
    assert sum(found["summary"]["shares"].values()) == pytest.approx(1, rel=1e-3)
    assert found["ranks"][2]["host"] == "node0" and len(found["events"]) == 5


def test_markdown_is_the_default(run, tmp_path, capsys):
    command.main([str(run)])
    text = capsys.readouterr().out
    assert text.startswith("# my run\n") and "| 2 | node0 | " in text and "x</script> \\| & stuck" in text
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
    report.read_all(run)
    assert "NaN" not in report.html(run) and "nan" not in report.markdown(run)
    json.loads(report.to_json(run))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent"], 1, "there is no folder absent"),
        (["empty"], 1, "has no recorded steps"),
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


def test_a_slow_rank_of_many_has_its_name_and_peaks_leave_the_rest_legible(tmp_path):
    for rank in range(64):
        records = planted_records(60, rank, "data" if rank == 37 else None)
        records["data"][30:] += 0.1 * (rank == 37)
        records["forward"][0] += 30
        records["seconds"][0] += 30
        write_steps(tmp_path, rank, 64, records)
    (run,) = open_runs([str(tmp_path)])
    report.read_all(run)
    text = report.html(run)
    assert "▲ 37<" in text and 'class="end">36<' not in text and 'class="end">0<' in text
    shown = report.svg.line("x", np.arange(1, 61), view(run).curves["seconds"], str, 400, 190, True, peaks=True)
    ends = [float(end) for end in re.findall(r'class="end">([0-9.]+)<', shown)]
    assert 0.1 < max(end for end in ends if end != 60) < 1  # 60 is a step
    # One value is a point: a line needs two.
    one = report.svg.line("x", np.array([5.0]), report.Curve(*[np.array([2.0])] * 3), str, 400, 190)
    assert one.count("<circle") == 1


def test_logged_values_alone(tmp_path, capsys):
    for step in range(9):
        write_lines(tmp_path / "values.jsonl", {"time": START + step, "step": step, "values": {"accuracy": step / 9}})
    command.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "Only logged values are shown" in text and "yet" not in text and "Where the time" not in text
    (run,) = open_runs([str(tmp_path)])
    report.read_all(run)
    assert "accuracy" in report.html(run) and report.html(run).count("<svg") == 1


def test_a_pipe_is_written_to_and_not_replaced(run, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    read = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text(encoding="utf-8")))
    thread.start()
    command.main([str(run), "--format", "md", "-o", str(tmp_path / "pipe")])
    thread.join(20)
    assert read[0].startswith("# my run") and (tmp_path / "pipe").is_fifo()


def test_ticks_are_round_numbers():
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(1, 5000, 4) == [2000, 4000]
    assert ticks(0.5, 0.5, 4) == [0.5]

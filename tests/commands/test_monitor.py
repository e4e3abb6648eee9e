# SPDX-License-Identifier: Apache-2.0
"""`accelerate monitor`: its errors and exit codes, the picture in the terminal, and the state as JSON."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from planted_runs import START, planted_records, planted_run, write_lines
from rich.console import Console

from accelerate.commands import monitor
from accelerate.monitor import terminal
from accelerate.monitor.run import open_runs
from accelerate.telemetry.records import events_file


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("", 2, "the following arguments are required: RUN"),
        ("run --prot 1", 2, "unknown option --prot (did you mean --port?)"),
        ("run --port x", 2, "invalid int value: 'x'"),
        ("run --port 99999", 2, "use a number from 0 to 65535"),
        ("run run --tui", 2, "--tui shows a single run"),
        ("run --json --port 1", 2, "--json shows a single run"),
        ("run --once", 2, "--once needs --json"),
        ("run/values.jsonl", 1, "is a file: pass the folder of a run"),
        (
            "foreign",
            1,
            "foreign is not the folder of a run: it contains neither telemetry/ nor values.jsonl",
        ),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, code, message):
    planted_run(tmp_path / "run", 5, 1)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        monitor.main(arguments.split())
    printed = capsys.readouterr().err
    assert error.value.code == code and message in printed
    assert printed.startswith("accelerate: error: ") and printed.count("\n") == 1


def test_a_port_in_use(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as error:
        port = taken.getsockname()[1]
        monitor.main([str(tmp_path), "--port", str(port)])
    assert error.value.code == 1
    message = capsys.readouterr().err
    assert f"port {port} is in use" in message and "--port" in message


@pytest.mark.parametrize("width", [60, 120])
def test_the_terminal_shows_the_run(tmp_path, width):
    folder = planted_run(tmp_path, 1000, 3, slow=1)
    write_lines(
        events_file(folder, 2),
        {"time": 2e9, "event": "out_of_memory", "message": "too [large]", "step": 9},
    )
    console = Console(width=width, file=io.StringIO(), record=True)
    terminal.show(open_runs([str(folder)])[0], console)
    text = console.export_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    (slow,) = (line for line in lines if "rank 1 slow" in line)
    shades = slow.split("slow ")[1].rstrip(" │")
    assert set(shades[: len(shades) // 2 - 2]) <= set("·░") and set(
        shades[len(shades) // 2 + 2 :]
    ) <= set("▓█")
    for part in ("step 1,000", "loss", "communication", "out of memory", "too [large]"):
        assert part in text


def test_the_terminal_waits_for_an_empty_run(tmp_path):
    console = Console(width=100, file=io.StringIO(), record=True)
    terminal.show(open_runs([str(tmp_path)])[0], console)
    assert "Waiting for the first step" in console.export_text()


def test_the_present_state_as_json(tmp_path, capsys):
    monitor.main([str(planted_run(tmp_path / "run", 1000, 3, slow=2)), "--json", "--once"])
    state = json.loads(capsys.readouterr().out)
    assert (state["name"], state["state"], state["step"], state["ranks"]) == (
        "run",
        "running",
        1000,
        3,
    )
    assert state["slow_ranks"] == [2] and state["age_seconds"] > 0
    records = [planted_records(1000, rank, "data" if rank == 2 else None) for rank in range(3)]
    assert state["loss"] == pytest.approx(sum(rows["loss"][-1] for rows in records) / 3)
    # Of the newest steps, all of which have the same length.
    seconds = records[0]["seconds"][900:].mean()
    assert state["steps_per_second"] == pytest.approx(1 / seconds, rel=0.02)
    assert state["samples_per_second"] == pytest.approx(3 * 32 / seconds, rel=0.02)
    assert state["tokens_per_second"] == pytest.approx(512 * state["samples_per_second"])
    assert state["logged"]["eval/accuracy"] == pytest.approx(1 - 0.9 * np.exp(-0.995 * 3))


def test_states_are_printed_from_before_the_run_to_its_end(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"

    def train(seconds):
        # Called between two looks: the run begins, and ends.
        if not folder.exists():
            planted_run(folder, 20, 1)
        else:
            write_lines(events_file(folder, 0), {"time": START + 9, "event": "end"})

    monkeypatch.setattr("accelerate.monitor.current.time.sleep", train)
    monkeypatch.setattr("accelerate.monitor.run._SEARCH", 0.0)
    monitor.main([str(folder), "--json"])
    output, error = capsys.readouterr()
    states = [json.loads(line) for line in output.splitlines()]
    assert [(state["state"], state["step"]) for state in states] == [
        ("waiting", 0),
        ("running", 20),
        ("ended", 20),
    ]
    assert states[0]["loss"] is None
    assert error.count("\n") == 1 and f"waiting for {folder}" in error


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_a_page_that_waits_for_a_run_ends_on_ctrl_c(tmp_path):
    # Where the tests run in the background of a shell, SIGINT is ignored in what they start.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from accelerate.commands.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "monitor", str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "waiting for" in process.stderr.readline()
        url = process.stdout.readline().split()[1]
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read().strip() == ""

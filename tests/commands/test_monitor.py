# SPDX-License-Identifier: Apache-2.0
"""`accelerate monitor`: its errors and exit codes, and the picture in the terminal."""

import io
import socket

import pytest
from planted_runs import planted_run, write_lines
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
        ("run --port 99999", 2, "a port is a number from 0 to 65535"),
        ("run run --tui", 2, "--tui shows one run"),
        ("absent", 1, "there is no folder absent"),
        ("foreign", 1, "foreign is not the folder of a run: it has neither telemetry/ nor values.jsonl"),
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
    assert printed.startswith("accelerate monitor: error: ") and printed.count("\n") == 1


def test_a_port_in_use(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as error:
        port = taken.getsockname()[1]
        monitor.main([str(tmp_path), "--port", str(port)])
    assert error.value.code == 1
    assert f"port {port} is in use: choose another with --port" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 120])
def test_the_terminal_shows_the_run(tmp_path, width):
    folder = planted_run(tmp_path, 1000, 3, slow=1)
    write_lines(events_file(folder, 2), {"time": 2e9, "event": "out_of_memory", "message": "too [large]", "step": 9})
    console = Console(width=width, file=io.StringIO(), record=True)
    terminal.show(open_runs([str(folder)])[0], console)
    text = console.export_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    (slow,) = (line for line in lines if "rank 1 slow" in line)
    shades = slow.split("slow ")[1].rstrip(" │")
    assert set(shades[: len(shades) // 2 - 2]) <= set("·░") and set(shades[len(shades) // 2 + 2 :]) <= set("▓█")
    for part in ("step 1,000", "loss", "communication", "out of memory", "too [large]"):
        assert part in text


def test_the_terminal_waits_for_an_empty_run(tmp_path):
    console = Console(width=100, file=io.StringIO(), record=True)
    terminal.show(open_runs([str(tmp_path)])[0], console)
    assert "Waiting for the first step" in console.export_text()

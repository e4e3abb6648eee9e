# SPDX-License-Identifier: Apache-2.0
"""What a launch shows of its run: a panel below the output of a terminal, lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import codecs
import fcntl
import json
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from screen import Screen

from accelerate.launchers import panel, progress
from accelerate.launchers.progress import Figures, Progress, line
from accelerate.launchers.spec import LaunchSpec, Program
from accelerate.telemetry.status import EVALUATING, TRAINING, StatusFile, status_file

LAUNCH = [sys.executable, "-m", "accelerate.commands.main", "launch", "--cpu", "--num_processes", "2"]
# Publishes as a training script does, without the import of torch, until a file appears.
SCRIPT = """
import os, sys, time
from pathlib import Path
from accelerate.telemetry.status import StatusFile, status_file
rank, stop = int(os.environ.get("RANK", "0")), Path(sys.argv[1])
folder = os.environ.get("ACCELERATE_STATUS_DIR")
status = StatusFile(status_file(Path(folder), rank)) if folder else None
step = 0
while not stop.exists():
    step += 1
    if status is not None:
        status.write(1, step, time.time(), 2, step % 50 + 1, 50, 0.125, step * 8.0, float("nan"), float("nan"))
    if rank == 0:
        print(f"line {step}", flush=True)
        print(f"\\rbar {step}", end="", file=sys.stderr, flush=True)
    time.sleep(0.02)
if status is not None:
    status.write_checkpoint("/runs/checkpoint_3", time.time())
if rank == 0:
    print("\\nend", flush=True)
"""


def environment(tmp_path):
    variables = {"HF_HOME": str(tmp_path), "TERM": "xterm"}
    return {**{name: text for name, text in os.environ.items() if name != "NO_COLOR"}, **variables}


def on_terminal(tmp_path, *options, colors=True, killed=False):
    """The screen while the panel is shown, the screen at the end, and all bytes."""
    script, stop = tmp_path / "script.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    env = environment(tmp_path) | ({} if colors else {"NO_COLOR": "1"})
    process = subprocess.Popen(
        [*LAUNCH, *options, str(script), str(stop)], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    screen, data, during = Screen(100, 20), b"", []
    decoder = codecs.getincrementaldecoder("utf-8")()
    deadline = time.monotonic() + 60
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:
            break
        data += read
        screen.feed(decoder.decode(read))
        shown = screen.rows[-1].startswith("ranks 0-1 training") or "--quiet" in options
        if (not during and shown and b"line 60\r" in data) or time.monotonic() > deadline:
            during = list(screen.rows)
            if killed:
                process.kill()
            else:
                stop.touch()
    assert process.wait(timeout=60) == (-signal.SIGKILL if killed else 0)
    return during, screen, data


@pytest.mark.timeout(120)
def test_the_panel_leaves_the_output_as_it_is(tmp_path):
    during, screen, data = on_terminal(tmp_path)
    title, bar, figures, states = during[-4:]
    assert title.startswith("script.py · 2 processes ──") and "step " in bar and "epoch 2 (" in bar and "left" in bar
    assert "loss 0.125" in figures and "samples/s" in figures and states.startswith("ranks 0-1 training")
    # What the script has written, with the parts of lines, and nothing else.
    text = "\n".join(screen.text)
    assert "samples/s" not in text and "──" not in text
    lines = [row for row in screen.text if "line " in row]
    assert [row.partition("line ")[2] for row in lines] == [str(number) for number in range(1, len(lines) + 1)]
    assert b"bar 50" in data and "end" in screen.text
    assert screen.region == (0, 19) and b"\x1b[1m" in data


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with a killed launcher on Linux only")
def test_a_killed_launcher_leaves_the_terminal_as_it_was(tmp_path):
    during, screen, _ = on_terminal(tmp_path, killed=True)
    assert during[-1].startswith("ranks 0-1 training") and screen.region == (0, 19)
    assert not [row for row in screen.rows if "ranks" in row or "samples/s" in row or "──" in row]


@pytest.mark.timeout(120)
def test_no_color_and_quiet(tmp_path):
    _, _, data = on_terminal(tmp_path, colors=False)
    assert b"samples/s" in data and not [code for code in (b"\x1b[3", b"\x1b[9", b"[38;") if code in data]
    (tmp_path / "stop").unlink()
    _, _, data = on_terminal(tmp_path, "--quiet")
    assert b"samples/s" not in data and b"\x1b7" not in data


@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_lines_of_a_script_in_the_launchers_process(tmp_path):
    """The script has the launcher's process and no child; what reports on it ends with it, also if it is killed."""
    script, stop, log = tmp_path / "script.py", tmp_path / "stop", tmp_path / "log"
    own = "try: os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError: print(os.getpid(), folder, flush=True)\n"
    script.write_text(SCRIPT.replace("step = 0\n", f"step = 0\n{own}"))
    options = ["--num_processes", "1", "--progress_interval", "0.2"]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*LAUNCH, *options, str(script), str(stop)], stderr=file, stdout=subprocess.PIPE, env=environment(tmp_path)
        )
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    assert int(pid) == process.pid and os.path.isdir(folder)
    for _ in process.stdout:
        if log.read_text().count("samples/s") >= 2:
            process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while os.path.isdir(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.isdir(folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "shown"),
    [(["--progress_interval", "0.2"], True), (["--progress_interval", "0"], False), (["-q"], False)],
)
def test_lines_in_a_file(tmp_path, options, shown):
    script, stop, log = tmp_path / "script.py", tmp_path / "stop", tmp_path / "log"
    script.write_text(SCRIPT)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*LAUNCH, *options, str(script), str(stop)], stderr=file, stdout=subprocess.PIPE, env=environment(tmp_path)
        )
        assert process.stdout is not None
        for text in process.stdout:
            ready = log.read_text().count("samples/s") >= 2 if shown else text == b"line 60\n"
            if ready:
                stop.touch()
        assert process.wait(timeout=60) == 0
    lines = [
        text for text in log.read_text().replace("\r", "\n").splitlines() if "samples/s" in text or "steps/s" in text
    ]
    assert bool(lines) == shown
    for text in lines[-1:]:
        assert text.startswith("accelerate launch: step ") and ", epoch 2 (" in text and ", loss 0.125, " in text


@pytest.mark.timeout(120)
def test_where_a_killed_rank_was(tmp_path):
    """A signal leaves no traceback; what the rank has published last is in the summary, and in the JSON file."""
    script, report = tmp_path / "script.py", tmp_path / "error.json"
    kill = "import signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    published = "status.write(1, 7, time.time(), 2, 15, 50, 0.1, 8.0, 0.0, 0.0)\n"
    script.write_text(SCRIPT.partition("while")[0] + published + kill)
    done = subprocess.run([*LAUNCH, "--error_file", str(report), str(script), "stop"],
                          capture_output=True, text=True, env=environment(tmp_path), timeout=100)  # fmt: skip
    assert done.returncode == 137 and "rank 1 failed: killed by signal 9" in done.stderr, done.stderr
    assert "\n    It was at step 7, batch 15 of epoch 2.\n" in done.stderr, done.stderr
    assert json.loads(report.read_text())["cause"].endswith("\nIt was at step 7, batch 15 of epoch 2.")


@pytest.fixture
def terminal(monkeypatch):
    """A screen that shows what a panel writes, and whose size changes."""
    screen, written = Screen(60, 16), []

    def write(text):
        written.append(text)
        screen.feed(text)

    monkeypatch.setattr(panel, "_terminal_size", lambda: (screen.columns, screen.height))
    monkeypatch.setattr(panel, "_write", write)
    monkeypatch.setattr(panel, "_start_guard", lambda: None)
    return screen, written


@pytest.mark.parametrize("moved", [False, True])
def test_a_larger_terminal_shows_one_panel(terminal, moved):
    """Some terminals add the new lines below, others above what they show."""
    screen, _ = terminal
    screen.feed("".join(f"line {number}\r\n" for number in range(20)))
    shown = panel.Panel()
    shown.draw(["title", "bar", "figures", "ranks"])
    assert screen.rows[-4:] == ["title", "bar", "figures", "ranks"]
    screen.height, new = 22, [""] * 6
    screen.rows = [*new, *screen.rows] if moved else [*screen.rows, *new]
    screen.row += 6 * moved
    screen.region = (0, 21)
    shown.draw(["title", "bar", "figures", "ranks"])
    screen.feed("more\r\n")
    assert [row for row in screen.text if row] == [
        *(f"line {number}" for number in range(20)), "more", "title", "bar", "figures", "ranks",
    ]  # fmt: skip
    assert screen.rows[-4:] == ["title", "bar", "figures", "ranks"] and screen.region == (0, 17)
    screen.height = 20
    del screen.rows[20:]
    shown.remove()
    assert [row for row in screen.rows if row in ("title", "bar", "figures", "ranks")] == []


def test_the_panel_has_its_own_colours(terminal):
    """The colour that the output has left on is saved with the cursor, and does not reach the panel."""
    _, written = terminal
    panel.Panel().draw(["title"])
    assert written[-1].rpartition("title")[0].endswith("\x1b7\x1b[0m\x1b[13;1H")


def test_a_terminal_that_becomes_too_small_shows_lines(terminal, tmp_path, monkeypatch):
    screen, _ = terminal
    monkeypatch.setattr(panel, "_DELAY", 0.0)
    monkeypatch.setattr(panel, "_REFRESH", 0.0)
    spec = LaunchSpec(Program("script.py"), num_processes=2, progress_interval=1e-9)
    display = panel.Display(spec, tmp_path, terminal=True)
    file = StatusFile(status_file(tmp_path, 0))
    file.write(TRAINING, 7, time.time(), 1, 30, 60, 0.5, 1.0, math.nan, 2.0**30)
    display._looked = 0.0
    assert display.tick({}, {}) is None and screen.rows[-1].startswith("rank 0 training")
    screen.columns = 20
    assert "step 7, epoch 1" in display.tick({}, {}) and screen.region == (0, 15)
    assert not any(screen.rows[-4:])


def test_figures(tmp_path, monkeypatch):
    watched = Progress(LaunchSpec(Program("script.py"), num_processes=4, num_machines=2, machine_rank=1), tmp_path)
    assert watched.where == "machine 1 of 2"
    files = [StatusFile(status_file(tmp_path, rank)) for rank in (2, 3)]
    files[0].write(0, 0, 100.0, 0, 0, 0, math.nan, math.nan, math.nan, math.nan)
    assert watched.read({}, {}) is None
    now = 1000.0
    monkeypatch.setattr(progress.time, "time", lambda: now)
    for now in (1000.0, 1004.0):
        for file in files:
            step = 10 + round(now - 1000) * 5
            file.write(TRAINING, step, now, 1, 30, 60, 0.5, step * 4.0, math.nan, 2.0**30)
    files[1].write(EVALUATING, 30, now, 1, 30, 60, 1.5, 120.0, math.nan, 2.0**31)
    found = watched.read({}, {})
    assert found is not None and math.isnan(found.step_rate)
    files[0].write_checkpoint("/run/checkpoint_7", 990.0)
    now = 1006.0
    files[0].write(TRAINING, 40, now, 1, 40, 60, 0.5, 160.0, math.nan, 2.0**30)
    found = watched.read({}, {})
    assert found is not None
    assert (found.step, found.epoch, found.loss, found.step_rate, found.sample_rate) == (40, 1, 1.0, 5.0, 20.0)
    # 100 batches in 40 steps: 20 batches are 8 steps.
    assert found.left == pytest.approx(8 / 5) and found.memory == 2.0**31 and found.checkpoint == "checkpoint_7"
    assert line(found, watched.where) == (
        "machine 1 of 2: step 40, epoch 1 (67%), loss 1, 20 samples/s, 0:02 left in the epoch, 2.0 GiB, "
        "saved checkpoint_7 0:16 ago, rank 3 evaluating"
    )
    now = 1100.0
    found = watched.read({}, {3: -9})
    assert isinstance(found, Figures) and dict(found.ranks) == {2: "no step for 1:34", 3: "failed (-9)"}

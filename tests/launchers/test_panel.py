# SPDX-License-Identifier: Apache-2.0
"""What a launch shows of its run: a panel below the output of a terminal, lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest

from accelerate.launchers import panel
from accelerate.launchers.panel import Progress
from accelerate.launchers.spec import LaunchSpec, Program
from accelerate.telemetry.status import EVALUATING, TRAINING, StatusFile, status_file

LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.main",
    "launch",
    "--cpu",
    "--num_processes",
    "2",
]
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


def on_terminal(tmp_path, *options, color="1"):
    """What the launcher writes to a terminal; the script is stopped once the panel is shown."""
    script, stop = tmp_path / "script.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    env = environment(tmp_path) | ({} if color else {"NO_COLOR": "1"})
    process = subprocess.Popen(
        [*LAUNCH, *options, str(script), str(stop)], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    data, deadline = b"", time.monotonic() + 60
    while True:
        try:
            data += os.read(ours, 4096)
        except OSError:
            break
        shown = data.count(b"samples/s") > 10 or "--quiet" in options
        if (shown and b"line 60" in data) or time.monotonic() > deadline:
            stop.touch()
    assert process.wait(timeout=60) == 0
    return data.decode()


@pytest.mark.timeout(120)
def test_a_panel_below_the_output(tmp_path):
    text = on_terminal(tmp_path)
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text).replace("\r", "\n")
    assert (
        "script.py · 2 processes ──" in plain
        and "ranks 0, 1 training" in plain
        and "loss 0.125" in plain
    )
    assert re.search(
        r"step \d+ +epoch 2 \(\d+%\).*━.*to the end of the epoch", plain
    ) and re.search(r"bar \d+", plain)
    # Every line of the script once, in order, and the panel is erased at the end.
    numbers = [int(number) for number in re.findall(r"line (\d+) *$", plain, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    after = text.rpartition("ranks")[2]
    assert after.count("\x1b[2K") >= 4 and re.search("^end$", plain, re.MULTILINE)


@pytest.mark.timeout(120)
def test_no_color_and_quiet(tmp_path):
    text = on_terminal(tmp_path, color="")
    assert "samples/s" in text and not [
        code for code in ("\x1b[3", "\x1b[9", "[38;") if code in text
    ]
    (tmp_path / "stop").unlink()
    assert "samples/s" not in on_terminal(tmp_path, "--quiet")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--progress_interval", "0.2"], True),
        (["--progress_interval", "0"], False),
        (["-q"], False),
    ],
)
def test_lines_in_a_file(tmp_path, options, shown):
    script, stop, log = tmp_path / "script.py", tmp_path / "stop", tmp_path / "log"
    script.write_text(SCRIPT)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*LAUNCH, *options, str(script), str(stop)],
            stderr=file,
            stdout=subprocess.PIPE,
            env=environment(tmp_path),
        )
        assert process.stdout is not None
        for text in process.stdout:
            ready = log.read_text().count("samples/s") >= 2 if shown else text == b"line 60\n"
            if ready:
                stop.touch()
        assert process.wait(timeout=60) == 0
    lines = [
        text
        for text in log.read_text().replace("\r", "\n").splitlines()
        if "samples/s" in text or "steps/s" in text
    ]
    assert bool(lines) == shown
    for text in lines[-1:]:
        assert (
            text.startswith("accelerate: step ")
            and ", epoch 2 (" in text
            and ", loss 0.125, " in text
        )


def test_figures(tmp_path, monkeypatch):
    spec = LaunchSpec(Program("script.py"), num_processes=4, num_machines=2, machine_rank=1)
    watched = Progress(spec, tmp_path)
    assert watched.machine == "machine 1 of 2"
    files = [StatusFile(status_file(tmp_path, rank)) for rank in (2, 3)]
    files[0].write(0, 0, 100.0, 0, 0, 0, math.nan, math.nan, math.nan, math.nan)
    assert watched.read({}, {}) is None
    now = 1000.0
    monkeypatch.setattr(panel.time, "time", lambda: now)
    for now in (1000.0, 1004.0):
        for file in files:
            step = 10 + round(now - 1000) * 5
            file.write(TRAINING, step, now, 1, 30, 60, 0.5, step * 4.0, math.nan, 2.0**30)
    files[1].write(EVALUATING, 30, now, 1, 30, 60, 1.5, 120.0, math.nan, 2.0**31)
    assert not [text for text in watched.read({}, {}).measures if text.endswith("/s")]
    files[0].write_checkpoint("/run/checkpoint_7", 990.0)
    now = 1006.0
    files[0].write(TRAINING, 40, now, 1, 40, 60, 0.5, 160.0, math.nan, 2.0**30)
    # 100 batches in 40 steps: 20 batches are 8 steps, at 5 steps a second.
    assert watched.read({}, {}).line() == (
        "step 40, epoch 1 (67%), loss 1, 20 samples/s, memory 2,048 MiB, saved checkpoint_7 0:16 ago, "
        "0:02 to the end of the epoch, rank 3 evaluating"
    )
    now = 1100.0
    assert watched.read({}, {3: -9}).ranks == ["rank 2 no step for 1:34", "rank 3 failed (-9)"]
    assert watched.read({}, {2: 0, 3: 0}).ranks == ["ranks 2, 3 ended"]

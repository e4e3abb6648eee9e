# SPDX-License-Identifier: Apache-2.0
"""The examples of large models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "big_model"


@pytest.mark.thorough
def test_plan():
    command = [sys.executable, FOLDER / "plan.py", "--machine", "2x1GB", "--batch", "8x64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert not done.stderr, done.stderr
    assert {"ddp", "fsdp", "fsdp+ckpt"} <= {
        name for name, text in lines.items() if text.endswith(", fits")
    }


@pytest.mark.parametrize("nproc", [1, 2])
def test_load(printed, nproc):
    text = "\n".join(printed("big_model/load", nproc, "--cpu", "8MB"))
    assert re.search(r"embed +0.98 MiB on cpu", text) and re.search(
        r"blocks.3 +2.00 MiB on disk", text
    ), text
    assert "by 0.0e+00" in text


@pytest.mark.parametrize("nproc", [1, 2])
def test_offload(printed, nproc):
    text = "\n".join(printed("big_model/offload", nproc, "--layers", "12"))
    total, more = map(int, re.search(r"(\d+) MiB of weights, (-?\d+) MiB more", text).groups())
    assert total == 48 and more < 19, text
    assert "outputs are equal: True" in text


def test_inference(printed, tmp_path):
    expected = None
    for nproc in (1, 2):
        folder = tmp_path / str(nproc)
        text = "\n".join(printed("big_model/inference", nproc, "--output", folder))
        rows = [
            line for file in sorted(folder.glob("part-*")) for line in file.read_text().splitlines()
        ]
        assert f"{len(rows)} samples, {len(rows)} rows in" in text
        assert expected in (None, rows)
        expected = rows

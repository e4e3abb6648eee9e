# SPDX-License-Identifier: Apache-2.0
"""Disks that fill up, are mounted read-only or vanish, under two ranks: one error on both, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from ranks import run_script

WORKER = Path(__file__).parent / "disk_worker.py"


@contextlib.contextmanager
def small_disk(place):
    """A file system of 4 MB of its own; skips the test where none can be mounted."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.skipif(os.name != "posix", reason="mounts are a matter of POSIX systems")
@pytest.mark.timeout(300)
def test_a_disk_that_fails_is_the_same_error_on_every_rank(ranks, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        two = ranks(2)
        two.run(run_script, WORKER, disk, timeout=240)
    assert all("nothing was lost" in output.stdout for output in two.outputs)

# SPDX-License-Identifier: Apache-2.0
"""`map_dataset` killed at random moments, and started again on other numbers of ranks: each row once, in order.

KILLS sets how many (default 2); `make test-faults` takes 100.
"""

import json
import os
import random
import runpy
import time
from pathlib import Path

import pytest
import torch
from kills import Launches, gone, rank_pids, strike

WORKER = Path(__file__).parent / "map_worker.py"
KILLS = int(os.environ.get("KILLS", "2"))
PARTS_A_KILL, PART = 20, 8  # finished parts from one kill to the next, on average; samples


@torch.no_grad()
def expected(total):
    """The values of a plain loop over all samples."""
    model = runpy.run_path(str(WORKER))["Model"]()
    return torch.cat([model(batch)["value"] for batch in torch.arange(total).split(4)])


def rows_of(part):
    return [(row["number"], row["value"]) for row in map(json.loads, part.read_text().splitlines())]


@pytest.mark.thorough  # tests/inference/test_dataset.py kills a run once
@pytest.mark.timeout(120 + 60 * KILLS)
def test_killed_at_random_moments(tmp_path):
    total = PART * PARTS_A_KILL * (KILLS + 1)
    dice, launches = random.Random(KILLS), Launches(WORKER)
    struck, record, parts = 0, [], []
    try:
        while True:
            ranks = dice.choice([1, 2, 3])
            launcher = launches.start(tmp_path, total, ranks=ranks)
            pids = rank_pids(tmp_path, launcher, ranks)
            if struck < KILLS:
                target = dice.choice(["rank", "ranks", "launcher"])
                # By its progress: in a second a run may make half of all parts.
                aim = len(parts) + dice.randrange(2 * PARTS_A_KILL)
                while (
                    launcher.poll() is None
                    and len([*(tmp_path / "output").glob("part-*.jsonl")]) < aim
                ):
                    time.sleep(0.002)
                if launcher.poll() is None:
                    strike(target, pids, launcher)
                    struck += 1
            _, told = launcher.communicate(timeout=600)
            assert gone(pids), "a rank outlives its launcher"
            # A part that is there is complete.
            parts = sorted((tmp_path / "output").glob("part-*.jsonl"))
            for part in parts:
                first = int(part.stem.removeprefix("part-")) * PART
                assert [number for number, _ in rows_of(part)] == list(
                    range(first, min(first + PART, total))
                )
            record.append((ranks, len(parts)))
            if launcher.returncode == 0:
                break
            assert struck, told
    finally:
        launches.stop()
    # On a busy machine a run comes further before this process kills it.
    assert struck >= max(1, KILLS // 2), (
        f"{struck} kills; (ranks, parts at the end) of each run: {record}"
    )
    found = [row for part in parts for row in rows_of(part)]
    assert [number for number, _ in found] == list(range(total))
    torch.testing.assert_close(
        torch.tensor([value for _, value in found]), expected(total), rtol=0, atol=1e-4
    )

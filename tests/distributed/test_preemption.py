# SPDX-License-Identifier: Apache-2.0
"""Asked to stop, a run saves on all ranks, exits with 0, and goes on to the parameters it would have had."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks, run_script

WORKER = Path(__file__).parent / "workers" / "preempted.py"


def parameters(folder):
    return torch.load(folder / "end.pt", weights_only=True)


@pytest.mark.parametrize("world", [1, 2])
def test_stopped_and_gone_on(world, ranks, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    ranks(world).run(run_script, WORKER, whole, 0)
    stopped = run_ranks(WORKER, world, cut, 13)
    assert not (cut / "end.pt").exists()
    assert "saved" in stopped[0].stderr
    ranks(world).run(run_script, WORKER, cut, 0)
    expected = parameters(whole)
    for name, value in parameters(cut).items():
        assert torch.equal(value, expected[name]), name

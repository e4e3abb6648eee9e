# SPDX-License-Identifier: Apache-2.0
"""Asked to stop, a run saves on all ranks, exits with a code, and goes on to the parameters it would have had."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks, run_script

WORKER = Path(__file__).parents[1] / "distributed" / "workers" / "preempted.py"


def parameters(folder):
    return torch.load(folder / "end.pt", weights_only=True)


@pytest.mark.parametrize(("world", "exit_code"), [(1, 0), (2, None)])
def test_stopped_and_gone_on(world, exit_code, ranks, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    ranks(world).run(run_script, WORKER, whole, 0)
    stopped = run_ranks(
        WORKER, world, cut, 13, *([] if exit_code is None else [exit_code]), check=False
    )
    # Only the last rank has received the signal.
    assert [rank.returncode for rank in stopped] == [
        143 if exit_code is None else exit_code
    ] * world, stopped
    assert not (cut / "end.pt").exists()
    assert "saved" in stopped[0].stderr
    ranks(world).run(run_script, WORKER, cut, 0)
    expected = parameters(whole)
    for name, value in parameters(cut).items():
        assert torch.equal(value, expected[name]), name

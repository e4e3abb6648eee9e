# SPDX-License-Identifier: Apache-2.0
"""Ranks of tests: what they return, how each way to fail is reported, and that no case leaves anything to the next."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailure, on_ranks

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

FORKED = pytest.mark.parametrize(
    "fresh", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["forked", "fresh"]
)


class Point:
    """An argument and a result of a class of the test's own module."""

    def __init__(self, x: int) -> None:
        self.x = x


def moved(point: Point, by: torch.Tensor, *, times: int = 1) -> tuple[int, Point, torch.Tensor]:
    return PartialState(cpu=True).process_index, Point(point.x + times), by * times


@FORKED
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_results_come_in_rank_order(ranks, nproc, fresh):
    if fresh and nproc == 4:
        pytest.skip("two show it")
    results = ranks(nproc, fresh=fresh).run(moved, Point(1), torch.ones(3), times=2)
    assert [rank for rank, _, _ in results] == list(range(nproc))
    assert all(point.x == 3 and torch.equal(by, torch.full((3,), 2.0)) for _, point, by in results)


def fails_on(rank: int, value: int) -> None:
    state = PartialState(cpu=True)
    print(f"rank {state.process_index} prints")
    if state.process_index == rank:
        assert value + 1 == 5, "the sum"
    state.wait_for_everyone()


@FORKED
def test_the_first_rank_to_fail_has_its_traceback_shown(ranks, fresh):
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks(3, fresh=fresh).run(fails_on, 1, 7)
    text = str(caught.value)
    assert caught.value.rank == 1 and caught.value.reason == "error"
    assert text.startswith("rank 1 of 3 failed: AssertionError: the sum")
    # The values, as pytest shows them, and the line; nothing of the helper's.
    assert "assert (7 + 1) == 5" in text and "in fails_on" in text
    assert text.count("Traceback") == 1 and "rank_server.py" not in text
    # The others end with it, in a line each.
    assert "\nrank 0: " in text and "\nrank 2: " in text
    assert "--- rank 2 stdout\nrank 2 prints" in text
    assert time.monotonic() - began < 60


def hangs(kind: str, folder: Path) -> None:
    state = PartialState(cpu=True)
    (folder / str(state.process_index)).write_text(str(os.getpid()))
    if state.process_index:
        wait_here(kind)
    return None


def wait_here(kind: str) -> None:
    if kind == "python":
        while True:
            pass
    # Rank 0 has returned, and stays until all have.
    dist.recv(torch.ones(1), src=0)


@pytest.mark.parametrize("kind", [pytest.param("python", marks=pytest.mark.thorough), "collective"])
def test_a_case_that_hangs_is_killed_with_its_stacks(ranks, kind, tmp_path):
    with pytest.raises(RankFailure, match=r"ranks 1, 2 of 3 .*within \d+ s") as caught:
        ranks(3).run(hangs, kind, tmp_path, timeout=5)
    text = str(caught.value)
    assert caught.value.rank == 1 and caught.value.reason == "timeout"
    assert (
        text.count("in wait_here") == 2
        and "--- rank 1 was here" in text
        and "rank 0: returned" in text
    )
    assert not any(is_alive(int((tmp_path / str(rank)).read_text())) for rank in range(3))
    # The next case runs as if nothing had been.
    assert len(ranks(3).run(moved, Point(1), torch.ones(1))) == 3


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(how: str) -> None:
    state = PartialState(cpu=True)
    if state.process_index == 1:
        if how == "abort":
            os.abort()
        os._exit(int(how))
    state.wait_for_everyone()


@FORKED
@pytest.mark.parametrize(
    ("how", "ending"), [("abort", "was ended by SIGABRT"), ("3", "exit code 3"), ("0", "code 0")]
)
def test_a_rank_that_ends_by_itself_is_named(ranks, how, ending, fresh):
    if fresh and how != "abort":
        pytest.skip("one shows it")
    with pytest.raises(RankFailure, match=rf"^rank 1 of 2 .*{ending}") as caught:
        ranks(2, fresh=fresh).run(ends, how)
    assert caught.value.rank == 1 and caught.value.reason == "exit"
    assert ("in ends" in str(caught.value)) == (how == "abort")


def skips() -> None:
    pytest.skip("not on these ranks")


def test_a_rank_can_skip(ranks):
    with pytest.raises(pytest.skip.Exception, match="not on these ranks"):
        ranks(2).run(skips)


def leave_traces() -> None:
    """Change whatever a case may change, with a group that is not left."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    dist.new_group([0])
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
    os.environ["ACCELERATE_MIXED_PRECISION"] = os.environ["LEFT"] = "fp16"
    os.chdir("/")
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.nn.Linear.forward = None
    sys.excepthook = None


def traces() -> list[object]:
    return [
        dist.is_initialized(),
        [bool(state._shared_state) for state in (PartialState, AcceleratorState, GradientState)],
        random.random(), float(np.random.rand()), torch.rand(1).item(),
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), warnings.filters,
        sorted(set(os.environ) - {"MASTER_PORT"}), os.getcwd(),
        len(torch.nn.modules.module._global_forward_hooks), signal.getsignal(signal.SIGTERM),
        torch.nn.Linear.forward is None, sys.excepthook is None, sorted(sys.modules),
    ]  # fmt: skip


def test_a_case_leaves_nothing_to_the_next(ranks):
    before = ranks(2).run(traces)
    ranks(2).run(leave_traces)
    assert ranks(2).run(traces) == before
    # Ranks differ where processes do.
    assert before[0][2:5] != before[1][2:5]
    assert PartialState._shared_state == {} and torch.get_default_dtype() is torch.float32


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_the_environment_is_that_of_the_test_and_what_a_case_adds(ranks, monkeypatch):
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("GONE", "gone")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("RANK", "7")
    names = ("KEPT", "GONE", "ADDED", "ACCELERATE_MIXED_PRECISION", "RANK", "WORLD_SIZE")
    found = ranks(2).run(variables, *names, env={"GONE": None, "ADDED": "added"})
    assert found == [["kept", None, "added", None, str(rank), "2"] for rank in range(2)]
    assert ranks(1).run(variables, *names) == [["kept", "gone", None, None, None, None]]


@pytest.fixture
def shift() -> torch.Tensor:
    return torch.full((2,), 3.0)


@on_ranks(1, 2)
@pytest.mark.parametrize("factor", [1, 5])
def test_a_test_on_the_ranks_themselves(factor, shift, nproc, tmp_path):
    """It has fixtures and parameters, and runs in a process of its own."""
    state = PartialState(cpu=True)
    assert state.num_processes == nproc and factor in (1, 5) and shift.sum() == 6
    (tmp_path / str(state.process_index)).touch()
    state.wait_for_everyone()
    assert len(list(tmp_path.iterdir())) == nproc


@on_ranks(2)
def failing_test(value):
    assert value == PartialState(cpu=True).process_index


def test_a_test_on_the_ranks_fails_with_their_error(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2 failed: (.|\n)*assert 0 == 1"):
        failing_test(ranks, 2, value=0)

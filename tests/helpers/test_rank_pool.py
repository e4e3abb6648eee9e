# SPDX-License-Identifier: Apache-2.0
"""Ranks of tests: what they return, how each way to fail is reported, and that no case leaves anything to the next."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailure, Ranks, on_ranks

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


def test_functions_and_arguments_that_cannot_be_sent(ranks):
    def inner() -> None: ...

    with pytest.raises(TypeError, match="top level of its module"):
        ranks(1).run(inner)
    with pytest.raises(TypeError, match="must be picklable"):
        ranks(1).run(moved, lambda: 0)
    with pytest.raises(RankFailure, match="pickle"):
        ranks(1).run(returns_a_function)
    with pytest.raises(ValueError, match="1 to 4"):
        ranks(5)


def returns_a_function():
    return lambda: 0


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
    with pytest.raises(RankFailure, match=r"ranks 1, 2 of 3 did not return within \d+ s") as caught:
        ranks(3).run(hangs, kind, tmp_path, timeout=5)
    text = str(caught.value)
    assert caught.value.rank == 1 and caught.value.reason == "timeout"
    assert text.count("in wait_here") == 2 and "--- rank 1 was here" in text and "rank 0: returned" in text
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
@pytest.mark.parametrize(("how", "ending"), [("abort", "was ended by SIGABRT"), ("3", "exit code 3"), ("0", "code 0")])
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


def prints() -> None:
    print("out of", PartialState(cpu=True).process_index)
    os.write(2, b"past Python\n")


def test_output_is_kept_and_shown(ranks, capsys):
    two = ranks(2)
    two.run(prints)
    assert [output.stdout for output in two.outputs] == ["out of 0\n", "out of 1\n"]
    assert all("past Python" in output.stderr for output in two.outputs)
    shown = capsys.readouterr()
    assert "--- rank 1\nout of 1\n" in shown.out and "past Python" in shown.err


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


def other_processes() -> int:
    """Start a process that outlives the rank, should nobody end it."""
    return subprocess.Popen(["sleep", "600"]).pid


def test_what_a_rank_has_started_ends_with_it(ranks):
    (pid,) = ranks(1).run(other_processes)
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_a_run_ends_before_the_test_does(rank_pool, tmp_path):
    one = Ranks(rank_pool, 2, deadline=time.monotonic() + 2)
    with pytest.raises(RankFailure, match=r"did not return within [12](\.\d)? s"):
        one.run(hangs, "python", tmp_path, timeout=100)


CASES = """
import ctypes, functools, os, time
from pathlib import Path

import pytest
from accelerate.state import PartialState

def case(what, folder):
    rank = PartialState(cpu=True).process_index
    (Path(folder) / f"{what}-{rank}").write_text(str(os.getpid()))
    if what == "hangs" and rank:
        time.sleep(600)
    if what in ("crashes", "crashes once") and rank and not (Path(folder) / "crashed").exists():
        (Path(folder) / "crashed").write_text("") if what == "crashes once" else None
        # A thread that Python knows nothing of, at an address that is not mapped.
        ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.c_void_p(16), None)
        time.sleep(600)
    assert what != "fails" or rank == 0

HANGS = pytest.param("hangs", marks=pytest.mark.timeout(16))

@pytest.mark.parametrize("what", ["passes", "fails", HANGS, "passes again", "crashes", "crashes once"])
def test_case(ranks, what, tmp_path_factory):
    ranks(2).run(case, what, FOLDER)
"""


def suite(folder: Path) -> list[str]:
    here = Path(__file__).parents[1]
    (folder / "test_cases.py").write_text(textwrap.dedent(CASES).replace("FOLDER", repr(str(folder))))
    (folder / "conftest.py").write_text((here / "conftest.py").read_text())
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {here / 'helpers'}\ntimeout = 60\n")
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", str(folder)]


@pytest.mark.thorough
def test_in_a_run_of_pytest_each_case_has_its_name_and_its_report(tmp_path):
    done = subprocess.run(
        suite(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert "3 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "PASSED test_cases.py::test_case[passes again]" in done.stdout
    assert "FAILED test_cases.py::test_case[fails] - rank_pool.RankFailure: rank 1 of 2 failed" in done.stdout
    assert "FAILED test_cases.py::test_case[hangs] - rank_pool.RankFailure: ranks 1 of 2 did not" in done.stdout
    assert "Timeout (>" not in done.stdout
    # A crash in a native thread is repeated once, and shown with the thread's stack.
    assert "PASSED test_cases.py::test_case[crashes once]" in done.stdout
    assert "FAILED test_cases.py::test_case[crashes] - rank_pool.RankFailure: rank 1 of 2 was ended by" in done.stdout
    warned = done.stdout.partition("warnings summary")[2]
    assert warned.count("UserWarning: rank 1 of 2 was ended by SIGSEGV\n") == 3
    assert "the crash was in a native thread" in warned and "FatalSignalHandler" in warned


@pytest.mark.thorough
def test_ranks_die_with_the_process_of_the_tests(tmp_path):
    running = subprocess.Popen(suite(tmp_path), stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        files = [tmp_path / f"hangs-{rank}" for rank in range(2)]
        until(lambda: all(file.exists() and file.read_text() for file in files), 100)
    finally:
        running.kill()
        running.wait()
    pids = [int(file.read_text()) for file in files]
    until(lambda: not any(map(is_alive, pids)), 10)


def until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def partial_case(a: int, b: int) -> int:
    return a + b


def test_partials_are_refused_with_a_reason(ranks):
    with pytest.raises(TypeError, match="top level of a module"):
        ranks(1).run(functools.partial(partial_case, 1), 2)


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


@on_ranks(1, fresh=True, env={"READ_EARLY": "1"})
def test_a_fresh_rank_has_its_environment_from_the_start():
    assert Path("/proc/self/environ").read_bytes().count(b"READ_EARLY=1") == 1


@pytest.mark.usefixtures("float64")
@on_ranks(1)
def test_ranks_have_the_default_dtype_of_the_test():
    assert torch.get_default_dtype() is torch.float64

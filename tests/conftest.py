# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures and hooks."""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    from rank_pool import RankPool, Ranks

TESTS = Path(__file__).parent
# More tests than this that were repeated after a native crash fail the run: then it is no rare accident.
MOST_REPEATS = 3
repeated: set[str] = set()
# What is imported for the collection of the tests is no garbage.
gc.disable()
# pyarrow's allocator would start a thread in the process that the ranks are forked from.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS / "engines" in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    freeze_living_objects()


def freeze_living_objects() -> None:
    """Take what has been imported out of the garbage collector's sight.

    It lives as long as the process. Each full collection, and each forked worker of a loader, would visit a million
    objects, for a second.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test again, once, if a rank of it crashed in a native thread; the crash stays among the warnings.

    One of gloo's threads in torch 2.13 crashes about once in 50,000 cases. The next attempt tells that from a defect.
    """
    from rank_pool import NATIVE_CRASH

    names = {"nodeid": item.nodeid, "location": item.location}
    item.ihook.pytest_runtest_logstart(**names)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed and NATIVE_CRASH in report.longreprtext for report in reports):
        # Its fixtures have been taken down.
        item._initrequest()  # type: ignore[attr-defined]
        item.user_properties.append(("repeated", True))
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(**names)
    if nextitem is None or nextitem.path != item.path:
        freeze_living_objects()
    return True


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Called in the controller of pytest-xdist too.
    if ("repeated", True) in map(tuple, report.user_properties):
        repeated.add(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(repeated) > MOST_REPEATS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"{len(repeated)} tests repeated after a crash in a native thread (at most {MOST_REPEATS})"
    )
    for nodeid in sorted(repeated):
        terminalreporter.write_line(f"  {nodeid}")


@pytest.fixture(autouse=True)
def no_state_of_other_tests() -> None:
    """Reset the process-wide state, so that no test depends on the order of tests."""
    # A module that is not imported has no state; importing it here would import torch.
    if "accelerate.state" in sys.modules:
        from states import reset_states

        reset_states()


@pytest.fixture(scope="session")
def rank_pool() -> RankPool:
    """The process from which the ranks of all tests are forked."""
    from rank_pool import RankPool

    return RankPool.shared()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> Callable[..., Ranks]:
    """`ranks(nproc).run(function, *args)` calls a function on each of several ranks; see `helpers/rank_pool.py`."""
    from rank_pool import MARGIN, Ranks

    limit = _limit_of(request.node)
    deadline = time.monotonic() + max(limit - MARGIN, limit / 2) if limit else float("inf")
    return functools.partial(Ranks, rank_pool, deadline=deadline)


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """float64 as the default dtype, on the ranks as well."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _limit_of(item: pytest.Item) -> float:
    """The time limit of a test in seconds; 0 for none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and (marker.args or "timeout" in marker.kwargs):
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    option = item.config.getoption("timeout", None)
    return float(option if option is not None else item.config.getini("timeout") or 0)

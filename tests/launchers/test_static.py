# SPDX-License-Identifier: Apache-2.0
"""Launchers with fixed ranks meet in a store before each attempt. Threads stand for machines here."""

import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore

from accelerate.core.errors import ConfigurationError, LaunchError
from accelerate.launchers.shared_store import LOOK
from accelerate.launchers.spec import LaunchSpec, Program
from accelerate.launchers.static import Machines


def launch(machine, machines=2, timeout=1, **options):
    spec = LaunchSpec(
        Program("script.py"),
        num_processes=machines,
        num_machines=machines,
        machine_rank=machine,
        rdzv_conf=f"join_timeout={timeout}",
    )
    return spec._replace(**options)


def meet(launchers, attempt=0):
    """Let launchers meet at the same time; what each has raised."""
    errors = [None] * len(launchers)

    def run(index):
        try:
            launchers[index].meet(attempt)
        except Exception as error:
            errors[index] = error
        launchers[index].unfollow()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(launchers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return errors


def test_all_machines_start_each_attempt():
    store = HashStore()
    launchers = [Machines(launch(machine, 3), store) for machine in range(3)]
    for attempt in range(3):
        assert meet(launchers, attempt) == [None] * 3


@pytest.mark.parametrize("attempt", [0, 1, 2])
def test_a_machine_that_does_not_come_is_named_once_the_limit_is_over(attempt):
    """A message of another attempt is none of this one, whatever its number."""
    store = HashStore()
    launchers = [Machines(launch(machine), store) for machine in range(2)]
    for other in {0, 1, 2} - {attempt}:
        assert meet(launchers, other) == [None, None]
    began = time.monotonic()
    (error,) = meet(launchers[:1], attempt)
    assert 1 <= time.monotonic() - began < 5
    assert isinstance(error, LaunchError) and "machine 1 of 2" in str(error)
    # Whoever comes too late gets the same answer.
    (late,) = meet(launchers[1:], attempt)
    assert isinstance(late, LaunchError) and str(late) == str(error)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"num_processes": 4}, ["--num_processes 4", "has 2", "machine 1"]),
        ({"max_restarts": 3}, ["--max_restarts 3", "has 0"]),
        ({"machine_rank": 0}, ["--machine_rank 0", "two machines"]),
    ],
)
def test_machines_that_disagree_are_refused(options, facts, monkeypatch):
    store = HashStore()
    first, second = Machines(launch(0), store), Machines(launch(1, **options), store)
    if "machine_rank" in options:
        monkeypatch.setattr("os.getpid", iter(range(100)).__next__)
    for error in meet([first, second]):
        assert isinstance(error, ConfigurationError)
        assert all(fact in str(error) for fact in facts)


def test_the_first_failure_is_that_of_all_machines():
    store = HashStore()
    launchers = [Machines(launch(machine), store) for machine in range(2)]
    meet(launchers)
    for launcher in launchers:
        launcher.follow(launcher.store)
    launchers[1].failed("rank 1 failed", 7)
    launchers[0].failed("rank 0 failed", 1)
    stops = []
    time.sleep(4 * LOOK)
    for launcher in launchers:
        launcher.tick(lambda *stop: stops.append(stop))
        launcher.unfollow()
    assert stops == [("rank 1 failed", 7, False)] * 2
    # The next attempt knows nothing of it.
    assert meet(launchers, 1) == [None, None]
    assert not launchers[0].look(launchers[0].store).failure


def test_a_machine_without_a_sign_of_life_is_lost(monkeypatch):
    monkeypatch.setattr("accelerate.launchers.static.SILENCE", 0.5)
    store = HashStore()
    launchers = [Machines(launch(machine), store) for machine in range(2)]
    meet(launchers)
    launchers[0].follow(launchers[0].store)
    time.sleep(0.5 + 4 * LOOK)
    launchers[0].unfollow()
    report, code, final = launchers[0].news.failure
    assert "machine 1 " in report and code == 1 and final


def test_stores_of_attempts_are_apart():
    store = HashStore()
    PrefixStore("accelerate/attempt/1", store).set("answer", "{}")
    assert not PrefixStore("accelerate/attempt/11", store).check(["answer"])

# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks through the store: a rank is absent, late, in another call or gone, or the store is."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from states import all_ranks

from accelerate.core.errors import CheckpointError
from accelerate.runtime import agreement, group
from accelerate.runtime.agreement import (
    Agreement,
    Connection,
    Outcome,
    Round,
    StoreLostError,
    first,
)
from accelerate.state import PartialState

WORLD = 3
# Seconds: a limit that is meant to pass (on a clock that waits for the ranks that come), and one that is not.
SHORT, LONG = 1.0, 100.0
on_three = on_ranks(WORLD)


def my_rank():
    return PartialState(cpu=True).process_index


def others(rank):
    return [other for other in range(WORLD) if other != rank]


def store():
    return dist.group.WORLD.get_group_store()


def wait_for(*keys):
    store().wait(list(keys), timedelta(seconds=LONG))


@contextmanager
def limit_passes_without(victim, round_="test/0"):
    """A clock that goes on when all other ranks have given their values, however busy the machine is."""
    keys = [f"agree/{round_}/{rank}" for rank in others(victim)]

    def pauses(ranks, limit):
        while not store().check(keys):
            yield 0.0
            time.sleep(1e-3)
        for waited in itertools.count(SHORT + 0.1, SHORT):
            yield waited
            time.sleep(1e-2)

    with mock.patch.object(agreement, "pauses", pauses):
        yield


def exchange(timeout=LONG, name="test"):
    """A round in which each rank gives ten times its number."""
    return Round(name).exchange(
        "numbers", 10 * my_rank(), timeout, lambda values: list(values.values())
    )


def all_present():
    return Outcome([10 * rank for rank in range(WORLD)])


@on_three
def test_values_of_all_ranks():
    me = my_rank()
    for _ in range(3):
        assert exchange() == all_present()
        assert exchange(name="another") == all_present()
        if me != 1:
            assert Round("pair", (0, 2)).exchange("numbers", me, LONG, first) == Outcome(0)
    all_ranks(None)
    before = store().num_keys()
    all_ranks(None)
    for _ in range(20):
        assert exchange() == all_present()
    all_ranks(None)
    assert store().num_keys() <= before + WORLD, "former rounds are removed"


@on_three
@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_is_absent_and_comes_later(victim):
    """It learns what the others decided, and the next round has all."""
    me = my_rank()
    assert exchange() == all_present()
    if me == victim:
        wait_for(*(f"done/{rank}" for rank in others(victim)))
    with limit_passes_without(victim, "test/1"):
        outcome = exchange(SHORT)
    store().set(f"done/{me}", "1")
    assert outcome.absent == f"rank {victim}" and not outcome.ended and outcome.refused is None
    assert outcome.waited >= SHORT
    assert all_ranks(outcome) == [outcome] * WORLD
    assert exchange() == all_present()


@on_three
@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_comes_late_but_in_time(victim):
    me = my_rank()
    if me == victim:
        wait_for(*(f"agree/test/0/{rank}" for rank in others(victim)))
    assert exchange() == all_present()


@on_three
@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_is_in_a_collective(victim):
    me = my_rank()
    total = torch.ones(1)
    if me == victim:
        dist.all_reduce(total)
    with limit_passes_without(victim):
        outcome = exchange(SHORT)
    if me != victim:
        dist.all_reduce(total)
    assert total.item() == WORLD
    assert outcome.absent == f"rank {victim}"
    assert exchange() == all_present()


@on_three
def test_a_rank_is_in_another_exchange():
    me = my_rank()
    with pytest.raises(CheckpointError) as raised:
        Agreement(PartialState()).exchange("load" if me == 1 else "save", None, LONG)
    assert str(raised.value).endswith("ranks 0, 2: save; rank 1: load")
    assert Agreement(PartialState()).exchange("save", me, LONG, reduce=max) == 2


@on_three
@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_raises(victim):
    """The others raise its error; they do not wait for it."""
    me = my_rank()
    ranks = Agreement(PartialState())
    if me == victim:
        ranks.refuse(f"rank {me}: ValueError: no such column")
    else:
        with pytest.raises(CheckpointError, match=f"^rank {victim}: ValueError: no such column$"):
            ranks.exchange("save", me, LONG)
    assert ranks.exchange("save", me, LONG, reduce=max) == 2


@on_three
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_has_ended(victim):
    """Nobody waits for the limit."""
    if my_rank() == victim:
        group.leave()
        return
    with limit_passes_without(victim):
        outcome = exchange()
    assert outcome.absent == outcome.ended == f"rank {victim}" and outcome.waited < LONG / 2
    with pytest.raises(
        CheckpointError,
        match=f"rank {victim} .*`save` and has ended",
    ):
        Agreement(PartialState()).exchange("save", None, LONG, "Look at its log.")


@on_three
@pytest.mark.parametrize("victim", range(WORLD))
def test_a_message_names_the_absent_rank(victim):
    me = my_rank()
    ranks = Agreement(PartialState())
    if me == victim:
        wait_for(*(f"done/{rank}" for rank in others(victim)))
    message = (
        rf"rank {me}: rank {victim} did not reach `save` within \d+ s\. It may be out of memory\.$"
    )
    with (
        pytest.raises(CheckpointError, match=message),
        limit_passes_without(victim, "checkpoint/0"),
    ):
        ranks.exchange("save", None, SHORT, "It may be out of memory.")
    store().set(f"done/{me}", "1")


HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lost_store():
    """A connection to a store whose process is killed as soon as rank 0 has given its first value."""
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        port = int(host.stdout.readline())
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

        def kill():
            client.clone().wait(["agree/test/0/0"], timedelta(seconds=LONG))
            host.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        yield Connection(client)
        host.kill()
        killer.join()


def test_the_store_is_gone(lost_store):
    with pytest.raises(StoreLostError):
        Round("test", (0, 1), 0, lost_store).exchange("numbers", 1, LONG)

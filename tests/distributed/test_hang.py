# SPDX-License-Identifier: Apache-2.0
"""A run that stands still explains itself: who waits where, for whom, and whether that rank computes."""

import ctypes
import logging
import os
import re
import signal
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from ranks import run_ranks

from accelerate import Accelerator
from accelerate.runtime import communication, hang_watch
from accelerate.utils import InitProcessGroupKwargs

EXAMPLES = Path(__file__).parents[2] / "examples" / "debugging"


def compute(store, key):
    while not store.check([key]):
        for _ in range(10):
            torch.ones(256, 256) @ torch.ones(256, 256)


def wait(store, key):
    """A wait in the operating system, in which nothing computes."""
    store.wait([key])


@on_ranks(3, env={"ACCELERATE_HANG_REPORT": "2"})
def test_a_slow_rank_is_told_from_one_that_waits(tmp_path):
    """Rank 2 does not come to a collective, or an agreement, until the report of rank 0 is out."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    store = dist.distributed_c10d._get_default_store().clone()
    accelerator.wait_for_everyone()
    scenes = [
        (compute, "The run waits: rank 2 is still computing in `compute`", lambda: accelerator.gather(torch.ones(2))),
        (
            wait,
            "The run stands still: rank 2 is in `wait`",
            lambda: accelerator.backward(model(torch.ones(1, 4)).sum()),
        ),
        (wait, "The run stands still: rank 2 is in `wait`", lambda: accelerator.save_state(tmp_path / "c")),
    ]
    for number, (late, words, collective) in enumerate(scenes):
        key, reports = f"test/{number}", []
        if accelerator.process_index == 2:
            late(store, key)
        else:
            hang_watch.on_report[:] = [reports.append, lambda text, key=key: store.set(key, "reported")]
        collective()
        accelerator.wait_for_everyone()
        if accelerator.process_index == 0:
            (text,) = reports
            assert text.startswith(f"{words} ({__file__}:"), text
            place = ("`accelerator.gather`", "all_reduce of `accelerator.backward`", "`accelerator.save_state`")[
                number
            ]
            assert "ranks 0, 1 have waited " in text and f" in {place} ({__file__}:" in text, text
            assert "Every rank must call" not in text
        elif accelerator.process_index == 1:
            assert reports == []
    accelerator.end_training()
    assert hang_watch._Watch.running is None
    assert "accelerate-hang-watch" not in [thread.name for thread in threading.enumerate()]


def test_a_mismatch_is_explained_and_ends_by_the_limit():
    """examples/debugging/hang.py: a collective under an `if`."""
    # The timeout comes before a second report.
    limits = {"ACCELERATE_HANG_REPORT": "4", "ACCELERATE_COLLECTIVE_TIMEOUT": "7"}
    first, second = run_ranks(EXAMPLES / "hang.py", 2, env=limits, check=False, timeout=60)
    # Rank 0 reports, unless its thread is late.
    report, silent = (first, second) if "stands still" in first.stderr else (second, first)
    assert "stands still" not in silent.stderr, silent.stderr
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    for words in (
        "rank 0 waits in `accelerator.reduce` (",
        "rank 1 waits in all_reduce of `accelerator.backward` (",
        "differs: reduce of float32 [] on rank 0, all_reduce of float32 [9] on rank 1",
        "Every rank must call the same collectives in the same order",
    ):
        assert words in report.stderr, report.stderr
    words = "CommunicationError: rank 0: the connection to another rank failed in `reduce`"
    assert words in first.stderr, first.stderr
    # One rank is a batch ahead because of the mistake.
    assert "Uneven batches?" not in first.stderr + second.stderr


@pytest.mark.thorough
def test_a_slow_rank_does_not_end_the_run():
    """examples/debugging/straggler.py."""
    first, _ = run_ranks(EXAMPLES / "straggler.py", 2, env={"ACCELERATE_HANG_REPORT": "2"}, timeout=60)
    assert "The run waits: rank 1 is still computing in `augment` (" in first.stderr, first.stderr
    assert "rank 0 has waited " in first.stderr and "trained 8 steps" in first.stdout


def doze(store, key):
    """A loop that is mostly asleep."""
    pause = threading.Event()
    while not store.check([key]):
        pause.wait(0.05)


def lock(store, key):
    """A wait for a thread, while others compute."""
    threads = [threading.Thread(target=compute, args=(store.clone(), key)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hold(store, key):
    """A call that holds the interpreter lock until a signal comes: that with which the others ask for its stacks."""
    ctypes.PyDLL(None).pause()


def stop(store, key):
    """The process is stopped until rank 0 lets it continue."""
    os.kill(os.getpid(), signal.SIGSTOP)
    wait(store, key)


@on_ranks(3, env={"ACCELERATE_HANG_REPORT": "2"})
def test_what_a_rank_does_that_the_others_wait_for(tmp_path):
    """Also: who waits for a message, the end of a stand-still, and the files with the stacks."""
    accelerator = Accelerator(cpu=True)
    rank, late = accelerator.process_index, 2
    store = dist.distributed_c10d._get_default_store().clone()
    store.set(f"test/pid/{rank}", str(os.getpid()))
    accelerator.wait_for_everyone()
    tempfile.tempdir = str(tmp_path)
    ends, over = [], threading.Event()

    def note(record):
        ends.extend(re.findall(r"^The run continues after \d+ s\.$", record.getMessage()))
        if len(ends) == len(scenes):
            over.set()

    handler = logging.Handler()
    handler.emit = note
    logging.getLogger(hang_watch.__name__).addHandler(handler)

    def receive():
        if rank == late:
            dist.send(torch.ones(1), 0)
            dist.send(torch.ones(1), 1)
        else:
            work = dist.irecv(torch.ones(1), late)
            work.wait()

    pid = int(store.get(f"test/pid/{late}"))
    gather = ("`accelerator.gather`", lambda: accelerator.gather(torch.ones(2)))
    scenes = [
        (doze, f"The run waits: rank 2 is still active in `doze` ({__file__}:", *gather),
        (lock, f"The run waits: rank 2 is in `lock` ({__file__}:", *gather),
        (
            stop,
            f"The run stands still: rank 2 is stopped (process {pid}): SIGSTOP, or a debugger; ",
            *gather,
        ),
        (hold, f"The run stands still: rank 2 is in a call that holds the interpreter lock ({__file__}:", *gather),
        (wait, f"The run stands still: rank 2 is in `wait` ({__file__}:", "a collective", receive),
    ]
    for number, (how, words, place, collective) in enumerate(scenes):
        key, reports, told = f"test/{number}", [], threading.Event()

        def release(text, key=key, how=how, told=told):
            store.set(key, "reported")
            told.set()
            if how is stop:
                os.kill(pid, signal.SIGCONT)

        if rank == late:
            how(store, key)
        else:
            hang_watch.on_report[:] = [reports.append, release]
        collective()
        accelerator.wait_for_everyone()
        if rank == 0:
            # Rank 2 may be let go on before the report is out.
            assert told.wait(60)
            (text,) = reports
            assert text.startswith(words), text
            assert re.search(rf"ranks 0, 1 have waited \d s in {re.escape(f'{place} ({__file__}')}:", text), text
            assert ("mostly asleep" in text) == (how is doze) and ("other threads compute" in text) == (how is lock)
    if rank == late:
        store.wait(["test/over"])
    elif rank == 0:
        assert over.wait(60), ends
        store.set("test/over", "yes")
        folder = Path(text.rpartition("of each rank: ")[2].removesuffix(" (on its machine)"))
        assert folder.parent == tmp_path
        pages = [(folder / f"rank_0000{number}.txt").read_text() for number in range(3)]
        assert all(f"  gather float32 [2]  {__file__}:" in page for page in pages), pages
        assert "Thread MainThread, most recent call last:" in pages[1] and "work.wait()" in pages[1], pages[1]
        assert ", in wait\n    store.wait([key])" in pages[2], pages[2]
    accelerator.wait_for_everyone()
    assert hang_watch._Watch.running.limit == 2
    accelerator.end_training()


MISMATCH = """
import os, sys, torch, torch.distributed as dist
from accelerate import Accelerator
from accelerate.runtime import hang_watch
accelerator = Accelerator(cpu=True)
hang_watch.on_report.append(lambda text: (print(hang_watch._Watch.running.limit, text, flush=True), os._exit(7)))
if accelerator.process_index == 0:
    accelerator.gather(torch.ones(4))
else:
    dist.all_reduce(torch.ones(3))
"""


def test_a_mismatch_is_reported_long_before_the_limit():
    """A collective of torch against one of this package; rank 0 reports, whichever rank has found out."""
    limits = {"ACCELERATE_HANG_REPORT": "50", "ACCELERATE_COLLECTIVE_TIMEOUT": "80"}
    first, second = run_ranks(MISMATCH, 2, env=limits, check=False, timeout=100)
    assert first.returncode == 7, (first, second)
    limit, _, text = first.stdout.partition(" ")
    assert float(limit) == 40
    assert "differs: gather of float32 [4] on rank 0, all_reduce of float32 [3] on rank 1" in text
    assert int(re.match(r"The run stands still for (\d+) s: ", text)[1]) < 20, text


@on_ranks(2)
def test_the_limit_and_the_end_of_the_watch():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=90))])
    watch = hang_watch._Watch.running
    # The report, with the time for two looks and the answers, comes within a minute, and before the timeout.
    assert watch.limit == 45 and hang_watch.LIMIT + 4 * hang_watch.INTERVAL + 3 <= 60
    accelerator.wait_for_everyone()
    text = communication.explanation("`gather`", RuntimeError("Connection closed by peer"))
    rank = accelerator.process_index
    assert f"The last collectives of rank {rank} before it: wait_for_everyone ({__file__}:" in text, text
    accelerator.wait_for_everyone()
    if rank == 0:
        # As a failed process that hosts the store.
        hang_watch.announce_end(dist.distributed_c10d._get_default_store())
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    accelerator.end_training()

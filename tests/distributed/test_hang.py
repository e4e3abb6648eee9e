# SPDX-License-Identifier: Apache-2.0
"""A run that stands still explains itself: who waits where, for whom, and where that rank is."""

import logging
import os
import re
import signal
import subprocess
import sys
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


def child(store, key):
    """A child process that computes, as of an evaluation: no report for several times the limit."""
    code = "import time; end = time.monotonic() + 7\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


def stop(store, key):
    """The process is stopped until rank 0 lets it continue."""
    os.kill(os.getpid(), signal.SIGSTOP)
    wait(store, key)


@on_ranks(3, env={"ACCELERATE_HANG_REPORT": "2"})
def test_where_the_ranks_are_that_do_not_come(tmp_path):
    """Rank 2 does not come to a collective until the report of rank 0 is out.

    Also: the end of a stand-still, the files with the stacks, and that a call of the system is not interrupted.
    """
    accelerator = Accelerator(cpu=True)
    rank, late = accelerator.process_index, 2
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    store = dist.group.WORLD.get_group_store().clone()
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

    def gather():
        accelerator.gather(torch.ones(2))

    pid = int(store.get(f"test/pid/{late}"))

    def backward():
        accelerator.backward(model(torch.ones(1, 4)).sum())

    scenes = [
        (
            compute,
            r"has waited \d+ s:\n  - rank 2 is in `compute` \(\S*test_hang.py:",
            "`gather`",
            gather,
        ),
        (
            wait,
            r"has waited \d+ s:\n  - rank 2 .* 0\.\d s of CPU time",
            "all_reduce of `accelerator.backward`",
            backward,
        ),
        (wait, r"has waited \d+ s:\n  - rank 2 is in `wait`", "`gather`", gather),
        (
            stop,
            rf"stands still for \d+ s:\n  - rank 2 is stopped \(process {pid}\): SIGSTOP",
            "`gather`",
            gather,
        ),
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
            assert re.match(f"The run {words}", text), text
            assert re.search(rf"ranks 0, 1 wait in {place} \(\S*test_hang.py:", text), text
            assert "Every rank must call" not in text
            if number == 2:
                folder = Path(
                    text.rpartition("of each rank: ")[2].removesuffix(" (on its machine)")
                )
                assert folder.parent == tmp_path
                pages = [(folder / f"rank_0000{rank}.txt").read_text() for rank in range(3)]
                assert all(
                    "  gather float32 [2]  " in page and "test_hang.py:" in page for page in pages
                ), pages
                assert (
                    f'File "{__file__}"' in pages[1]
                    and " in gather" in pages[1]
                    and " in wait" in pages[2]
                ), pages
        elif rank == 1:
            assert reports == []
    if rank == late:
        store.wait(["test/over"])
    elif rank == 0:
        assert over.wait(60), ends
        store.set("test/over", "yes")
    hang_watch.on_report[:] = [lambda text: ends.append(text)]
    count = len(ends)
    if rank == late:
        child(store, "")
    accelerator.wait_for_everyone()
    assert len(ends) == count, ends
    accelerator.end_training()
    left = [
        path
        for path in tmp_path.glob("accelerate-hang-*")
        if (path / f"rank_0000{rank}.txt").exists()
    ]
    assert left == []
    assert hang_watch.HangWatch.running is None
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
        "rank 0 waits in `reduce` (",
        "rank 1 waits in all_reduce of `accelerator.backward` (",
        "differs: reduce of float32 [] on rank 0, all_reduce of float32 [9] on rank 1",
        "Every rank must call the same collectives in the same order",
    ):
        assert words in report.stderr, report.stderr
    words = "CommunicationError: rank 0: the wait for another rank timed out in `reduce`"
    assert words in first.stderr, first.stderr
    # One rank is a batch ahead because of the mistake.
    assert "Uneven batches?" not in first.stderr + second.stderr


@pytest.mark.thorough
def test_a_slow_rank_does_not_end_the_run():
    """examples/debugging/straggler.py."""
    first, _ = run_ranks(
        EXAMPLES / "straggler.py", 2, env={"ACCELERATE_HANG_REPORT": "2"}, timeout=60
    )
    assert re.search(r" \d s:\n  - rank 1 is in `augment` \(", first.stderr), first.stderr
    assert "trained 8 steps" in first.stdout


MISMATCH = """
import os, sys, torch, torch.distributed as dist
from accelerate import Accelerator
from accelerate.runtime import hang_watch
accelerator = Accelerator(cpu=True)
hang_watch.on_report.append(lambda text: (print(hang_watch.HangWatch.running.limit, text, flush=True), os._exit(7)))
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
    assert "gather of float32 [4] on rank 0" in text
    assert "all_reduce of float32 [3] on rank 1" in text
    assert int(re.match(r"The run stands still for (\d+) s:", text)[1]) < 20, text


@on_ranks(2)
def test_the_limit_and_the_end_of_the_watch():
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=90))]
    )
    watch = hang_watch.HangWatch.running
    # The report, with the time for two looks and the answers, comes within a minute, and before the timeout.
    assert watch.limit == 45 and hang_watch.LIMIT + 4 * hang_watch.INTERVAL + 3 <= 60
    accelerator.wait_for_everyone()
    text = communication.explanation("`gather`", RuntimeError("Connection closed by peer"))
    rank = accelerator.process_index
    assert f"The last collectives of rank {rank} before it: wait_for_everyone (" in text, text
    accelerator.wait_for_everyone()
    if rank == 0:
        # As a failed process that hosts the store.
        hang_watch.announce_end(dist.group.WORLD.get_group_store())
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    accelerator.end_training()

# SPDX-License-Identifier: Apache-2.0
"""The rank that is named as the cause of a failed run: real ranks that leave in many ways, and tracebacks."""

import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest
from machines import LAUNCH, clean_environment

from accelerate.core.errors import LOST_CONNECTION
from accelerate.launchers import failure
from accelerate.launchers.failure import (
    End,
    Failure,
    cause_of,
    comparable,
    first_failure,
    message_of,
    points_elsewhere,
)
from accelerate.runtime import communication

COMMAND = [*LAUNCH, "--num_processes", "2"]


@pytest.fixture
def launch(tmp_path):
    """Launch a script given as text on two ranks; its end, with the report in `report`."""

    def run(source, *args, load=0, timeout=120):
        script, report = tmp_path / "script.py", tmp_path / "error.json"
        script.write_text(textwrap.dedent(source))
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            done = subprocess.run(
                [*COMMAND, "--error_file", str(report), str(script), *map(str, args)],
                env=clean_environment(tmp_path, OMP_NUM_THREADS="1"),
                capture_output=True, text=True, timeout=timeout,
            )  # fmt: skip
        finally:
            for process in busy:
                process.kill()
                process.wait()
        done.report = json.loads(report.read_text()) if report.exists() else None
        return done

    return run


LEAVE = """
import atexit, os, signal, sys, threading
import torch
from accelerate import Accelerator

way, who = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator()

def fail():
    raise ValueError("beside the main thread")

def leave():
    if way == "exit":
        sys.exit(0)
    elif way == "_exit":
        os._exit(0)
    elif way == "atexit":
        atexit.register(fail)
        sys.exit(0)
    elif way == "thread":
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        sys.exit(0)
    elif way == "text":
        raise SystemExit("the reason")
    elif way == "code":
        sys.exit(3)
    elif way == "abort":
        os.abort()
    elif way == "interrupt":
        raise KeyboardInterrupt
    elif way == "end":
        try:
            raise ValueError("with an end that is in order")
        finally:
            accelerator.end_training()
    else:
        os.kill(os.getpid(), getattr(signal, way))

for step in range(4):
    if step == 2 and accelerator.process_index == who:
        leave()
    accelerator.reduce(torch.ones(1))
"""
EARLY = "it ended with exit code 0 while rank {other} still needed it"


# How a rank leaves, the exit code of the run and what is reported; who leaves is 0 or 1.
WAYS = {
    "exit": (1, EARLY),
    "text": (1, "exit code 1; the last line of its standard error: the reason"),
    "SIGKILL": (137, "SIGKILL"),
    "end": (1, "ValueError: with an end that is in order"),
    "_exit": (1, EARLY),
    "atexit": (1, EARLY),
    "thread": (1, EARLY),
    "code": (3, "it ended with exit code 3"),
    "abort": (134, "SIGABRT"),
    "interrupt": (130, "SIGINT"),
    "SIGTERM": (143, "SIGTERM"),
    "SIGSEGV": (139, "SIGSEGV"),
}
USUAL = {("exit", 0), ("SIGKILL", 1)}


@pytest.mark.parametrize(
    ("way", "who"),
    [
        pytest.param(way, who, marks=() if (way, who) in USUAL else pytest.mark.thorough)
        for way in WAYS
        for who in (0, 1)
    ],
)
def test_the_rank_that_left_is_named(launch, way, who):
    code, cause = WAYS[way]
    done = launch(LEAVE, way, who)
    assert done.returncode == code, done.stderr
    assert (
        f"rank {who} failed: " in done.stderr
        and cause.format(other=1 - who) in done.report["cause"]
    ), done.stderr
    # Native code leaves no traceback, and faulthandler its stacks.
    line = next(at for at, text in enumerate(LEAVE.splitlines(), 1) if "os.abort()" in text)
    if way == "abort":
        assert re.search(rf"\(at .*\.py:{line}\)$", done.report["cause"], re.MULTILINE), (
            done.report["cause"]
        )
    assert done.report["rank"] == who and done.report["exit_code"] == code
    assert set(done.report["others"]) == {str(1 - who)}
    assert done.stderr.count("\n  other ranks: ") == 1


def test_an_error_that_all_ranks_raise_is_that_of_the_rank_it_began_on(launch, tmp_path):
    for name in ("shown", "alive"):
        os.mkfifo(tmp_path / name)
    done = launch(
        """
        import atexit, os
        from pathlib import Path

        os.chdir(Path(__file__).parent)

        def wait():
            # Registered first, so that it runs last: after the traceback and the end of the process group. Then rank 0
            # raises its error. This rank ends after it, as the launcher stops others some seconds after the first end.
            with open("alive") as alive:
                open("shown", "w").close()
                alive.read()

        if os.environ["RANK"] == "1":
            atexit.register(wait)
        else:
            alive = os.open("alive", os.O_RDWR)

        from accelerate import Accelerator

        accelerator = Accelerator()

        class State:
            def state_dict(self):
                if accelerator.process_index == 0:
                    raise ValueError("no state")
                return {}

            def load_state_dict(self, state):
                pass

        accelerator.register_for_checkpointing(State())
        try:
            accelerator.save_state("checkpoint")
        except BaseException:
            if accelerator.process_index == 0:
                open("shown").close()
            raise
        """
    )
    assert done.returncode == 1 and done.report["rank"] == 0, done.stderr
    assert "rank 0: ValueError: no state" in done.report["cause"]
    assert done.report["others"] == {"1": "failed with the same error"}


HANG = f"""
import os, signal, sys, time
sys.path.append({str(Path(__file__).parents[1] / "helpers")!r})
import torch, torch.distributed as dist, without_compiler
from accelerate import Accelerator

way = sys.argv[1]
accelerator = Accelerator()

class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if accelerator.process_index == 1 and way == "backward":
            # A collective under way that the other rank does not join.
            dist.all_reduce(torch.ones(1), async_op=True)
            raise ValueError("in backward")
        return gradient

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 37 and way == "worker":
            raise ValueError("in a worker")
        if index == 37 and way == "killed worker":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters()), torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2)
)
for step, batch in enumerate(loader):
    if accelerator.process_index == 0 and way == "backward" and step == 2:
        # A long evaluation, say.
        time.sleep(600)
    accelerator.backward(Fail.apply(model(batch)).sum() if step == 2 else model(batch).sum())
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("backward", "ValueError: in backward"),
        pytest.param("worker", "ValueError: in a worker", marks=pytest.mark.thorough),
        pytest.param("killed worker", "data loader|DataLoader worker", marks=pytest.mark.thorough),
    ],
)
def test_a_failed_run_ends_although_others_wait(launch, way, told):
    # A busy machine, too: there the ranks end one long after the other. The limit is far below rank 0's pause.
    done = launch(HANG, way, load=0 if way == "backward" else 2, timeout=150)
    assert done.returncode == 1, done.stderr
    assert any(text in done.report["cause"] for text in told.split("|")), done.stderr
    tracebacks = done.stderr.count("Traceback (most recent call last):\n") - done.stderr.count(
        "Original Traceback"
    )
    # torch raises the error about a killed worker from another one, at times.
    assert tracebacks - done.stderr.count("was the direct cause of the following") == 1, done.stderr


# --- what the text of a traceback says: whole messages, chains, and whose failure it is


GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:23985. This is typically ..."
LONG = (
    "Cannot apply: rank 1 did not call it.\n\nOperation: `accelerate.gather`\n"
    "Callers:\n  - Process 0: at a.py:3\n\nSet X."
)


def printed(error: BaseException, rank: int | None = None) -> str:
    """The text of an exception as Python writes it, marked as torch does it."""
    text = "".join(traceback.format_exception(error))
    return (
        text if rank is None else "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())
    )


def raised(make, cause=None):
    try:
        raise make from cause
    except BaseException as error:
        return error


def amid(first, second):
    """The second exception, raised while the first was handled."""
    try:
        try:
            raise first
        except BaseException:
            raise second  # noqa: B904
    except BaseException as error:
        return error


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(
    "error",
    [
        raised(ValueError("one line")),
        raised(RuntimeError(LONG)),
        raised(KeyError("the cause")),
        raised(ValueError("")),
        raised(ValueError("Wörter, 漢字 und \t mehr: " + 50 * "x ")),
        raised(SyntaxError("invalid syntax", ("s.py", 3, 1, "x = = 1\n"))),
    ],
    ids=lambda error: type(error).__name__ if isinstance(error, BaseException) else None,
)
def test_a_message_is_whole(error, rank):
    expected = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):
        expected = expected.splitlines()[-1]
    noise = "[rank0]:[W1122 05:27:48.6 socket.cpp:469] [c10d] timeout\n"
    assert message_of("before\n" + printed(error, rank) + noise, rank) == expected
    assert cause_of(1, printed(error, rank), rank) == expected


def test_lines_of_several_ranks_are_told_apart():
    one = printed(raised(ValueError("of one")), 1).splitlines()
    two = printed(raised(ValueError("of two")), 2).splitlines()
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    assert (
        message_of(mixed, 1) == "ValueError: of one"
        and message_of(mixed, 2) == "ValueError: of two"
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (raised(RuntimeError(GLOO)), True),
        (raised(ValueError("mine")), False),
        # The first cause counts, whatever failed on the way out.
        (amid(ValueError("mine"), RuntimeError(GLOO)), True),
        (raised(RuntimeError("the run has failed"), raised(RuntimeError(GLOO))), True),
        # Sockets of the script are not those between ranks.
        (raised(ConnectionResetError(104, "Connection reset by peer")), False),
        (raised(BrokenPipeError(32, "Broken pipe")), False),
        (
            raised(
                RuntimeError(
                    "Timed out\nrank 1: the connection to another rank failed in a collective"
                )
            ),
            True,
        ),
        # An error that every rank raises names the rank that it is about.
        (raised(RuntimeError("not saved: rank 0: ValueError: bad state")), True),
        (raised(RuntimeError("rank 1: the checkpoint was not saved: rank 0 did not come")), False),
    ],
)
def test_whose_failure_it_is(error, expected):
    assert points_elsewhere(printed(error), rank=1) == expected
    assert points_elsewhere(printed(error, 1), rank=1) == expected


def test_a_logged_warning_is_no_lost_connection():
    assert not points_elsewhere("retry: Connection refused\nretry: refused\na\nb\nc\n", 0)
    two = printed(raised(RuntimeError(GLOO))) + "survived\n" + printed(raised(ValueError("mine")))
    assert not points_elsewhere(two, 0)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        # The first in time whose output points to no other rank.
        (
            [
                (0, 1, 1.0, RuntimeError(GLOO)),
                (1, 1, 2.0, ValueError("mine")),
                (2, 1, 3.0, ValueError("late")),
            ],
            1,
        ),
        ([(0, 1, 1.0, RuntimeError(GLOO)), (1, -9, 2.0, None)], 1),
        # A rank that ended without an error before, where the others only lost the connection or name it.
        ([(0, 0, 1.0, None), (1, 1, 2.0, RuntimeError(GLOO))], 0),
        ([(0, 0, 1.0, None), (1, 1, 2.0, RuntimeError("waited for rank 0"))], 0),
        ([(0, 0, 1.0, None), (1, 1, 2.0, ValueError("mine"))], 1),
        ([(0, 0, 1.0, None), (1, 0, 2.0, None)], None),
    ],
)
def test_the_first_failure(ends, cause):
    found = first_failure(
        [
            End(rank, code, at, printed(raised(error)) if error else "")
            for rank, code, at, error in ends
        ]
    )
    assert (found and found.end.rank) == cause


def test_how_the_other_ranks_ended():
    """The same error with other numbers is the same; the rank whose traceback is shown has no error of another."""
    same = [End(rank, 1, rank, printed(raised(ValueError(f"GPU {rank}")))) for rank in (0, 1)]
    stopped = End(2, -15, 3.0, "", by_itself=False)
    assert first_failure([*same, stopped]).others == {
        1: "failed with the same error",
        2: "stopped by the launcher",
    }
    early = [End(0, 0, 1.0, ""), End(1, 1, 2.0, printed(raised(RuntimeError(GLOO))))]
    assert "lost" in first_failure(early).others[1]


def test_the_summary_has_the_whole_cause_and_one_line_for_the_others():
    others = {0: "stopped", 2: "lost", 3: "stopped", **dict.fromkeys(range(4, 8), "lost")}
    end = End(1, -9, 0.0, "", pid=77, host="h", log="l.log")
    head, *cause, where, others = (
        Failure(end, end, f"RuntimeError: {LONG}", others).summary().splitlines()
    )
    assert "rank 1 failed: RuntimeError: Cannot apply" in head
    assert [line.removeprefix("    ") for line in cause] == LONG.splitlines()[1:]
    assert all(fact in where for fact in ("host h", "pid 77", "137", "l.log"))
    assert others.endswith("ranks 0, 3: stopped; ranks 2, 4-7: lost")
    # What the traceback above says is not repeated.
    end = End(1, 1, 0.0, f"before\n{failure.HEADER}\n{LONG}")
    below = Failure(end, end, f"{LONG}\nRemark.", {}).summary().splitlines()
    assert [line.strip() for line in below[1:-1]] == ["Remark."]
    assert not end.traceback.startswith("before")


# One message of a backend for each pattern of the table.
LOST_MESSAGES = [
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection was likely closed. Did the remote server shutdown or crash?",
    "Broken pipe",
    "remote process exited or there was a network error",
    "Socket closed",
    "Socket Timeout",
    "the pair is not connected",
    "Operation timed out",
    "Timed out waiting 1800000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "Writing to a pair that has failed",
    "[/pytorch/gloo/transport/tcp/pair.cc:553] failure",
    "gloo::IoException",
    "NCCL communicator was aborted on rank 1",
    "NCCL error in: ProcessGroupNCCL.cpp",
    "NCCL watchdog thread terminated",
    "Watchdog caught collective operation timeout",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier",
    "the communicator has been aborted",
    "recvValue failed",
    "torch.distributed.DistBackendError: failure",
    "torch.distributed.DistNetworkError: failure",
    "torch.distributed.DistStoreError: failure",
    "accelerate.core.errors.CommunicationError: failure",
    "rank 0: the connection to another rank failed in `gather`",
    "rank 0: the wait for another rank timed out in `gather`",
    "rank 0: the other ranks cannot be reached (save): reset",
    "the store of the run is gone",
]


@pytest.mark.parametrize("pattern", LOST_CONNECTION)
def test_a_rank_that_waits_is_not_blamed(pattern):
    """The launcher, and the rank itself, read every pattern of the table as the loss of another rank."""
    messages = [text for text in LOST_MESSAGES if re.search(pattern, text, re.IGNORECASE)]
    assert messages
    for message in messages:
        error = raised(RuntimeError(message))
        assert communication.is_lost(error)
        assert points_elsewhere(printed(error), 1) and points_elsewhere(printed(error, 1), 1)
        ends = [End(0, 1, 1.0, printed(error)), End(1, -9, 2.0, "")]
        assert first_failure(ends).end.rank == 1


def test_equal_tracebacks_of_ranks_are_recognized():
    """Numbers differ between ranks that fail alike; what they print afterwards is not part of it."""
    rank_texts = [
        printed(raised(RuntimeError(f"GPU {rank} has 0x7f{rank}c of 79.{rank} GiB")), rank)
        for rank in (0, 1)
    ]
    first, nothing = comparable(rank_texts[0], 0)
    assert first and nothing == ""
    assert comparable(rank_texts[1] + "goes on\n", 1) == (first, "goes on\n")
    other = printed(raised(RuntimeError("mine")), 1)
    assert comparable(other, 1)[0] != first
    assert comparable("no traceback\n", 1) == ("", "no traceback\n")


def test_where_native_code_has_ended_a_process():
    """The stacks as faulthandler writes them: the thread of the error may be one of native code."""
    package = Path(failure.__file__).parents[1]
    stacks = f"""\
what(): mismatch
Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
  File "/home/u/loader.py", line 3 in fetch

{{current}} (most recent call first):
{{own}}
Thread 0x00008f (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{package}/collectives/tensors.py", line 61 in gather
  File "/home/u/train.py", line 53 in step
  File "/home/u/train.py", line 90 in <module>

Extension modules: numpy._core (total: 1)
"""
    native = stacks.format(current="Current thread 0x00009f", own="  <no Python frame>\n")
    assert cause_of(-11, native).endswith("(at /home/u/train.py:53)")
    own = stacks.format(
        current="Current thread 0x00009f", own='  File "/home/u/worker.py", line 8 in work\n'
    )
    assert cause_of(-6, own).endswith("collectives (at /home/u/worker.py:8)")
    assert "(at" not in cause_of(-6, "Aborted")

# SPDX-License-Identifier: Apache-2.0
"""The rank that is named as the cause of a failed run, and that the run ends: real ranks that leave in many ways."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from machines import LAUNCH, clean_environment

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

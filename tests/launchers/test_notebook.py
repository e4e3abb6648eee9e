# SPDX-License-Identifier: Apache-2.0
"""`notebook_launcher` in a real Jupyter kernel (`make test-trackers`): output, errors, repeats, interrupt."""

import os
import re

import pytest

if os.environ.get("TRACKERS_REQUIRED"):
    import jupyter_client
else:
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")

DEFINITIONS = """
import os, sys, time, threading
from accelerate import notebook_launcher

def lines(count):
    for number in range(count):
        print("rank", os.environ["RANK"], "line", number, "x" * 70)
    print("an incomplete line", end="")

def cooperate():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    import torch
    print("sum", int(accelerator.reduce(torch.tensor(accelerator.process_index + 1))))
    if accelerator.process_index == 1:
        raise ValueError("its own error")
    accelerator.wait_for_everyone()

def wait():
    print("ready", flush=True)
    time.sleep(600)

def resources():
    import psutil
    kernel = psutil.Process()
    ports, children = kernel.net_connections(), kernel.children(recursive=True)
    return kernel.num_fds(), len(children), threading.active_count(), len(ports)
"""


class Kernel:
    def __init__(self):
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code, interrupt_at=None):
        """Run a cell: its stdout, and the text of its error."""
        printed, errors = [], []

        def collect(message):
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
                if interrupt_at is not None and "".join(printed).count(interrupt_at) == 2:
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                errors.append(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"])))

        self.client.execute_interactive(code, output_hook=collect, timeout=100)
        return "".join(printed), "".join(errors)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run(DEFINITIONS)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_lines_of_the_ranks_reach_the_cell_unbroken(kernel):
    printed, error = kernel.run("notebook_launcher(lines, (200,), num_processes=2)")
    assert error == ""
    expected = [
        f"rank {rank} line {number} {'x' * 70}" for rank in range(2) for number in range(200)
    ]
    assert sorted(re.findall(r"^(?:\[rank 1\] )?(rank .*)$", printed, re.MULTILINE)) == sorted(
        expected
    )
    assert printed.count("an incomplete line") == 2


def test_the_cell_shows_the_error_of_the_rank_and_its_traceback(kernel):
    printed, error = kernel.run("notebook_launcher(cooperate, num_processes=2)")
    assert printed.count("sum 3") == 2
    assert "LaunchError: rank 1 failed: ValueError: its own error" in error
    assert 'raise ValueError("its own error")' in error and ", in cooperate" in error
    assert error.count("launchers/") == 1, "at most one frame of the launcher"
    assert len(error.splitlines()) < 22, error


def test_five_launches_leave_nothing_behind(kernel):
    launch = "notebook_launcher(lines, (1,), num_processes=2)"
    kernel.run(f"{launch}; before = resources()")
    printed, error = kernel.run(
        f"for _ in range(5): {launch}\nprint('unchanged', before == resources(), before)"
    )
    assert error == "" and "unchanged True" in printed, printed


def test_an_interrupt_of_the_kernel_ends_the_ranks(kernel):
    printed, error = kernel.run("notebook_launcher(wait, num_processes=2)", interrupt_at="ready")
    assert "KeyboardInterrupt" in error and "LaunchError:" not in error, error
    printed, error = kernel.run("print(resources()[1])")
    assert (printed, error) == ("0\n", "")

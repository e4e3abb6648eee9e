# SPDX-License-Identifier: Apache-2.0
"""Every process ends with its own exit code, whatever it used and however it ends."""

import os
from collections import Counter

import pytest
from ranks import run_ranks

SCRIPT = """
import sys
import time
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(10, 10)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(10):
    accelerator.backward(model(torch.randn(4, 10)).sum())
    optimizer.step()
    optimizer.zero_grad()
way = sys.argv[1]
if way == "raise":
    raise RuntimeError("on every rank")
if way == "exit":
    sys.exit(3)
if way == "lone":
    if accelerator.is_main_process:
        raise RuntimeError("on one rank")
    accelerator.wait_for_everyone()
if way == "late" and accelerator.process_index:
    time.sleep(2.5)  # for longer than the watch of a run that stands still pauses
if way in ("end", "late"):
    accelerator.end_training()
    for call in (Accelerator, lambda: accelerator.gather(torch.ones(1))):
        try:
            call()
        except ValueError as error:
            assert "left the process group of its run" in str(error), error
        else:
            raise AssertionError("a call without a group")
"""

# Abort at exit struck about a third of the runs of plain DDP; 25 runs of 2 ranks are 50 exits. `EXITS=50` takes all of
# them (`make test-faults`), a run of the tests takes one run of each way, 12 exits.
RUNS = {
    "none": (10, 0),
    "end": (3, 0),
    "late": (3, 0),
    "raise": (3, 1),
    "exit": (3, 3),
    "lone": (3, 1),
}


ALL_EXITS = os.environ.get("EXITS") == "50"


@pytest.mark.timeout(3600 if ALL_EXITS else 700)
@pytest.mark.slow
@pytest.mark.parametrize(
    "fresh", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["forked", "fresh"]
)
def test_every_exit_is_clean(fresh):
    codes = Counter()
    for way, (runs, expected) in RUNS.items():
        for _ in range(runs if ALL_EXITS else 1):
            results = run_ranks(SCRIPT, 2, way, check=False, timeout=120, fresh=fresh)
            for result in results:
                codes[result.returncode == expected] += 1
                assert result.returncode == expected, f"{way}: {result.returncode}\n{result.stderr}"
                assert "terminate called" not in result.stderr
                assert "TCPStore" not in result.stderr  # torch logs a store that is gone
                assert (way in ("raise", "lone")) == ("Traceback" in result.stderr)
    assert codes == {True: 50 if ALL_EXITS else 12}


PENDING = """
import os
import select
import sys
import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 4))
store = dist.distributed_c10d._get_default_store()
if accelerator.process_index == int(sys.argv[1]):
    dist.all_reduce(torch.ones(4), async_op=True)
    store.set("pid", str(os.getpid()))
    sys.exit(3)
ended = os.pidfd_open(int(store.get("pid")))
assert select.select([ended], [], [], 60)[0]
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs to see another process end")
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_collective_under_way_does_not_hold_the_process(who):
    """The other rank never joins it: the process would wait until the group's timeout, half an hour."""
    results = run_ranks(PENDING, 2, who, check=False, timeout=90)
    assert results[who].returncode == 3, results[who].stderr
    assert results[1 - who].returncode == 0, results[1 - who].stderr

# SPDX-License-Identifier: Apache-2.0
"""`save_state` under `if is_main_process` with sharded models: the run ends within seconds, where it would hang.

The ranks have half a minute to come; `make test-faults` waits for it.
"""

from __future__ import annotations

import os
import time

import pytest
from ranks import run_ranks

WORKER = """
import sys, torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    accelerator.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process:
        accelerator.save_state(sys.argv[1])
"""


@pytest.mark.skipif(
    "KILLS" not in os.environ, reason="waits for half a minute; make test-faults runs it"
)
def test_a_rank_that_does_not_save_is_named_within_seconds(tmp_path):
    begin = time.monotonic()
    first, second = run_ranks(WORKER, 2, tmp_path / "c", check=False, timeout=170)
    assert time.monotonic() - begin < 120
    assert first.returncode and second.returncode
    assert "rank 1 did not reach `save_state`" in first.stderr
    assert "Every process must call it" in first.stderr
    assert not (tmp_path / "c").exists()

# SPDX-License-Identifier: Apache-2.0
"""State that differs between the ranks of a run: each rank's own comes back on as many processes."""

from __future__ import annotations

import pytest
from ranks import run_ranks

PROGRAM = """
import logging, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.checkpointing.manifest import read_manifest
from accelerate.core.errors import CheckpointError

class Own:
    def __init__(self, value): self.value = value
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
root, mode = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
model, optimizer = accelerator.prepare(model, optimizer)
same, own, large = Own("same"), Own(rank * 10), Own(torch.full((300,), float(rank)))
accelerator.register_for_checkpointing(same, own, large, scheduler)

if mode == "save":
    scheduler.step(1.0); scheduler.step(2.0 if rank == 1 else 0.5)
    for name, blocking in (("later", False), ("now", True)):
        accelerator.save_state(root / name, blocking=blocking)
    accelerator.wait_for_everyone()
    files = set(read_manifest(root / "now").files)
    expected = {"session.json"} | {f"session_rank_{r}.json" for r in range(1, world)}
    assert expected == {f for f in files if f.startswith("session") and f.endswith(".json")}, files
    text = (root / "now" / "session_rank_1.json").read_text()
    assert "same" not in text
    own.value = rank
    accelerator.save_state(root / "compat", layout="compat")
elif mode == "load":
    for name in ("now", "later"):
        same.value = own.value = large.value = None
        scheduler.best = -1.0
        accelerator.load_state(root / name)
        assert same.value == "same" and own.value == rank * 10, own.value
        assert torch.equal(large.value, torch.full((300,), float(rank)))
        assert scheduler.best == (1.0 if rank == 1 else 0.5), scheduler.best
elif mode == "other":
    rows = []
    class Keep(logging.Handler):
        def emit(self, record): rows.append(record.getMessage())
    logging.getLogger("accelerate").addHandler(Keep())
    accelerator.load_state(root / "now")
    assert own.value == 0 and torch.equal(large.value, torch.zeros(300))
    assert any("custom[1], custom[2], custom[3] differed between the 2 processes" in row for row in rows), rows
elif mode == "uneven":
    if rank == 1: accelerator.register_for_checkpointing(Own(1))
    try:
        accelerator.save_state(root / "uneven")
    except CheckpointError as error:
        assert "rank 0: 4 registered objects" in str(error) and "rank 1: 5" in str(error), error
    else:
        raise AssertionError("saved")
    assert not (root / "uneven").exists()
accelerator.end_training()
"""


def test_registered_objects_that_differ_come_back_on_each_rank(tmp_path):
    saved = run_ranks(PROGRAM, 2, str(tmp_path), "save")
    assert "has no place for the state of one rank" in str(saved)
    run_ranks(PROGRAM, 2, str(tmp_path), "load")
    run_ranks(PROGRAM, 1, str(tmp_path), "other")


@pytest.mark.thorough
def test_ranks_with_other_objects_are_refused_when_saving(tmp_path):
    run_ranks(PROGRAM, 2, str(tmp_path), "uneven")

# SPDX-License-Identifier: Apache-2.0
"""The text of a report from the statuses of the ranks, the ledger behind them, and places in a stack."""

import threading
from pathlib import Path

import torch

from accelerate.runtime import stacks
from accelerate.runtime.calls import Call, CollectiveLedger
from accelerate.runtime.hang_watch import compared, explain
from accelerate.torch_internals.flight_recorder import Recorded


def status(
    calls="",
    line="train.py:91",
    within="",
    pending=(),
    call=None,
    cpu=0.0,
    is_debugged=False,
    child="",
):
    pending = [
        {
            "group": "0/default_pg",
            "number": number,
            "operation": operation,
            "data": data,
            "is_p2p": False,
        }
        for number, operation, data in pending
    ]
    return {
        "calls": calls, "line": line, "within": within, "pending": pending, "recent": [], "before": [],
        "last": {one["group"]: one["number"] for one in pending}, "call": call, "seconds": 12.3, "cpu": cpu,
        "is_debugged": is_debugged,
        "child": child,
    }  # fmt: skip


def backward(shape="[9]"):
    return status("accelerator.backward", pending=[(57, "all_reduce", f"float32 {shape}")])


def gather(**options):
    return status(
        call={"operation": "gather", "data": "float32 [4]", "at": "train.py:88"}, **options
    )


def test_ranks_in_different_collectives():
    other = gather(pending=[(57, "all_to_all", "uint8 [64]")])
    lines = explain({0: backward(), 1: backward(), 2: backward(), 3: other}, {}).splitlines()
    assert lines[0].endswith(" 12 s:")
    assert lines[1] == "  - ranks 0-2 wait in all_reduce of `accelerator.backward` (train.py:91)"
    assert lines[2] == "  - rank 3 waits in `gather` (train.py:88)"
    assert lines[3].startswith("  - collective 57 of the process group 0/default_pg differs: ")
    operations = lines[3].partition("differs: ")[2]
    assert operations == ("all_reduce of float32 [9] on ranks 0-2, gather of float32 [4] on rank 3")
    assert "the same collectives" in lines[4]
    text = explain({0: backward(), 1: backward("[18]")}, {})
    assert "all_reduce of float32 [9] on rank 0" in text
    assert "all_reduce of float32 [18] on rank 1" in text
    assert "The ranks agree" in explain({0: backward(), 1: backward()}, {})


def test_ranks_that_are_not_in_a_collective():
    saves = status("save_state", "train.py:70", cpu=11.0)
    text = explain({0: saves, 1: gather(), 2: gather()}, {})
    assert " 12 s:\n  - rank 0 is in `save_state` (train.py:70), with 11.0 s of CPU" in text
    assert "ranks 1, 2 wait in `gather` (train.py:88)" in text and "Every rank" not in text
    text = explain({0: backward()}, {1: "has ended", 2: "", 3: "is stopped (process 7)"})
    assert " 12 s:\n  - no answer from rank 2 (stopped, killed" in text
    assert "\n  - rank 1 has ended\n  - rank 3 is stopped (process 7)" in text
    # A child process that computes is named.
    text = explain({0: status("run", child="77 (python work.py)"), 1: gather()}, {})
    assert "rank 0 is in `run`" in text and "77 (python work.py)" in text
    # Where no rank waits for another, or one is in a debugger.
    loads = status(within="load", line="train.py:20")
    assert explain({0: saves, 1: loads}, {}) is None and explain({0: loads}, {1: ""}) is None
    assert explain({0: status("run", is_debugged=True), 1: gather()}, {}) is None


def test_a_debugger_in_a_stack():
    debugger = (
        'Current thread 0x{:016x} (most recent call first):\n  File "{}", line 3 in interaction\n'
    )
    assert stacks.has_debugger(debugger.format(7, "/usr/lib/python3.11/pdb.py"), 7)
    assert not stacks.has_debugger(debugger.format(7, "/home/me/my_pdb.py"), 7)


def test_what_the_ranks_of_a_group_compare():
    """The last collectives up to the oldest that has not ended, with data where it must be the same."""

    def begun(number, operation, pending=False, group="0/pg", p2p=False):
        return Recorded(group, number, operation, f"float32 [{number}]", 1.0, pending, p2p)

    calls = [begun(number, "all_reduce") for number in range(1, 7)]
    calls += [begun(3, "send", p2p=True), begun(7, "all_to_all", True), begun(8, "broadcast", True)]
    calls += [begun(1, "all_gather", group="1/dp"), begun(2, "_all_gather_base", group="1/dp")]
    assert compared(calls) == {
        "0/pg/5": "all_reduce of float32 [5]", "0/pg/6": "all_reduce of float32 [6]", "0/pg/7": "all_to_all",
        "1/dp/1": "all_gather", "1/dp/2": "_all_gather_base of float32 [2]",
    }  # fmt: skip


def test_the_ledger_keeps_the_last_collectives():
    ledger = CollectiveLedger()
    for number in range(100):
        entry = ledger.enter(Call("gather", torch.ones(2, number)))
        entry.left = entry.entered
    assert ledger.current() is None and entry.data_in_words() == "float32 [2, 99]"
    last = ledger.enter(Call("reduce", [torch.ones(2)]))
    assert ledger.current() is last and last.file == __file__ and last.data_in_words() == "list"
    assert ledger.count == 101 and len(ledger.entries) == 64
    assert all(f"{Path(__file__).name}:" in text for text in ledger.ended(3))


def test_places():
    seen = {}

    def place():
        return stacks.place_in(stacks.dump(), threading.get_ident())

    class Model(torch.nn.Module):
        def forward(self, x):
            seen["forward"] = place()
            x.register_hook(lambda grad: seen.update({"<lambda>": place()}))
            return x * 2

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            seen["__getitem__"] = place()
            return torch.ones(1)

    for batch in torch.utils.data.DataLoader(Data()):
        Model()(batch.requires_grad_()).sum().backward()
    assert all(f"{Path(__file__).name}:" in place.line for place in seen.values()), seen
    assert stacks.place_in("", 1).line.startswith("no line")

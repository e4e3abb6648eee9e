# SPDX-License-Identifier: Apache-2.0
"""The text of a report from the statuses of the ranks, the ledger behind them, and places in a stack."""

import threading

import torch

from accelerate.runtime.calls import Call, ranks_in_words
from accelerate.runtime.hang_report import HAS_ENDED, IDLE, MOVES, WAITS, explain
from accelerate.runtime.ledger import SIZE, CollectiveLedger, in_words
from accelerate.runtime.place import place_of


def status(state, calls="", at="train.py:91", within="", pending=(), call=None, seconds=12.3):
    pending = [
        {"group": "0/default_pg", "number": number, "operation": operation, "data": data, "is_p2p": False}
        for number, operation, data in pending
    ]
    last = {one["group"]: one["number"] for one in pending}
    return {
        "state": state, "calls": calls, "at": at, "within": within, "pending": pending, "recent": [],
        "before": [], "last": last, "call": call, "seconds": seconds,
    }  # fmt: skip


def backward(shape="[9]"):
    return status(WAITS, "`accelerator.backward`", pending=[(57, "all_reduce", f"float32 {shape}")])


def test_ranks_in_words():
    assert ranks_in_words([3]) == "rank 3" and ranks_in_words([1, 2]) == "ranks 1, 2"
    assert ranks_in_words([0, 1, 2, 5, 7, 8, 9, 10]) == "ranks 0-2, 5, 7-10"


def test_ranks_in_different_collectives():
    call = {"operation": "gather", "data": "float32 [4]", "at": "train.py:88", "inside": True}
    other = status(WAITS, "`accelerator.gather`", "train.py:88", pending=[(57, "all_to_all", "uint8 [64]")], call=call)
    lines = explain({0: backward(), 1: backward(), 2: backward(), 3: other}, 4).splitlines()
    assert lines[:2] == [
        "The run stands still for 12 s: ranks 0-2 wait in all_reduce of `accelerator.backward` (train.py:91); "
        "rank 3 waits in `accelerator.gather` (train.py:88).",
        "  - collective 57 of the process group 0/default_pg differs: all_reduce of float32 [9] on ranks 0-2, "
        "gather of float32 [4] on rank 3",
    ]
    assert lines[2].startswith("Every rank must call the same collectives")


def test_the_same_collective_of_another_shape():
    text = explain({0: backward(), 1: backward("[18]")}, 2)
    assert "all ranks have waited 12 s in all_reduce of `accelerator.backward`" in text
    assert "differs: all_reduce of float32 [9] on rank 0, all_reduce of float32 [18] on rank 1" in text
    assert "The ranks agree" in explain({0: backward(), 1: backward()}, 2)


def test_ranks_that_are_not_in_a_collective():
    saves = status(MOVES, "`accelerator.save_state`", "train.py:70")
    waits = status(WAITS, "`accelerator.wait_for_everyone`", "train.py:71")
    text = explain({0: saves, 1: waits, 2: waits, 3: waits}, 4)
    assert text == (
        "The run waits: rank 0 is still computing in `accelerator.save_state` (train.py:70); ranks 1-3 have waited "
        "12 s in `accelerator.wait_for_everyone` (train.py:71)."
    )
    text = explain({0: backward()}, 3, {1: HAS_ENDED})
    assert "stands still: rank 1 has ended; rank 2 does not answer; rank 0 has waited 12 s" in text
    assert explain({0: saves, 1: status(IDLE)}, 2) is None
    loads = status(IDLE, "the data loader", "train.py:20")
    assert "no rank is in a collective: ranks 0, 1 are in the data loader (train.py:20)" in explain(
        {0: loads, 1: loads}, 2
    )


def test_the_ledger_keeps_the_last_collectives():
    ledger = CollectiveLedger()
    for number in range(2 * SIZE + 3):
        entry = ledger.enter(Call("gather", torch.ones(2, number)), "0")
        entry.left = entry.entered
    last = ledger.enter(Call("reduce", [torch.ones(2)]), "0")
    assert ledger.last() is last and last.left is None and last.file == __file__ and last.line > 0
    assert [entry.number for entry in ledger.recent(3)] == [2 * SIZE + 2, 2 * SIZE + 3, 2 * SIZE + 4]
    assert in_words(ledger.recent(2)[0].data) == f"float32 [2, {2 * SIZE + 2}]" and in_words(last.data) == "list"


def test_places():
    seen = {}

    class Model(torch.nn.Module):
        def forward(self, x):
            seen["forward"] = place_of(threading.get_ident())
            x.register_hook(lambda grad: seen.update(backward=place_of(threading.get_ident())))
            return x * 2

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            seen["loader"] = place_of(threading.get_ident())
            return torch.ones(1)

    for batch in torch.utils.data.DataLoader(Data()):
        Model()(batch.requires_grad_()).sum().backward()
    assert all(place.at.startswith(f"{__file__}:") for place in seen.values()), seen
    assert {name: place.within for name, place in seen.items()} == {
        "forward": "forward", "backward": "backward", "loader": "the data loader",
    }  # fmt: skip
    assert place_of(-1) is None


def test_packages_of_another_environment_are_not_the_users(tmp_path):
    path = tmp_path / "venv" / "lib" / "site-packages" / "library.py"
    seen = []
    exec(compile("def call(function):\n    function()", path, "exec"), library := {"__name__": "library"})
    library["call"](lambda: seen.append(place_of(threading.get_ident())))
    exec(compile("seen.append(place_of(get_ident()))", path, "exec"),
         {"__name__": "library", "seen": seen, "place_of": place_of, "get_ident": threading.get_ident})  # fmt: skip
    assert all(place.at.startswith(f"{__file__}:") for place in seen), seen

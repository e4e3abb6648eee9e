# SPDX-License-Identifier: Apache-2.0
"""The text of a report from the statuses of the ranks, the ledger behind them, and places in a stack."""

import sys
import threading

import torch

from accelerate.runtime import place
from accelerate.runtime.calls import Call, ranks_in_words
from accelerate.runtime.hang_report import ACTIVE, FILES, HAS_ENDED, IDLE, MOVES, THREADS, WAITS, explain
from accelerate.runtime.hang_watch import HangWatch
from accelerate.runtime.ledger import SIZE, CollectiveLedger, in_words
from accelerate.runtime.pending import Recorded, compared
from accelerate.runtime.place import WORKERS, place_of


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


def test_what_ranks_do_outside_of_collectives():
    waits = status(WAITS, "`accelerator.gather`", "train.py:71")
    for state, words in (
        (ACTIVE, "The run waits: ranks 0, 1 are still active in `load` (data.py:7), and mostly asleep; rank 2 has "),
        (THREADS, "The run waits: ranks 0, 1 are in `load` (data.py:7), and only its other threads compute; rank 2 "),
        (IDLE, "The run stands still: ranks 0, 1 are in `load` (data.py:7), and do not compute; rank 2 has waited "),
    ):
        other = status(state, within="`load`", at="data.py:7")
        text = explain({0: other, 1: other, 2: waits}, 3)
        assert text is not None and text.startswith(words), text
        # Alone such ranks are no stand-still, but where none does anything.
        assert (explain({0: other, 1: other}, 2) is None) == (state != IDLE)
    loads = status(IDLE, WORKERS, "train.py:20")
    text = explain({0: loads, 1: waits}, 3, {2: "is stopped (process 7)"})
    assert text == (
        "The run stands still: rank 0 is waiting for a worker process of the data loader (train.py:20); rank 2 is "
        "stopped (process 7); rank 1 has waited 12 s in `accelerator.gather` (train.py:71)."
    )
    starts = status(WAITS, "the data loader", "train.py:20", call={
        "operation": "the start of an epoch", "data": "", "at": "train.py:20", "inside": True,
    })  # fmt: skip
    assert "has waited 12 s in the start of an epoch (train.py:20)." in explain({0: starts, 1: loads}, 2)


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
    for number in range(2 * SIZE + 3):
        entry = ledger.enter(Call("gather", torch.ones(2, number)), "0")
        entry.left = entry.entered
    last = ledger.enter(Call("reduce", [torch.ones(2)]), "0")
    assert ledger.last() is last and last.left is None and last.file == __file__ and last.line > 0
    assert [entry.number for entry in ledger.recent(3)] == [2 * SIZE + 2, 2 * SIZE + 3, 2 * SIZE + 4]
    assert [text.rpartition(":")[0] for text in ledger.ended(3)] == [f"gather ({__file__}"] * 3
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


def test_the_place_is_not_in_a_context_manager_of_python(tmp_path):
    """`main_process_first` is entered by contextlib."""
    source = """
import contextlib
from accelerate.runtime.calls import user_line
@contextlib.contextmanager
def block(seen):
    seen.append(user_line())
    yield
    seen.append(user_line())
"""
    exec(compile(source, tmp_path / "inside.py", "exec"), inside := {"__name__": "accelerate.inside"})
    seen = []
    with inside["block"](seen):
        pass
    assert [line.rpartition(":")[0] for line in seen] == [__file__, __file__]


def test_the_constructor_of_an_optimizer_is_no_step():
    seen = []

    def parameters():
        seen.append(calls_of(sys._getframe()))
        yield torch.nn.Parameter(torch.ones(1))

    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.step(lambda: seen.append(calls_of(sys._getframe())))
    assert seen == [[], ["`optimizer.step`"]]


def calls_of(frame):
    """The names of activities on the stack, from this frame outwards to the first one of this file."""
    found = []
    while (frame := frame.f_back).f_code.co_filename != __file__:
        found += filter(None, [place._activity(frame)])
    return found[-1:]


def test_packages_of_another_environment_are_not_the_users(tmp_path):
    path = tmp_path / "venv" / "lib" / "site-packages" / "library.py"
    seen = []
    exec(compile("def call(function):\n    function()", path, "exec"), library := {"__name__": "library"})
    library["call"](lambda: seen.append(place_of(threading.get_ident())))
    exec(compile("seen.append(place_of(get_ident()))", path, "exec"),
         {"__name__": "library", "seen": seen, "place_of": place_of, "get_ident": threading.get_ident})  # fmt: skip
    assert all(place.at.startswith(f"{__file__}:") for place in seen), seen


def test_what_a_thread_does_from_what_it_has_used():
    """Shares of the time on a CPU of the thread and its process, bytes a second, and looks after which it had run."""
    watch = object.__new__(HangWatch)
    for state, share, process, rate, woken in (
        (MOVES, 0.4, 1.0, 0, 0), (FILES, 0.1, 0.2, 5 << 20, 9), (THREADS, 0.0, 1.0, 0, 9), (ACTIVE, 0.0, 0.0, 0, 5),
        # A data loader wakes up every five seconds to see whether its workers live; a process starts.
        (IDLE, 0.0, 0.0, 0, 4), (IDLE, 0.2, 0.2, 1 << 19, 0),
    ):  # fmt: skip
        watch._share, watch._process_share, watch._rate, watch._woken, watch._looks = share, process, rate, woken, 20
        assert watch._activity(moved=False) == state and watch._activity(moved=True) == MOVES
    watch._woken, watch._looks = 2, 2
    assert watch._activity(moved=False) == IDLE
    reads = status(FILES, "`accelerator.save_state`", "train.py:70")
    text = explain({0: reads, 1: status(WAITS, "`accelerator.gather`", "train.py:71")}, 2)
    assert text.startswith(
        "The run waits: rank 0 is still reading or writing files in `accelerator.save_state` (train."
    )

# SPDX-License-Identifier: Apache-2.0
"""`init_trackers(background=True)`: a thread calls the services, with the values as they were, and loses none."""

import logging
import os
import signal
import threading

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, background, group


class Slow(GeneralTracker):
    name = "slow"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.calls = []
        self.threads = set()
        self.may_log = threading.Event()

    @property
    def tracker(self):
        return self.calls

    def log(self, values, step=None, **kwargs):
        self.threads.add(threading.current_thread())
        if "object" not in values:
            assert self.may_log.wait(30)
        if values.get("fails"):
            raise RuntimeError("no connection")
        self.calls.append((step, values, kwargs))

    def finish(self):
        self.calls.append("finish")


class Bound(Slow):
    name, background = "bound", False


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(background.BackgroundLog, "_shared", None)
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def start(*trackers):
    accelerator = Accelerator(cpu=True, log_with=list(trackers))
    accelerator.init_trackers("run", background=True)
    return accelerator


def test_values_are_those_of_the_call_in_order():
    slow, bound = Slow(), Bound()
    bound.may_log.set()
    accelerator = start(slow, bound)
    loss, array, nested = torch.ones(2, requires_grad=True), np.ones(2), {"x": [torch.zeros(1)]}
    accelerator.log(
        {"loss": loss, "array": array, "nested": nested},
        step=0,
        log_kwargs={"slow": {"extra": nested}},
    )
    with torch.no_grad():
        loss.zero_()
        nested["x"][0].fill_(5.0)
    array[:] = 7
    accelerator.log({"n": 2}, step=1)
    assert slow.calls == [] and [call[0] for call in bound.calls] == [0, 1]
    assert bound.threads == {threading.main_thread()}
    slow.may_log.set()
    # A direct use has everything.
    assert accelerator.get_tracker("slow", unwrap=True) is slow.calls
    (first, values, options), (second, more, _) = slow.calls
    assert (first, second, more) == (0, 1, {"n": 2}) and not values["loss"].requires_grad
    assert values["loss"].tolist() == values["array"].tolist() == [1.0, 1.0]
    assert values["nested"]["x"][0].item() == options["extra"]["x"][0].item() == 0.0
    # What cannot be copied is logged before the call returns, after what was logged before.
    accelerator.log({"n": 3}, step=2)
    accelerator.log({"object": object()}, step=3)
    assert [call[0] for call in slow.calls] == [
        0,
        1,
        2,
        3,
    ] and threading.main_thread() in slow.threads
    accelerator.end_training()
    assert slow.calls[-1] == bound.calls[-1] == "finish" and len(slow.threads) == 2


def test_an_error_is_reported_once_and_loses_nothing_else(caplog):
    slow = Slow()
    slow.may_log.set()
    accelerator = start(slow)
    with caplog.at_level(logging.ERROR, "accelerate"):
        for step in range(4):
            accelerator.log({"fails": step in (1, 2)}, step=step)
        accelerator.end_training()
    assert [call[0] for call in slow.calls[:-1]] == [0, 3]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the tracker slow" in message and "no connection" in message


def test_a_full_queue_waits(monkeypatch):
    monkeypatch.setattr(background, "CAPACITY", 2)
    slow = Slow()
    accelerator = start(slow)
    logs = threading.Thread(target=lambda: [accelerator.log({}, step=step) for step in range(5)])
    logs.start()
    logs.join(0.2)
    assert logs.is_alive() and slow.calls == []
    slow.may_log.set()
    logs.join(30)
    accelerator.end_training()
    assert [call[0] for call in slow.calls[:-1]] == [0, 1, 2, 3, 4]


def test_a_script_that_ends_without_end_training():
    slow = Slow()
    accelerator = start(slow)
    accelerator.log({}, step=0)
    threading.Timer(0.05, slow.may_log.set).start()
    group._finish_open()
    assert slow.calls == [(0, {}, {}), "finish"]
    group._open.clear()


def test_a_terminated_process_logs_what_waits(tmp_path):
    class File(Slow):
        def log(self, values, step=None, **kwargs):
            self.may_log.wait(0.02)
            with open(tmp_path / "values", "a") as file:
                file.write(f"{step}\n")

    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            trackers = group.TrackerGroup([File()], None)
            trackers.start("run", background=True)
            for step in range(10):
                trackers.log({}, step=step)
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert (tmp_path / "values").read_text().split() == [str(step) for step in range(10)]

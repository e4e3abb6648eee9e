# SPDX-License-Identifier: Apache-2.0
"""The device feed: what happens in which order, on a machine without a device, by a stream that writes a diary."""

from __future__ import annotations

import contextlib

import pytest
import torch
from loaders import Ids, ids
from torch.utils.data import DataLoader

from accelerate.data_loader import prepare_data_loader
from accelerate.data_loader.prefetch import DeviceFeed, PlainFeed, feed_for
from accelerate.data_loader.steps import ShardStep


class Device:
    """Stands for `torch.cuda`: streams and events that note what they are asked."""

    def __init__(self):
        self.diary = []
        self.main = self.Stream("main")

    def Stream(self, name):
        device = self

        class Event:
            def __init__(self, number):
                self.number = number

            def synchronize(self):
                device.diary.append(f"host waits for copy {self.number}")

            def wait(self, stream):
                device.diary.append(f"{stream.name} waits for copy {self.number}")

        class Stream:
            copies = 0

            def __init__(self):
                self.name = name if isinstance(name, str) else "side"

            def wait_stream(self, other):
                device.diary.append(f"{self.name} waits for {other.name}")

            def record_event(self):
                Stream.copies += 1
                device.diary.append(f"copy {Stream.copies}")
                return Event(Stream.copies)

        return Stream()

    def current_stream(self, device):
        return self.main

    @contextlib.contextmanager
    def stream(self, stream):
        yield


def test_the_next_batch_is_copied_before_the_present_one_is_handed_out():
    device = Device()
    feed = DeviceFeed(torch.device("cpu"), device, pins=False)

    def batches():
        for number in (1, 2, 3):
            device.diary.append(f"read {number}")
            yield ShardStep(torch.tensor([number]), (1,), number, number == 3)

    for step in feed.ahead(batches()):
        assert step.data.tolist() == [step.position] and step.last == (step.position == 3)
        device.diary.append(f"step {step.position}")
    assert device.diary == [
        "read 1",
        "side waits for main",
        "copy 1",
        "host waits for copy 1",
        "read 2",
        "side waits for main",
        "copy 2",
        "main waits for copy 1",
        "step 1",
        "host waits for copy 2",
        "read 3",
        "side waits for main",
        "copy 3",
        "main waits for copy 2",
        "step 2",
        "host waits for copy 3",
        "main waits for copy 3",
        "step 3",
    ]


def test_the_position_is_that_of_the_batch_handed_out():
    loader = prepare_data_loader(DataLoader(Ids(7), batch_size=2), num_processes=1, process_index=0)
    loader._feed = DeviceFeed(torch.device("cpu"), Device(), pins=False)
    told = [
        (ids(batch), loader.state_dict()["consumed"], loader.end_of_dataloader) for batch in loader
    ]
    assert told == [([0, 1], 2, False), ([2, 3], 4, False), ([4, 5], 6, False), ([6], 7, True)]


def test_no_feed_where_there_is_nothing_to_copy_to():
    assert feed_for(None) is None
    assert feed_for(torch.device("cpu", 0)) is None
    loader = prepare_data_loader(
        DataLoader(Ids(2)),
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        put_on_device=True,
    )
    assert loader._feed is None


def test_a_device_without_streams_is_copied_to_when_a_batch_is_asked_for():
    feed = PlainFeed(torch.device("meta"), non_blocking=True)
    (step,) = feed.ahead(iter([ShardStep({"x": torch.ones(2), "name": "kept"}, None, 3, True)]))
    assert step.data["x"].device.type == "meta" and step.data["name"] == "kept"
    assert (step.counts, step.position, step.last) == (None, 3, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_batches_arrive_whole_on_an_accelerator():
    device = torch.accelerator.current_accelerator()
    for workers, pin in ((0, False), (0, True), (2, True)):
        raw = DataLoader(Ids(64), batch_size=8, num_workers=workers, pin_memory=pin)
        loader = prepare_data_loader(
            raw, device=device, num_processes=1, process_index=0, put_on_device=True
        )
        assert isinstance(loader._feed, DeviceFeed)
        seen = []
        for batch in loader:
            assert batch["id"].device.type == device.type
            work = torch.ones(1024, 1024, device=device)
            for _ in range(10):
                work = work @ work / 1024
            seen += (batch["id"] + 0 * work[0, 0].long()).tolist()
        assert seen == list(range(64))

# SPDX-License-Identifier: Apache-2.0
"""Runs that save into a bucket, killed at random moments and with faults of the store: what is committed is whole.

KILLS sets how many kills there are in all layouts together (default 8), with ten times as many faults;
`make test-faults` takes 100.
"""

import contextlib
import os
import random
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import pytest
from rank_pool import rank_environment
from ranks import Script
from s3_server import TRANSIENT, RandomFaults, S3Server
from torch.distributed import TCPStore

from accelerate.checkpointing import list_checkpoints, verify
from accelerate.checkpointing.layout import MANIFEST, parse_manifest, unfit
from accelerate.core.files import location

pytest.importorskip("obstore")

WORKER = Path(__file__).parent / "bucket_worker.py"
PAIR = Path(__file__).parent / "writer_worker.py"
LIMIT = 300.0
MANY = 1_000_000
PROJECT = "s3://bucket/run"
LAYOUTS = [(2, "ddp"), (4, "ddp"), (2, "fsdp2"), (4, "fsdp2")]
# of each test
KILLS = int(os.environ.get("KILLS", "8")) // len(LAYOUTS)
FAULTS = 10 * KILLS


class Launch:
    """The ranks of a run, without a launcher: what it does when a rank is gone, the test does."""

    def __init__(self, project, folder, total, ranks, layout):
        for note in folder.glob("rank*.pid"):
            note.unlink()
        self.folder, self.count = folder, ranks
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = []
        for rank in range(ranks):
            with open(folder / f"{rank}.err", "w") as err:
                variables = rank_environment(rank, ranks, self.store, None)
                arguments = (WORKER, project, folder, total, layout)
                self.ranks.append(Script(*arguments, env=variables, stderr=err))

    def wait_for_start(self):
        deadline = time.monotonic() + LIMIT
        while len(list(self.folder.glob("rank*.pid"))) < self.count:
            assert time.monotonic() < deadline and not self.is_over(0), self.errors()
            time.sleep(0.005)

    def is_over(self, seconds):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ranks[0].wait(seconds)
            return True
        return False

    def errors(self):
        return "\n".join((self.folder / f"{rank}.err").read_text() for rank in range(self.count))

    def finish(self):
        for rank in self.ranks:
            assert rank.wait(LIMIT) == 0, self.errors()

    def kill(self, ranks):
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait(LIMIT)


def check_all(server):
    """What counts as committed holds what its checksums say: by `verify`, and by reading the objects here."""
    plan, server.faults = server.faults, None
    checked = 0
    for _, checkpoint in list_checkpoints(location(f"{PROJECT}/checkpoints", "project")):
        if unfit(checkpoint) is None:
            verify(checkpoint)
            checked += 1
    keys = server.keys()
    for key in keys:
        folder, _, name = key.rpartition("/")
        if name != MANIFEST:
            continue
        manifest = parse_manifest(location(f"s3://bucket/{key}", "manifest"))
        for file, record in manifest.files.items():
            content = server.data(f"{folder}/{manifest.token}/{file}")
            starts = range(0, len(content), record.block)
            sums = [f"{zlib.crc32(content[at : at + record.block]):08x}" for at in starts]
            assert (len(content), sums) == (record.size, list(record.crc32)), file
    server.faults = plan
    return checked


def digests(folder, rank):
    """What a rank has computed in each step. A step that is made again has to give the same."""
    found = {}
    path = folder / f"digests{rank}.txt"
    for line in path.read_text().splitlines() if path.exists() else ():
        step, _, value = line.partition(" ")
        if len(value) == 40:
            assert found.setdefault(int(step), value) == value, f"step {step} of rank {rank}"
    return found


def assert_as_in_a_folder(folder, count, layout):
    """Every step after every resume was that of a run that saves into a folder and is not cut off."""
    steps = [digests(folder, rank) for rank in range(count)]
    total = max(steps[0])
    whole = folder / "whole"
    whole.mkdir()
    Launch(str(whole / "project"), whole, total, count, layout).finish()
    for rank in range(count):
        expected = digests(whole, rank)
        assert steps[rank].items() <= expected.items()
    return total


@pytest.fixture
def folder(tmp_path):
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="accelerate-buckets-") as name:
        yield Path(name)


@pytest.fixture
def server():
    with S3Server() as server:
        yield server


@pytest.mark.thorough
@pytest.mark.timeout(300 + 30 * KILLS)
@pytest.mark.parametrize(("count", "layout"), LAYOUTS)
def test_killed_at_random_moments(folder, server, count, layout):
    server.faults = RandomFaults(KILLS, 0.03)
    dice = random.Random(f"{KILLS} {count} {layout}")
    checked = 0
    for _ in range(KILLS):
        launch = Launch(PROJECT, folder, MANY, count, layout)
        launch.wait_for_start()
        assert not launch.is_over(dice.uniform(0.0, 1.2)), launch.errors()
        if dice.random() < 0.5:
            # The other ranks may go on with a save, and commit it.
            launch.kill([dice.choice(launch.ranks)])
            time.sleep(dice.uniform(0.0, 0.5))
        launch.kill(launch.ranks)
        checked += check_all(server)
    total = assert_as_in_a_folder(folder, count, layout)
    print(f"{count} {layout}: {KILLS} kills, {total} steps, {checked} checks, {server.injected}")
    assert checked


@pytest.mark.thorough
@pytest.mark.timeout(300 + 2 * FAULTS)
@pytest.mark.parametrize(("count", "layout"), LAYOUTS)
def test_faults_of_the_store(folder, server, count, layout):
    server.faults = RandomFaults(FAULTS, 0.25, [*TRANSIENT, "409"])
    total = 0
    while sum(server.injected.values()) < FAULTS:
        total += 10
        Launch(PROJECT, folder, total, count, layout).finish()
        check_all(server)
    assert_as_in_a_folder(folder, count, layout)
    print(f"{count} {layout}: {total} steps, {server.injected}")
    # Nothing is left of a save but the checkpoints: no part of a failed attempt, no upload.
    keys = server.keys()
    folders = {key.split("/")[2] for key in keys}
    assert len(folders) == 3


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_of_two_writers_at_most_one_wins(folder, server):
    """Two runs save into one folder at the same time, with faults: as many win as manifests have been written."""
    server.faults = RandomFaults(7, 0.2, [*TRANSIENT, "409"])
    written = []
    server.on_put = lambda key, data: written.append(key) if key.endswith(MANIFEST) else None
    rounds = 5 * KILLS
    writers = []
    for number in range(2):
        with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
            variables = rank_environment(0, 1, None, None)
            writers.append(
                Script(PAIR, "s3://bucket/two", rounds, env=variables, stdout=out, stderr=err)
            )
    for number, writer in enumerate(writers):
        assert writer.wait(LIMIT) == 0, (folder / f"{number}.err").read_text()
    won = [(folder / f"{number}.out").read_text().split().count("won") for number in range(2)]
    lost = [(folder / f"{number}.out").read_text().split().count("lost") for number in range(2)]
    assert sum(won) + sum(lost) == 2 * rounds
    # One whose answer was lost may have been replaced, by a later save, when its writer looks.
    assert sum(won) <= len(written) <= sum(won) + 3
    assert sum(lost) and all(won)
    server.faults = None
    verify(location("s3://bucket/two", "folder"))
    print(f"won {won}, lost {lost}, {server.injected}")

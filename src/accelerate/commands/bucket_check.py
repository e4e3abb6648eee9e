# SPDX-License-Identifier: Apache-2.0
"""`accelerate checkpoint check LOCATION`: what the store of a bucket keeps of what checkpoints in it rely on."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..core.buckets import Bucket
from ..core.errors import AccelerateError, CheckpointError

ROUNDS = 4  # of what only several attempts can break
WRITERS = 4  # at the same time
CLOCK_LIMIT = 300.0  # seconds. S3 refuses requests of a clock that is 15 minutes off


@dataclass(frozen=True)
class Promise:
    """One promise of a store: whether it was kept, and what was seen."""

    name: str
    kept: bool
    detail: str


class StoreCheck:
    """Tries what a store promises, on objects below a location that it removes again.

    Args:
        location: of a bucket or a folder in it.
        size: bytes of the object that is uploaded in parts.
    """

    def __init__(self, location: str, size: int) -> None:
        bucket, folder = Bucket.of(location)
        self.bucket: Bucket = bucket
        self.folder: str = f"{folder}/.accelerate-check-{uuid.uuid4().hex[:8]}".lstrip("/")
        self.size = size

    def promises(self) -> Iterator[Promise]:
        """Try one promise after the other. Where nothing can be written, the first is the only one."""
        checks: dict[str, Callable[[], str | None]] = {
            "put": self._put,
            "get": self._get,
            "list": self._list,
            "delete": self._delete,
            "clock": self._clock,
            "create-only": self._create_only,
            "conditional replacement": self._replacement,
            "read-after-write": self._read_after_write,
            "list-after-write": self._list_after_write,
            "ranges": self._ranges,
            "multipart": self._multipart,
        }
        try:
            for name, check in checks.items():
                begin = time.perf_counter()
                try:
                    seen = check()
                except (AccelerateError, OSError) as error:
                    yield Promise(name, False, str(error))
                    if name == "put":
                        return
                else:
                    milliseconds = 1000 * (time.perf_counter() - begin)
                    yield Promise(name, True, seen or f"{milliseconds:.0f} ms")
        finally:
            self._remove_all()

    def _remove_all(self) -> None:
        try:
            self.bucket.delete([entry.key for entry in self.bucket.objects(self.folder)])
        except (AccelerateError, OSError):
            return  # a promise above has said why

    def _write(self, name: str, content: bytes) -> str:
        key = f"{self.folder}/{name}"
        self.bucket.write(key, [content])
        return key

    # -- rights

    def _put(self) -> None:
        self._write("right", b"right")

    def _get(self) -> None:
        self.bucket.get(f"{self.folder}/right", 100)

    def _list(self) -> None:
        self.bucket.children(self.folder)

    def _delete(self) -> None:
        key = self._write("deleted", b"deleted")
        self.bucket.delete([key])
        _require(self.bucket.version(key) is None, "a deleted object can still be read")

    def _clock(self) -> str:
        before = time.time()
        modified = self.bucket.stat(self._write("clock", b"clock")).modified
        seconds = abs(modified - before)
        text = f"the clocks of this machine and the store differ by {seconds:.0f} s"
        _require(seconds < CLOCK_LIMIT, f"{text}: set the clock of this machine (NTP)")
        return text

    # -- the commit of a checkpoint

    def _create_only(self) -> str:
        for number in range(ROUNDS):
            key = f"{self.folder}/created-{number}"

            def create(content: bytes, key: str = key) -> bool:
                return self.bucket.create(key, content, content.__eq__)

            self._require_one_winner(key, create)
        return "exactly one writer won each time"

    def _replacement(self) -> str:
        key = self._write("replaced", b"original")
        for _ in range(ROUNDS):
            version = self.bucket.version(key) or {}

            def replace(content: bytes, version: dict[str, object] = version) -> bool:
                return self.bucket.replace(key, content, version, content.__eq__)

            self._require_one_winner(key, replace)
        return "exactly one writer won each time"

    def _require_one_winner(self, key: str, write: Callable[[bytes], bool]) -> None:
        """Write at the same time, and once more after that: one may win, whose content stays."""
        # Versions of equal content can be equal.
        *contents, late = [os.urandom(8) for _ in range(WRITERS + 1)]
        with ThreadPoolExecutor(WRITERS) as pool:
            results = list(pool.map(write, contents))
        results.append(write(late))
        count = sum(results)
        _require(count == 1, f"{count} of {WRITERS + 1} writers won, but exactly one must win")
        winner = [*contents, late][results.index(True)]
        _require(
            self.bucket.get(key, 100) == winner, "a read returned the content of a writer that lost"
        )

    # -- what is read after a write

    def _read_after_write(self) -> None:
        for _ in range(ROUNDS):
            content = os.urandom(32)
            key = self._write("read", content)
            _require(self.bucket.get(key, 100) == content, "a read returned an earlier version")

    def _list_after_write(self) -> None:
        keys = {self._write(f"listed/{number}", b"listed") for number in range(ROUNDS)}
        removed = self._write("listed/removed", b"removed")
        self.bucket.delete([removed])
        listed = {entry.key for entry in self.bucket.objects(f"{self.folder}/listed")}
        count = len(listed & keys)
        _require(count == ROUNDS, f"a listing showed {count} of {ROUNDS} new objects")
        _require(removed not in listed, "a listing showed a deleted object")

    def _ranges(self) -> None:
        content = os.urandom(100_000)
        memory = bytearray(33_333)
        self.bucket.read(self._write("ranges", content), 33_333, [memoryview(memory)])
        _require(memory == content[33_333:66_666], "a read returned different bytes")

    def _multipart(self) -> str:
        key = f"{self.folder}/parts"
        block = os.urandom(1 << 20)
        count = max(1, self.size >> 20)
        memory = bytearray(count << 20)
        begin = time.perf_counter()
        self.bucket.write(key, (block for _ in range(count)), len(memory))
        written = time.perf_counter()
        self.bucket.read(key, 0, [memoryview(memory)])
        up = len(memory) / 1e6 / (written - begin)
        down = len(memory) / 1e6 / (time.perf_counter() - written)
        _require(memory == block * count, "a read returned different bytes than were written")
        return f"{count} MiB, {up:.0f} MB/s up, {down:.0f} MB/s down"


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise CheckpointError(text)

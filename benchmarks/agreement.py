# SPDX-License-Identifier: Apache-2.0
"""What the agreement of many ranks costs: simulated ranks, each a thread with a connection to one store.

    python benchmarks/agreement.py [--ranks 512]

Operations and bytes (keys and values) are those of the rank with the median, and of the one with the most. Prints one
JSON line for each figure.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from timing import emit

from accelerate.runtime.agreement import Connection, Outcome, Round

LATE, LIMIT = 4.0, 3.0


class CountedStore:
    """A connection that counts its operations, and the bytes of their keys and values."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.operations = self.bytes = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            result = method(*args)
            self.operations += 1
            self.bytes += sum(map(_size, (*args, result)))
            return result

        return counted


def _size(value: object) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return (
        sum(map(_size, value))
        if isinstance(value, (list, tuple))
        else 8
        if isinstance(value, int)
        else 0
    )


def exchange(
    name: str, stores: Sequence[Any], late: dict[int, float], timeout: float
) -> tuple[list[Outcome], float]:
    """One exchange of all ranks that are not infinitely late. Returns the outcomes, and seconds until the last one."""
    ready, outcomes = (
        threading.Barrier(sum(delay < 1e9 for delay in late.values()) + len(stores) - len(late)),
        [],
    )

    def run(rank: int) -> None:
        turn = Round(name, range(len(stores)), rank, Connection(stores[rank]))
        ready.wait()
        time.sleep(late.get(rank, 0.0))
        outcomes.append(turn.exchange(name, rank, timeout, lambda values: max(values.values())))

    threads = [
        threading.Thread(target=run, args=(rank,))
        for rank in range(len(stores))
        if late.get(rank, 0.0) < 1e9
    ]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    for thread in threads:
        thread.join()
    return outcomes, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    ranks = parser.parse_args().ranks
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    stores = [
        CountedStore(
            dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        )
        for _ in range(ranks)
    ]
    cases: dict[str, tuple[dict[int, float], float]] = {
        "together": ({}, 60.0),
        "one late": ({0: LATE}, 60.0),
        "one missing": ({ranks // 2: 1e9}, LIMIT),
        "first two missing": ({0: 1e9, 1: 1e9}, LIMIT),
    }
    for name, (late, timeout) in cases.items():
        for store in stores:
            store.operations = store.bytes = 0
        outcomes, seconds = exchange(name.replace(" ", "_"), stores, late, timeout)
        assert len(set(outcomes)) == 1, set(outcomes)
        operations, sizes = (
            [getattr(store, what) for store in stores] for what in ("operations", "bytes")
        )
        decided = seconds - (LATE if name == "one late" else timeout if "missing" in name else 0.0)
        more = {"most": max(operations), "most bytes": max(sizes), "outcome": str(outcomes[0])}
        emit(f"agreement, {name}: operations", "", None, statistics.median(operations), **more)
        emit(f"agreement, {name}: bytes", "", None, statistics.median(sizes))
        emit(f"agreement, {name}: decided", "s", None, decided)


if __name__ == "__main__":
    main()

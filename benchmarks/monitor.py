# SPDX-License-Identifier: Apache-2.0
"""`accelerate monitor` on a run of 1,000,000 steps on 8 ranks: opening it, and what a zoom and a new step cost."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import alternate, emit

STEPS, RANKS = 1_000_000, 8
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))


def fetch(port: int, query: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/api/view?{query}")
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if answer.status not in (200, 204):
        raise RuntimeError(f"{query}: {answer.status} {data[:200]!r}")
    return data


def main() -> None:
    from planted_runs import planted_records, planted_run, write_steps

    with tempfile.TemporaryDirectory() as name:
        folder = planted_run(Path(name), STEPS, RANKS, slow=3)
        command = [sys.executable, "-m", "accelerate.commands.main", "monitor", str(folder)]
        opened = []
        for _ in range(3):
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
            assert process.stdout is not None
            try:
                port = int(process.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
                size = len(fetch(port, "pixels=1200"))
                opened.append(time.perf_counter() - begin)
                ranges = {
                    "all": "pixels=1200&start=1&stop=1000000",
                    "a tenth": "pixels=1200&start=400001&stop=500000",
                    "raw": "pixels=1200&start=700001&stop=760000",
                    "each step": "pixels=1200&start=700001&stop=701000",
                }
                times = alternate(
                    {
                        title: lambda query=query, port=port: fetch(port, query)
                        for title, query in ranges.items()
                    },
                    rounds=7,
                )
                new = []
                for step in range(5):
                    for rank in range(RANKS):
                        write_steps(
                            folder,
                            rank,
                            RANKS,
                            planted_records(1, rank, begin=STEPS + step + 1),
                            "ab",
                        )
                    after = time.perf_counter()
                    while not fetch(port, "pixels=1200&version=x"):
                        pass
                    new.append(time.perf_counter() - after)
            finally:
                process.terminate()
                process.wait(20)
        emit("monitor opens", "ms", None, sorted(opened)[1], bytes=size)
        for title, seconds in times.items():
            emit(f"monitor shows {title}", "ms", None, seconds)
        emit("monitor shows a new step", "ms", None, sorted(new)[2])


if __name__ == "__main__":
    main()

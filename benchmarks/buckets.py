# SPDX-License-Identifier: Apache-2.0
"""Time to save and load a checkpoint in a bucket, compared with obstore's own put and get of the same bytes.

Two runs: 300 MB of weights and AdamW's state, and 10,000 small tensors; the second is compared with a folder too. The
store is the S3 server of the tests, in a process of its own on the same machine: the network has no part in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import obstore
import torch
from obstore.store import S3Store
from timing import alternate, emit

from accelerate.checkpointing import (
    PreparedModel,
    PreparedOptimizer,
    RunState,
    load_run,
    read_manifest,
    save_run,
)
from accelerate.core.files import location
from accelerate.runtime.agreement import OneProcess

ROUNDS = 5
_SERVER = """
import sys, time
sys.path.insert(0, "tests/helpers")
from s3_server import S3Server
with S3Server() as server:
    for name, value in server.environment().items():
        print(f"{name}={value}", flush=True)
    print("ready", flush=True)
    time.sleep(3600)
"""


def a_run(tensors: int, elements: int) -> RunState:
    """A run with that many parameters of that many elements, after one step of AdamW."""
    model = torch.nn.ParameterList(torch.randn(elements) for _ in range(tensors))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return RunState(models=[PreparedModel(model)], optimizers=[PreparedOptimizer(optimizer)])


def main() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert server.stdout is not None
    for line in iter(server.stdout.readline, "ready\n"):
        name, _, value = line.strip().partition("=")
        os.environ[name] = value
    folder = Path(tempfile.mkdtemp())
    try:
        for title, tensors, elements in (("300 MB", 100, 250_000), ("10,000 tensors", 3_333, 64)):
            measure(title, a_run(tensors, elements), folder)
    finally:
        server.terminate()
        shutil.rmtree(folder)


def measure(title: str, run: RunState, folder: Path) -> None:
    process = OneProcess()
    place = location(f"s3://bucket/{title.replace(' ', '-')}", "place")
    local = folder / title
    for target in (place, local):
        save_run(run, target, process=process)
    manifest = read_manifest(place)
    names = list(manifest.files)
    contents = {name: (local / name).read_bytes() for name in names}
    store = S3Store("bucket", client_options={"allow_http": True})

    def put() -> None:
        for name, content in contents.items():
            obstore.put(store, f"plain/{name}", content)

    def get() -> None:
        for name in names:
            obstore.get(store, f"plain/{name}").bytes()

    times = alternate(
        {
            "obstore put": put,
            "save to the bucket": lambda: save_run(run, place, process=process),
            "save to a folder": lambda: save_run(run, local, process=process),
            "obstore get": get,
            "load from the bucket": lambda: load_run(run, place, process=process),
            "load from a folder": lambda: load_run(run, local, process=process),
        },
        ROUNDS,
    )
    size = sum(map(len, contents.values())) / 1e6
    for act, plain in (("save to", "obstore put"), ("load from", "obstore get")):
        emit(
            f"bucket: {act} it, {title}",
            "ms",
            times[plain],
            times[f"{act} the bucket"],
            folder=times[f"{act} a folder"] * 1e3,
            megabytes=size,
            files=len(names),
        )


if __name__ == "__main__":
    main()

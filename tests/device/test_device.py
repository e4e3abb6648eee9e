# SPDX-License-Identifier: Apache-2.0
"""Runs on simulated devices: what an accelerator goes through, compared with a plain loop on the CPU in float64.

The device computes with the kernels of the CPU. FSDP1 is left out: torch's cannot use a backend outside of torch.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="needs g++ to build the simulated device"
    ),
]
# Numbers of devices, and the cases that run on them.
ONE = [
    "no",
    "bf16",
    "fp16",
    "accumulation",
    "telemetry",
    "offloaded state",
    "dispatch",
    "copies",
    "lazy",
    "lazy, compiled",
    "resume",
    "activations on the host",
    "compiled",
    "batches",
    "memory",
    "places",
    "packed",
]
TWO = ["no", "bf16", "fp16", "accumulation", "telemetry", "dispatch", "copies", "split", "tp", "pp"]
TWO += [
    "lazy",
    "lazy, tp",
    "lazy, pp",
    "lazy, fsdp2",
    "compiled",
    "hook fp16",
    "hook power_sgd",
    "collectives",
    "batches",
    "cp",
    "sp",
]
SHARDED = ["fsdp2", "fsdp2, bf16", "fsdp2, offloaded", "fsdp2, offloaded, sharded"]
SHARDED += [
    "fsdp2, recomputed",
    "fsdp2, from rank 0",
    "fsdp2, fp16",
    "fsdp2, fp8",
    "fsdp2, fp8, from rank 0",
]
FOUR = ["no", "tp", "pp", "hsdp", "fsdp x tp", "pp x fsdp", "pp x tp", "cp x fsdp", "cp x tp"]
RUNS = (
    [(1, case) for case in [*ONE, "placement"]]
    + [(2, case) for case in TWO + SHARDED]
    + [(4, case) for case in FOUR]
)


LAUNCH = ["-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]


def run(arguments, limit, **variables):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, env=environment, check=False
    )
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="session")
def built():
    """The folder of the compiled extension, which is kept between runs of the tests."""
    folder = str(HERE.parents[1] / "build" / "simulated_device")
    run(["-c", "import simulated_device"], 300, SIMULATED_DEVICE=folder)
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("ranks", "case"), RUNS)
def test_equals_a_plain_loop(ranks, case, built, tmp_path):
    launch = [*LAUNCH, f"--nproc_per_node={ranks}"] if ranks > 1 else []
    run([*launch, str(HERE / "device_cases.py"), str(tmp_path), case], 120, SIMULATED_DEVICE=built)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "case"), [(1, "no"), (1, "telemetry"), (1, "resume"), (1, "refused"), (2, "copies")]
)
def test_on_a_backend_with_few_functions(ranks, case, built, tmp_path):
    """Without streams, autocast, generator states and figures of memory."""
    launch = [*LAUNCH, f"--nproc_per_node={ranks}"] if ranks > 1 else []
    run(
        [*launch, str(HERE / "device_cases.py"), str(tmp_path), case],
        120,
        SIMULATED_DEVICE=built,
        SIMULATED_MODULE="small",
    )

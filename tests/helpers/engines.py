# SPDX-License-Identifier: Apache-2.0
"""Real engines for tests: what they need, clusters of this machine alone, and the run that each of them repeats."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m"]
LAUNCH = [*PYTHON, "accelerate.commands.main", "launch"]
# Four optimizer steps of a very small model.
SIZES = {"layers": 1, "width": 16, "heads": 2, "eval_samples": 8}
STEPS = {"max_steps": 4, "warmup": 2, "accumulate": 2}
TINY = [word for name, value in {**STEPS, **SIZES}.items() for word in (f"--{name}", str(value))]


def need(found: object, what: str) -> None:
    """Skip a test for want of something; fail it where every engine has to be here (ENGINES_REQUIRED=1)."""
    if found:
        return
    if os.environ.get("ENGINES_REQUIRED", "0") not in ("", "0"):
        pytest.fail(f"{what}: `make test-engines` installs it", pytrace=False)
    pytest.skip(what)


def need_programs(packages: str, *names: str, root: bool = False) -> None:
    absent = [name for name in names if shutil.which(name) is None]
    need(not absent, f"needs {', '.join(absent)} (apt-get install {packages})")
    need(not root or (os.name == "posix" and os.geteuid() == 0), "needs root")


def environment(home: Path, **extra: str) -> dict[str, str]:
    """This environment without what another launch has left in it; one thread a process, on the CPU."""
    names = (
        "ACCELERATE_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "OMP_",
        "SLURM_",
        "RAY_",
        "TORCHELASTIC_",
    )
    kept = {name: text for name, text in os.environ.items() if not name.startswith(names)}
    # Nothing is compiled here, and a program imports torch's compiler for more than a second.
    path = os.pathsep.join(
        [str(ROOT / "tests" / "helpers" / "start"), *filter(None, [kept.get("PYTHONPATH")])]
    )
    own = {
        "HF_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": path,
    }
    return {**kept, **own, **extra}


def run(command: list[object], env: dict[str, str], cwd: Path, timeout: float = 150) -> str:
    """Run a command to its good end; its output."""
    done = subprocess.run(
        [*map(str, command)], env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def train(output: Path, batch_size: int = 2) -> list[object]:
    """The training script with its arguments; `batch_size` is a process's."""
    script = ROOT / "examples" / "train_gpt.py"
    return [script, *TINY, "--batch_size", batch_size, "--output_dir", output]


def parameters(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def mpi_programs(folder: Path, implementation: str) -> str:
    """A PATH on which `mpirun` is that of `openmpi` or `mpich`, whichever else is installed."""
    need_programs("openmpi-bin mpich", f"mpirun.{implementation}")
    folder.mkdir()
    for name in ("mpirun", "mpiexec"):
        # A link would do for Open MPI; MPICH looks for its own programs beside it.
        (folder / name).write_text(
            f'#!/bin/sh\nexec {shutil.which(f"mpirun.{implementation}")} "$@"\n'
        )
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def wait_until_gone(pid: int, seconds: float = 10) -> None:
    """Until a process that is none of ours has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor):
        assert select.select([descriptor], [], [], seconds)[0], f"process {pid} is left behind"


@contextlib.contextmanager
def network_namespaces() -> Iterator[list[str]]:
    """Two machines with real addresses, 10.77.0.1 and 10.77.0.2, joined by a cable: the names of their namespaces."""
    need_programs("iproute2", "ip", root=True)
    tag = uuid.uuid4().hex[:6]
    names = [f"acc-{tag}-a", f"acc-{tag}-b"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [
        f"ip link add v{tag}a netns {names[0]} type veth peer name v{tag}b netns {names[1]}"
    ]
    for name, end, address in ((names[0], "a", "10.77.0.1"), (names[1], "b", "10.77.0.2")):
        commands += [
            f"ip -n {name} addr add {address}/24 dev v{tag}{end}",
            f"ip -n {name} link set v{tag}{end} up",
        ]
        commands += [f"ip -n {name} link set lo up"]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            need(done.returncode == 0, f"no network namespaces here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
SchedulerParameters=sched_interval=1,defer_batch
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Slurm with two nodes, both on this host: the variables of its clients."""
    need_programs(
        "slurmctld slurmd slurm-client munge", "munged", "slurmctld", "slurmd", "sbatch", root=True
    )
    # Munge refuses a path that others may write to.
    for part in [folder, *list(folder.parents)[:3]]:
        os.chmod(part, 0o755)
    conf = folder / "slurm.conf"
    conf.write_text(
        SLURM.format(folder=folder, host=socket.gethostname().split(".")[0], ports=_free_ports(3))
    )
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    started: list[subprocess.Popen] = []

    def start(*command: str) -> None:
        with open(folder / f"{command[0]}.{len(started)}.out", "wb") as log:
            variables = {**os.environ, "SLURM_CONF": str(conf)}
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=variables))

    start(
        "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
    )  # fmt: skip
    start("slurmctld", "-D", "-c", "-f", str(conf))
    for node in ("n1", "n2"):
        start("slurmd", "-D", "-N", node, "-f", str(conf))
    client = {"SLURM_CONF": str(conf)}
    try:
        _wait_for_slurm(folder, client)
        yield client
    finally:
        variables = {**os.environ, **client}
        subprocess.run(
            ["scancel", "--user", "root"], env=variables, capture_output=True, timeout=20
        )
        deadline = time.monotonic() + 20
        while subprocess.run(["squeue", "-h"], env=variables, capture_output=True).stdout:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(timeout=20)


def _wait_for_slurm(folder: Path, client: dict[str, str]) -> None:
    deadline = time.monotonic() + 40
    while True:
        command = ["sinfo", "-h", "-o", "%D %t"]
        told = subprocess.run(command, env={**os.environ, **client}, capture_output=True, text=True)
        if "2 idle" in told.stdout:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(
                path.read_text(errors="replace")[-600:] for path in folder.glob("*.log")
            )
            need(False, f"Slurm did not come up here: {told.stdout}{told.stderr}\n{logs}")
        time.sleep(0.2)


@contextlib.contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
    """Ray with two machines, both this host, two CPUs and two pretended GPUs each: the variables of its clients."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        need(False, "needs Ray (pip install ray)")
    # The tokens of Ray's authentication are a user's, in a home folder.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(
                num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 * 2**20
            )
        cluster.wait_for_nodes()
        yield {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
    finally:
        cluster.shutdown()
        del os.environ["RAY_AUTH_MODE"]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()

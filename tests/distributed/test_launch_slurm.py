# SPDX-License-Identifier: Apache-2.0
"""The Slurm engine on a real Slurm of two nodes, both on this host."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or any(shutil.which(name) is None for name in DAEMONS),
        reason="needs root and Slurm's daemons (apt-get install slurmctld slurmd slurm-client munge)",
    ),
]

CONF = """
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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment of a client of a cluster that lives for this module's tests."""
    # Munge refuses a path that others may write to.
    folder = tmp_path_factory.mktemp("slurm")
    os.chmod(folder, 0o755)
    for parent in list(folder.parents)[:3]:
        os.chmod(parent, 0o755)
    sockets = [socket.socket() for _ in range(3)]
    for free in sockets:
        free.bind(("127.0.0.1", 0))
    ports = [free.getsockname()[1] for free in sockets]
    for free in sockets:
        free.close()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=socket.gethostname().split(".")[0], ports=ports))
    (folder / "state").mkdir()
    for node in ("n1", "n2"):
        (folder / f"spool.{node}").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    started = []

    def start(*command):
        log = open(folder / f"{os.path.basename(command[0])}.{len(started)}.out", "wb")  # noqa: SIM115
        started.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "SLURM_CONF": str(conf)}))

    start(
        "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
    )  # fmt: skip
    start("slurmctld", "-D", "-c", "-f", str(conf))
    for node in ("n1", "n2"):
        start("slurmd", "-D", "-N", node, "-f", str(conf))
    env = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "ACCELERATE_", "RANK"))}
    env["SLURM_CONF"] = str(conf)
    try:
        deadline = time.monotonic() + 30
        while True:
            told = subprocess.run(["sinfo", "-h", "-o", "%D %t"], env=env, capture_output=True, text=True)
            if "2 idle" in told.stdout:
                break
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-600:] for path in folder.glob("*.log"))
                pytest.skip(f"Slurm did not come up here: {told.stdout}{told.stderr}\n{logs}")
            time.sleep(0.2)
        yield env
    finally:
        subprocess.run(["scancel", "--user", "root"], env=env, capture_output=True, timeout=20)
        deadline = time.monotonic() + 20
        while subprocess.run(["squeue", "-h"], env=env, capture_output=True).stdout and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(timeout=20)


def start(tmp_path, env, *arguments):
    command = [sys.executable, "-m", "accelerate.commands.main", "launch", "-q", "--engine", "slurm", "--cpu"]
    return subprocess.Popen(
        [*command, *map(str, arguments)], cwd=tmp_path, env={**env, "HF_HOME": str(tmp_path / "home")},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_ranks_on_two_nodes_cooperate(slurm, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch
            from accelerate.state import PartialState
            state = PartialState()
            total = torch.tensor(float(state.process_index + 1))
            torch.distributed.all_reduce(total)
            node, precision = os.environ["SLURMD_NODENAME"], os.environ["ACCELERATE_MIXED_PRECISION"]
            told = (state.process_index, state.num_processes, total.item(), node, precision)
            sys.stdout.write(" ".join(map(str, told)) + "\\n")
            """
        )
    )
    options = [
        "--num_machines",
        2,
        "--num_processes",
        2,
        "--mixed_precision",
        "bf16",
        "--num_cpu_threads_per_process",
        1,
    ]
    launch = start(tmp_path, slurm, *options, script)
    output, errors = launch.communicate(timeout=100)
    assert launch.returncode == 0, output + errors
    assert sorted(output.splitlines()) == ["0: 0 2 3.0 n1 bf16", "1: 1 2 3.0 n2 bf16"]
    assert (tmp_path / "train.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=train\n")


def test_a_failing_rank_s_code_is_the_launcher_s(slurm, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("import os, time\nif os.environ['SLURM_PROCID'] == '1': raise SystemExit(3)\ntime.sleep(60)\n")
    launch = start(tmp_path, slurm, "--num_machines", 2, "--num_processes", 2, script)
    output, errors = launch.communicate(timeout=60)
    assert launch.returncode == 3, output + errors


def test_an_interrupt_cancels_the_job(slurm, tmp_path):
    script = tmp_path / "wait.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(100)\n")
    launch = start(tmp_path, slurm, "--num_processes", 1, script)
    assert launch.stdout.readline().strip() == "0: up"
    launch.send_signal(signal.SIGINT)
    launch.communicate(timeout=30)
    assert launch.returncode == 130
    deadline = time.monotonic() + 20
    while subprocess.run(["squeue", "-h"], env=slurm, capture_output=True, text=True).stdout.strip():
        assert time.monotonic() < deadline, "the job goes on"
        time.sleep(0.2)

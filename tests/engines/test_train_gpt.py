# SPDX-License-Identifier: Apache-2.0
"""One training script under every engine: the same parameters to the last bit wherever two processes train."""

import os
import subprocess

import pytest
import torch
from cases import cases
from engines import LAUNCH, PYTHON, environment, mpi_programs, need_programs, parameters, run, train

from accelerate.core.imports import is_available

# Two processes, in the engines' own ways. All start in a folder with a configuration of its own.
TWO = [*LAUNCH, "-q", "--cpu", "--num_processes", "2"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="session")
def env(folder):
    """The environment of a user who has configured once, with `accelerate config default`."""
    env = environment(folder / "home")
    run([*PYTHON, "accelerate.commands.main", "config", "default"], env, folder)
    assert (folder / "home" / "accelerate" / "default_config.yaml").is_file()
    return env


@pytest.fixture(scope="session")
def reference(folder, env):
    """What two processes started by `accelerate launch` end at."""
    run([*TWO, *train(folder / "reference")], env, folder)
    return parameters(folder / "reference")


def same(found, reference):
    assert found.keys() == reference.keys()
    different = [name for name in found if not torch.equal(found[name], reference[name])]
    assert not different, different


def test_one_process_within_rounding(folder, env, reference):
    # The same global batches: one process reads what two read together.
    run([*LAUNCH, *train(folder / "one", batch_size=4)], env, folder)
    found = parameters(folder / "one")
    assert found.keys() == reference.keys()
    far = max((found[name] - reference[name]).abs().max().item() for name in found)
    print(f"one process against two: at most {far:.1e} apart")
    assert 0 <= far < 1e-6


@pytest.mark.thorough
def test_torchrun(folder, env, reference):
    run(
        [
            *PYTHON,
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            2,
            *train(folder / "torchrun"),
        ],
        env,
        folder,
    )
    same(parameters(folder / "torchrun"), reference)


def test_two_network_namespaces(folder, env, reference, namespaces):
    started = []
    for rank, name in enumerate(namespaces):
        options = ["--num_machines", 2, "--machine_rank", rank, "--main_process_ip", "10.77.0.1"]
        command = [
            *map(str, ["ip", "netns", "exec", name, *TWO, *options, *train(folder / "namespaces")])
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(command, env=env, cwd=folder, text=True, **pipes))
    told = [process.communicate(timeout=150)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    same(parameters(folder / "namespaces"), reference)


@pytest.mark.parametrize("implementation", cases(["openmpi", "mpich"], thorough=["openmpi"]))
def test_mpirun(folder, env, reference, implementation):
    programs = folder / implementation
    env = {**env, "PATH": mpi_programs(programs, implementation)}
    # The hosts stand in a file that the configuration names, as `mpirun_config` has it.
    hosts = programs / "hosts"
    hosts.write_text("localhost slots=2\n" if implementation == "openmpi" else "localhost:2\n")
    config = programs / "config.yaml"
    config.write_text(
        f"use_cpu: true\nnum_processes: 2\nmpirun_config:\n  mpirun_hostfile: {hosts}\n"
    )
    output = programs / "out"
    run([*LAUNCH, "-q", "--config_file", config, *train(output)], env, folder)
    same(parameters(output), reference)


# DeepSpeed's starter reaches machines through pdsh, and that through ssh: this one reaches only this machine.
SSH = """#!/bin/sh
while :; do case "$1" in -l|-o) shift 2;; -*) shift;; *) break;; esac; done
shift
exec sh -c "$*"
"""


@pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed")
def test_deepspeeds_starter_through_pdsh(folder, env, reference):
    need_programs("pdsh", "pdsh")
    hosts = folder / "hosts"
    hosts.write_text("h1 slots=1\nh2 slots=1\n")
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    env = {**env, "PATH": f"{folder}{os.pathsep}{env['PATH']}", "DS_ACCELERATOR": "cpu"}
    options = ["--engine", "deepspeed", "--num_machines", 2, "--deepspeed_hostfile", hosts]
    run(
        [*TWO, *options, "--main_process_ip", "127.0.0.1", *train(folder / "deepspeed")],
        env,
        folder,
    )
    same(parameters(folder / "deepspeed"), reference)


def test_slurm_of_two_nodes(folder, env, reference, slurm):
    options = ["--engine", "slurm", "--num_machines", 2, "--num_cpu_threads_per_process", 1]
    run([*TWO, *options, *train(folder / "slurm")], {**env, **slurm}, folder)
    same(parameters(folder / "slurm"), reference)


@pytest.mark.thorough
def test_ray_of_two_nodes(folder, env, reference, ray):
    run(
        [*TWO, "--engine", "ray", "--num_machines", 2, *train(folder / "ray")],
        {**env, **ray},
        folder,
    )
    same(parameters(folder / "ray"), reference)

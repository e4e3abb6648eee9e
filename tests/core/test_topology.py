# SPDX-License-Identifier: Apache-2.0
"""Ranks read from the variables of torchrun, MPI and Slurm."""

import pytest

from accelerate.core.env import clear_environment, publish
from accelerate.core.errors import ConfigurationError
from accelerate.core.topology import Topology


@pytest.fixture(autouse=True)
def bare_environment():
    with clear_environment():
        yield


def told(**variables):
    publish(variables)
    return Topology.from_environment()


def test_alone():
    assert Topology.from_environment() == Topology(0, 1, 0, 1, None, None, "none")


def test_torchrun():
    found = told(
        RANK=5,
        WORLD_SIZE=8,
        LOCAL_RANK=1,
        LOCAL_WORLD_SIZE=4,
        MASTER_ADDR="10.0.0.1",
        MASTER_PORT=29500,
    )
    assert found == Topology(5, 8, 1, 4, "10.0.0.1", 29500, "torchrun")


@pytest.mark.parametrize(
    ("prefix", "launcher"),
    [("OMPI_COMM_WORLD_{}", "openmpi"), ("MV2_COMM_WORLD_{}", "mvapich")],
)
def test_mpi(prefix, launcher):
    names = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}
    found = told(
        **{prefix.format(name): value for name, value in names.items()},
        MASTER_ADDR="h",
        MASTER_PORT=1,
    )
    assert found == Topology(3, 4, 1, 2, "h", 1, launcher)


def test_mpich_and_intel():
    found = told(PMI_RANK=1, PMI_SIZE=2, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2)
    assert (found.rank, found.world_size, found.local_rank, found.launcher) == (1, 2, 1, "mpich")


def test_slurm_step():
    step = {"PROCID": 4, "STEP_NUM_TASKS": 5, "STEP_ID": 0, "LOCALID": 0, "NODEID": 2, "JOB_ID": 99}
    nodes = {"STEP_TASKS_PER_NODE": "2(x2),1", "STEP_NODELIST": "gpu[003-004,7]"}
    found = told(**{f"SLURM_{name}": value for name, value in (step | nodes).items()})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (4, 5, 0, 1)
    assert found.master_addr == "gpu003"
    assert 20000 <= found.master_port < 32000


def test_slurm_batch_script_is_one_process():
    """The batch script itself carries Slurm's variables and is no task of a step."""
    assert told(SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_JOB_ID=99).launcher == "none"


def test_torchrun_speaks_before_slurm():
    found = told(RANK=0, WORLD_SIZE=2, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4, SLURM_STEP_ID=0)
    assert (found.world_size, found.launcher) == (2, "torchrun")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": 0}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 is not a rank of WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": 2}, "RANK='x' is not an integer"),
    ],
)
def test_contradictions(variables, message):
    with pytest.raises(ConfigurationError, match=message):
        told(**variables)

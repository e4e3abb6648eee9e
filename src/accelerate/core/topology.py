# SPDX-License-Identifier: Apache-2.0
"""Which of how many processes this one is: read from the variables of whoever started it. The launcher imports it."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from . import env
from .errors import ConfigurationError


class RankVariables(NamedTuple):
    """The variables with a process's rank and sizes that one kind of launcher sets."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None = None
    requires: str | None = None


# The first source whose rank and world size are both set counts. Slurm sets its variables in the batch script too,
# where there is one process only: a step (srun) has an id as well.
LAUNCHERS = (
    RankVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    RankVariables("openmpi", *(f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    RankVariables("mvapich", *(f"MV2_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    RankVariables("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    RankVariables("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, requires="SLURM_STEP_ID"),
)  # fmt: skip


class Topology(NamedTuple):
    """The rank of this process and the sizes of its run.

    `rank` counts over all machines, `local_rank` on this one. `launcher` is what has set the variables; "none" means
    a single process that was started without a launcher.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "none"

    @staticmethod
    def from_environment() -> Topology:
        """The topology from the environment; a single process where no variable is set.

        Raises ConfigurationError where the variables are incomplete or contradictory.
        """
        for source in LAUNCHERS:
            rank, world_size = env.get_int(source.rank), env.get_int(source.world_size)
            if source.requires is not None and env.get(source.requires) is None:
                continue
            if rank is not None and world_size is not None:
                return _read(source, rank, world_size)
            if source.launcher == "torchrun" and (rank is not None or (world_size or 1) > 1):
                if rank is not None:
                    given, absent = ("RANK", "WORLD_SIZE")
                else:
                    given, absent = ("WORLD_SIZE", "RANK")
                raise ConfigurationError(
                    f"{given} is set but {absent} is not: set both for each process, or neither "
                    "to run a single process"
                )
        return Topology()


def _read(source: RankVariables, rank: int, world_size: int) -> Topology:
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"{source.rank}={rank} is not a rank of {source.world_size}={world_size}: ranks are 0 to {world_size - 1}"
        )
    local_rank = env.get_int(source.local_rank)
    if source.local_world_size:
        local_world_size = env.get_int(source.local_world_size)
    else:
        local_world_size = _slurm_tasks_here()
    master_addr, master_port = env.get("MASTER_ADDR"), env.get_int("MASTER_PORT")
    if source.launcher == "slurm":
        master_addr = master_addr or _slurm_first_host()
        # All ranks of a job step derive this port, and other steps are unlikely to use it. Systems hand out ports to
        # connections from a higher range.
        step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        master_port = master_port or 20000 + zlib.crc32(step.encode()) % 12000
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=local_world_size or world_size,
        master_addr=master_addr,
        master_port=master_port,
        launcher=source.launcher,
    )


def _slurm_tasks_here() -> int | None:
    """The number of tasks on this node, from a list such as `2(x3),1` and this node's place in it."""
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE") or "", env.get_int("SLURM_NODEID") or 0
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        number, _, times = part.partition("(x")
        counts += [int(number)] * (int(times.rstrip(")")) if times else 1)
    if node < len(counts):
        return counts[node]
    return None


def _slurm_first_host() -> str | None:
    """The first host of a list such as `gpu[003-004,7],head`."""
    names = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if names is None:
        return None
    head, bracket, rest = names.partition("[")
    if not bracket or "," in head:
        return names.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]

# SPDX-License-Identifier: Apache-2.0
"""The variables with which launchers tell a process its rank. The launcher imports them at its start."""

from __future__ import annotations

from typing import NamedTuple


class RankVariables(NamedTuple):
    """The variables with a process's rank and sizes that one kind of launcher sets."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None = None
    requires: str | None = None


# The first source whose rank and world size are both set speaks. Slurm sets its variables in the batch script too,
# where there is one process only: a step (srun) has an id as well.
LAUNCHERS = (
    RankVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    RankVariables("openmpi", *(f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    RankVariables("mvapich", *(f"MV2_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    RankVariables("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    RankVariables("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, requires="SLURM_STEP_ID"),
)  # fmt: skip

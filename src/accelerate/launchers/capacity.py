# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can carry the processes of a launch: its processors and its free memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import env, system
from ..core.errors import ConfigurationError
from .spec import LaunchSpec

# Bytes that each process takes for itself before the script does anything: USS of a process that has imported torch
# 2.13 for the CPU and joined a gloo group, 149 MiB on Linux (builds for CUDA take more). A model comes on top.
PROCESS = 150 * 2**20
# For a process that is forked from one that has imported torch: USS was 9 MiB after it had joined a gloo group, and
# 106 MiB after one step of DDP, which imports more (torch 2.13 for the CPU). The check refuses only what cannot fit,
# and counts between the two.
FORKED_PROCESS = 40 * 2**20
# Engines whose processes do not run here, or that count them themselves.
ELSEWHERE = frozenset({"slurm", "ray", "kubernetes", "tpu", "deepspeed"})


@dataclass(frozen=True)
class Capacity:
    """What a machine has. cpus: logical processors; memory: free bytes, None where it is not known."""

    cpus: int
    memory: int | None

    @classmethod
    def of_this_machine(cls) -> Capacity:
        return cls(system.usable_cpu_count(), system.available_memory())


def shortage_of_memory(processes: int, each: int, capacity: Capacity) -> str | None:
    """Why so many processes do not fit into the free memory; None where they do."""
    if processes <= 1 or capacity.memory is None or processes * each <= capacity.memory:
        return None
    return (
        f"{processes} processes on this machine take at least {_gib(processes * each)} of memory "
        f"({each // 2**20} MiB each, without any model), and {_gib(capacity.memory)} are free: at most "
        f"{max(1, capacity.memory // each)} fit"
    )


def shortage_of_cpus(processes: int, threads: int | None, capacity: Capacity) -> str | None:
    """What is to be said where processes, or their threads, have to share processors; None where they need not."""
    if processes > capacity.cpus:
        return (
            f"{processes} processes share {_cpus(capacity)}: each gets a part of one, and all are slower "
            f"for it. --num_processes {capacity.cpus} uses them fully"
        )
    if threads is not None and processes * threads > capacity.cpus:
        return (
            f"{processes} process{'es' if processes > 1 else ''} of {threads} threads share {_cpus(capacity)}: they "
            f"slow each other down. --num_cpu_threads_per_process {max(1, capacity.cpus // processes)} fits"
        )
    return None


def check(spec: LaunchSpec, engine: str, oversubscribe: bool, capacity: Capacity | None = None) -> list[str]:
    """The warnings about a launch on this machine. ConfigurationError where its memory cannot hold the processes."""
    if engine in ELSEWHERE or (engine == "mpi" and spec.hostfile):
        return []
    capacity = capacity or Capacity.of_this_machine()
    processes = spec.local_processes
    lack = shortage_of_memory(processes, PROCESS, capacity)
    if lack and not oversubscribe:
        raise ConfigurationError(
            f"num_processes={spec.num_processes}: {lack}. Ask for fewer, or give --oversubscribe to start them "
            "all the same"
        )
    crowd = shortage_of_cpus(processes, spec.threads, capacity) if spec.device == "cpu" else None
    return [text for text in (lack, crowd) if text]


def check_forked(processes: int, capacity: Capacity | None = None) -> str | None:
    """The same for functions in forked processes, which have no options: a variable allows what does not fit."""
    capacity = capacity or Capacity.of_this_machine()
    lack = shortage_of_memory(processes, FORKED_PROCESS, capacity)
    if lack and not env.get_flag("oversubscribe"):
        raise ConfigurationError(
            f"num_processes={processes}: {lack}. Ask for fewer, or set {env.variable('oversubscribe')}=1 to start "
            "them all the same"
        )
    return lack or shortage_of_cpus(processes, None, capacity)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _cpus(capacity: Capacity) -> str:
    return f"{capacity.cpus} processor{'s' if capacity.cpus > 1 else ''}"

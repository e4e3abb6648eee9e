# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has enough processors and free memory for the processes of a launch."""

from __future__ import annotations

from typing import NamedTuple

from ..core import env, system
from ..core.errors import ConfigurationError
from .spec import LaunchSpec

# Bytes of a process before the script does anything: the USS after importing torch 2.13 for the CPU and joining a gloo
# group is 149 MiB on Linux (builds for CUDA need more).
PROCESS = 150 * 2**20
# For a process forked from one that has imported torch: the USS is 9 MiB after joining a gloo group, and 106 MiB after
# one step of DDP, which imports more (torch 2.13 for the CPU). The estimate is between the two.
FORKED_PROCESS = 40 * 2**20


class Capacity(NamedTuple):
    """The resources of a machine. cpus: logical processors; memory: free bytes, None where unknown."""

    cpus: int
    memory: int | None

    @classmethod
    def of_this_machine(cls) -> Capacity:
        """Return the usable cores and the free memory of this machine."""
        return cls(system.usable_cpu_count(), system.available_memory())


def shortage_of_memory(processes: int, each: int, capacity: Capacity) -> str | None:
    """Why the processes do not fit into the free memory; None where they do."""
    if processes <= 1 or capacity.memory is None or processes * each <= capacity.memory:
        return None
    return (
        f"{processes} processes on this machine take at least {_gib(processes * each)} of memory "
        f"({each // 2**20} MiB each, without any model), and {_gib(capacity.memory)} are free: at most "
        f"{max(1, capacity.memory // each)} fit"
    )


def shortage_of_cpus(processes: int, threads: int | None, capacity: Capacity) -> str | None:
    """The warning where processes or their threads share processors; None where they do not."""
    if processes > capacity.cpus:
        return (
            f"{processes} processes share {_cpus(capacity)}: all of them run slower. "
            f"--num_processes {capacity.cpus} uses the processors fully"
        )
    if threads is not None and processes * threads > capacity.cpus:
        return (
            f"{processes} process{'es' if processes > 1 else ''} of {threads} threads share {_cpus(capacity)} and "
            f"slow each other down. --num_cpu_threads_per_process {max(1, capacity.cpus // processes)} fits"
        )
    return None


def check(spec: LaunchSpec, oversubscribe: bool, capacity: Capacity | None = None) -> list[str]:
    """The warnings about a launch on this machine; ConfigurationError where its memory is too small."""
    capacity = capacity or Capacity.of_this_machine()
    processes = spec.local_processes
    lack = shortage_of_memory(processes, PROCESS, capacity)
    if lack and not oversubscribe:
        raise ConfigurationError(
            f"num_processes={spec.num_processes}: {lack}. Use fewer, or --oversubscribe to start them anyway"
        )
    crowd = shortage_of_cpus(processes, spec.threads, capacity) if spec.device == "cpu" else None
    return [text for text in (lack, crowd) if text]


def check_forked(processes: int, capacity: Capacity | None = None) -> str | None:
    """`check` for functions in forked processes, where a variable replaces the option --oversubscribe."""
    capacity = capacity or Capacity.of_this_machine()
    lack = shortage_of_memory(processes, FORKED_PROCESS, capacity)
    if lack and not env.get_flag("ACCELERATE_OVERSUBSCRIBE"):
        raise ConfigurationError(
            f"num_processes={processes}: {lack}. Use fewer, or set ACCELERATE_OVERSUBSCRIBE=1 to start them anyway"
        )
    return lack or shortage_of_cpus(processes, None, capacity)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _cpus(capacity: Capacity) -> str:
    return f"{capacity.cpus} processor{'s' if capacity.cpus > 1 else ''}"

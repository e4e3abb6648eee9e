# SPDX-License-Identifier: Apache-2.0
"""What this machine is: its kernel, its GPUs and how they reach one another, and the processors near each of them."""

from __future__ import annotations

import functools
import logging
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import parse

from ..core import env
from ..core.availability import is_cuda_available
from ..core.devices import accelerator_type, kind_of
from ..core.topology import Topology

logger: logging.Logger = logging.getLogger(__name__)

MINIMUM_KERNEL = "5.5.0"
# The first driver under which RTX 40 cards exchange data directly without error.
P2P_DRIVER = "550.40.07"


@dataclass
class CPUInformation:
    """The ranks and sizes of a process in a CPU run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Ranks and sizes from the environment of torchrun, this package's launcher, MPI or Slurm."""
    topology = Topology.from_environment()
    return CPUInformation(
        topology.rank, topology.world_size, topology.local_rank, topology.local_world_size
    )


def get_current_device_type() -> tuple[str, str]:
    """The type of this machine's device and the kind of run that several processes on it make."""
    row = kind_of(accelerator_type() or "cpu")
    return row.type, row.distributed.value


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, where processes are known to hang."""
    name, *_ = platform.uname()
    release = platform.release().split("-")[0].split("+")[0]
    if name == "Linux" and release and parse(release) < parse(MINIMUM_KERNEL):
        logger.warning(
            "This kernel is %s; runs can hang below %s. Upgrade it.", release, MINIMUM_KERNEL
        )


def _nvidia_smi(field: str) -> list[str]:
    """One field of each NVIDIA GPU, from its own tool, so that this process touches no GPU. Empty without GPUs."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    if done.returncode == 0:
        return done.stdout.strip().splitlines()
    return []


def get_gpu_info() -> tuple[list[str], int]:
    """The names of this machine's NVIDIA GPUs, and their number."""
    names = _nvidia_smi("name")
    return names, len(names)


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs of this machine can exchange data directly.

    Two or more RTX 40 cards cannot under an old driver.
    """
    names, count = get_gpu_info()
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    drivers = _nvidia_smi("driver_version")
    return bool(drivers) and parse(drivers[0]) >= parse(P2P_DRIVER)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors close to its CUDA device. Nothing happens without one, or without Linux.

    `verbose` logs what was done; None means in debug mode (ACCELERATE_DEBUG_MODE).
    """
    if sys.platform != "linux" or not is_cuda_available():
        return
    # A container may have fewer processors than the machine shows.
    processors = _processors_near(local_process_index) & os.sched_getaffinity(0)
    if not processors:
        return
    os.sched_setaffinity(0, processors)
    if verbose is None:
        verbose = env.get_flag("ACCELERATE_DEBUG_MODE")
    if verbose:
        logger.info(
            "local process %d runs on processors %s", local_process_index, sorted(processors)
        )


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity` once: later calls for the same process keep what the user set in the meantime."""
    override_numa_affinity(local_process_index, verbose)


def _processors_near(index: int) -> set[int]:
    import torch

    device: Any = torch.cuda.get_device_properties(index)
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices", address, "local_cpulist")
    if not listed.exists():
        return set()
    return parse_cpu_list(listed.read_text())


def parse_cpu_list(text: str) -> set[int]:
    """The numbers of a kernel list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers

# SPDX-License-Identifier: Apache-2.0
"""What this machine has, found out without importing torch: accelerators, cores, torch's build."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from . import env


@dataclass(frozen=True)
class Accelerators:
    """The accelerators this process may use: their kind (torch's device type) and how many. ("cpu", 0) for none."""

    kind: str
    count: int
    visible: str | None = None


@functools.cache
def torch_build() -> dict[str, str]:
    """The installed torch's `version`, and `cuda`, `hip`, `xpu` where it was built for them. Empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).with_name("version.py")
    if not file.is_file():
        return {}
    found = re.findall(r"^(?:__)?(version|cuda|hip|xpu)(?:__)?\b[^=\n]*=\s*'([^']+)'", file.read_text(), re.MULTILINE)
    return dict(found)


def accelerators() -> Accelerators:
    """The accelerators that torch could use here, the visible-devices variables heeded.

    Only device files and the driver's own library are asked: no context is made and torch is not imported.
    """
    build = torch_build()
    for kind, visible, count in (
        ("cuda", "CUDA_VISIBLE_DEVICES", _cuda_count if build.get("cuda") or build.get("hip") else None),
        ("xpu", "ZE_AFFINITY_MASK", _xpu_count if build.get("xpu") else None),
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", _counter("davinci[0-9]*", "torch_npu")),
        ("hpu", "HABANA_VISIBLE_MODULES", _counter("accel/accel[0-9]*", "habana_frameworks")),
        ("mlu", "MLU_VISIBLE_DEVICES", _counter("cambricon_dev[0-9]*", "torch_mlu")),
        ("musa", "MUSA_VISIBLE_DEVICES", _counter("mtgpu.[0-9]*", "torch_musa")),
        ("neuron", "NEURON_RT_VISIBLE_CORES", _counter("neuron[0-9]*", "torch_neuronx")),
    ):
        present = count() if count else 0
        usable = _limited(present, visible)
        if usable:
            return Accelerators(kind, usable, visible)
    if _is_apple_silicon():
        return Accelerators("mps", 1)
    return Accelerators("cpu", 0)


def _counter(pattern: str, module: str) -> functools.partial[int] | None:
    """Counts device files, where the torch extension that drives them is installed."""
    return functools.partial(_device_files, pattern) if importlib.util.find_spec(module) else None


def _device_files(pattern: str) -> int:
    return sum(1 for path in Path("/dev").glob(pattern) if path.name[-1].isdigit())


def _limited(present: int, variable: str) -> int:
    """How many devices a visible-devices variable leaves. Set and empty, it leaves none."""
    text = env.all_with_prefix(variable).get(variable)
    if text is None or not present:
        return present
    named = 0
    for entry in text.split(","):
        entry = entry.strip()
        if not entry or entry.startswith("-") or (entry.isdigit() and int(entry) >= present):
            break
        named += 1
    return named


def _cuda_count() -> int:
    if torch_build().get("hip"):
        nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/simd_count")
        return sum(1 for node in nodes if node.read_text().strip() != "0")
    if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg") or os.name == "nt"):
        return 0
    return _nvml_count()


def _nvml_count() -> int:
    import ctypes

    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return _device_files("nvidia[0-9]*")
    except (OSError, AttributeError):
        return _device_files("nvidia[0-9]*")
    nvml.nvmlShutdown()
    return int(count.value)


def _xpu_count() -> int:
    vendors = Path("/sys/class/drm").glob("card[0-9]*/device/vendor")
    return sum(1 for vendor in vendors if vendor.read_text().strip() == "0x8086")


def _is_apple_silicon() -> bool:
    uname = os.uname() if hasattr(os, "uname") else None
    return uname is not None and uname.sysname == "Darwin" and uname.machine == "arm64"


def usable_cpus() -> list[int]:
    """The logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_of_cpus(index: int, count: int) -> list[int]:
    """The logical processors of one of `count` processes that share this machine: whole cores, near each other.

    Processors are ordered by memory node and core, so that a share crosses a node's border only where it must. With
    fewer cores than processes some processes get the same.
    """
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in usable_cpus():
        cores.setdefault((_memory_node(cpu), _siblings(cpu)), []).append(cpu)
    ordered = [cpus for _, cpus in sorted(cores.items(), key=lambda item: (item[0][0], item[1][0]))]
    if count >= len(ordered):
        return ordered[index % len(ordered)]
    start, end = index * len(ordered) // count, (index + 1) * len(ordered) // count
    return sorted(cpu for cpus in ordered[start:end] for cpu in cpus)


def _memory_node(cpu: int) -> int:
    nodes = [path.name[4:] for path in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")]
    return int(nodes[0]) if nodes else 0


def _siblings(cpu: int) -> str:
    """The hyper-threads of a processor's core, as the kernel lists them."""
    listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return listed.read_text().strip() if listed.exists() else str(cpu)


def physical_cores() -> int:
    """The cores this process may use: hyper-threads of one core count once, and a container's quota is heeded."""
    cores = {_siblings(cpu) for cpu in usable_cpus()}
    quota = _container_quota()
    return max(1, min(len(cores), quota) if quota else len(cores))


def _container_quota() -> int | None:
    """Whole processors that the control group grants, or None without a limit."""
    try:
        granted, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if granted == "max" else max(1, int(granted) // int(period))


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal. Linux tells; elsewhere False."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)

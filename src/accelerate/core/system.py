# SPDX-License-Identifier: Apache-2.0
"""What this machine has, found out without importing torch: accelerators, cores, torch's build."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import env
from .device_kinds import DEVICES, DeviceKind

CONTROL_GROUPS = Path("/sys/fs/cgroup")


class Accelerators(NamedTuple):
    """The accelerators this process may use: their kind (torch's device type) and how many. ("cpu", 0) for none."""

    kind: str
    number: int
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
    found = re.findall(
        r"^(?:__)?(version|cuda|hip|xpu)(?:__)?\b[^=\n]*=\s*'([^']+)'",
        file.read_text(),
        re.MULTILINE,
    )
    return dict(found)


def accelerators() -> Accelerators:
    """The accelerators that torch could use here, limited by the visible-devices variables.

    It reads device files and the driver's own library: no context is made and torch is not imported.
    """
    for kind in DEVICES.values():
        count = _counter_of(kind)
        if count is None or kind.visible is None:
            continue
        usable = _limited(count(), kind.visible)
        if usable:
            return Accelerators(kind.type, usable, kind.visible)
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return Accelerators("mps", 1)
    return Accelerators("cpu", 0)


def _counter_of(kind: DeviceKind) -> Callable[[], int] | None:
    """Counts the devices of a kind; None where the installed torch cannot drive them."""
    build = torch_build()
    if kind.type == "cuda":
        if build.get("cuda") or build.get("hip"):
            return _cuda_count
        return None
    if kind.type == "xpu":
        if build.get("xpu"):
            return _xpu_count
        return None
    if (
        kind.device_files is None
        or kind.extension is None
        or not importlib.util.find_spec(kind.extension)
    ):
        return None
    return functools.partial(_device_files, kind.device_files)


def _device_files(pattern: str) -> int:
    return sum(1 for path in Path("/dev").glob(pattern) if path.name[-1].isdigit())


def _limited(present: int, variable: str) -> int:
    """How many devices a visible-devices variable leaves. Set and empty, it leaves none."""
    text = env.raw(variable)
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


def usable_cpus() -> list[int]:
    """The logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_of_cpus(index: int, count: int) -> list[int]:
    """The logical processors of one of `count` processes that share this machine: full cores, near each other.

    Processors are ordered by memory node and core, so that a share spans two nodes only if it must. With
    fewer cores than processes some processes get the same.
    """
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in usable_cpus():
        nodes = list(Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*"))
        node = int(nodes[0].name[4:]) if nodes else 0
        cores.setdefault((node, _siblings(cpu)), []).append(cpu)
    ordered = [cpus for _, cpus in sorted(cores.items(), key=lambda item: (item[0][0], item[1][0]))]
    if count >= len(ordered):
        return ordered[index % len(ordered)]
    start, end = index * len(ordered) // count, (index + 1) * len(ordered) // count
    return sorted(itertools.chain(*ordered[start:end]))


def _siblings(cpu: int) -> str:
    """The hyper-threads of a processor's core, as the kernel lists them."""
    listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    if listed.exists():
        return listed.read_text().strip()
    return str(cpu)


def physical_cores() -> int:
    """The cores this process may use: hyper-threads of one core count once, and a container's quota limits them."""
    cores = {_siblings(cpu) for cpu in usable_cpus()}
    return _within_quota(len(cores))


def _within_quota(count: int) -> int:
    """As many of `count` processors as the control groups grant."""
    for folder in _control_groups():
        with contextlib.suppress(OSError, ValueError):
            granted, period = (folder / "cpu.max").read_text().split()
            if granted != "max":
                count = min(count, int(granted) // int(period))
    return max(1, count)


def _control_groups() -> list[Path]:
    """The folders of this process's control groups (version 2), from its own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = Path(
        next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/").lstrip("/")
    )
    # Inside a container the path may be the host's, of which only the root is mounted.
    return [
        folder
        for folder in (CONTROL_GROUPS / part for part in (own, *own.parents))
        if folder.is_dir()
    ]


def usable_cpu_count() -> int:
    """The logical processors this process may use, limited by a container's quota."""
    return _within_quota(len(usable_cpus()))


def available_memory() -> int:
    """Bytes that new processes can take without swapping: the machine's and the control groups'."""
    import psutil

    present = [int(psutil.virtual_memory().available)]
    for folder in _control_groups():
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())  # "max" without a limit
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # Cached files that the group can drop count as free.
            used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            present.append(max(0, limit - used))
    return min(present)


def uses_libuv() -> bool:
    """Whether torch stores run on libuv. As in torch's own rule, that is not the default on Windows.

    Torch's builds for Windows may lack libuv, and its stores refuse to start then: pytorch/pytorch#139990.
    """
    default = "0" if sys.platform == "win32" else "1"
    return env.get("USE_LIBUV", default) == "1"


def find_program(name: str) -> str | None:
    """The path of a program on the PATH, else next to this interpreter, whose environment need not be activated."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for a signal. Known on Linux only; elsewhere False."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


@functools.cache
def machine_identity() -> str:
    """Equal for processes that see each other's process ids: those of one machine and one container."""
    marks = [socket.gethostname()]
    with contextlib.suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        marks.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(marks)


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None where there is none, or only its exit code is left.

    Known on Linux only; elsewhere None.
    """
    state, *fields = _process_fields(pid)
    if state in b"ZX":
        return None
    return int(fields[18])


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger. Known on Linux only."""
    return _process_fields(pid)[0] in (b"T", b"t")


def _process_fields(pid: int) -> list[bytes]:
    """The state of a process and what follows it in Linux's table of processes; its state is X if there is none."""
    try:
        # The name in parentheses may contain spaces.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split() or [b"X"]
    except OSError:
        return [b"X"]

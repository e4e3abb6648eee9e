# SPDX-License-Identifier: Apache-2.0
"""What the machine is: ranks told by the starter, GPUs told by their own tool, processors near a device."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from accelerate.core.env import patch_environment
from accelerate.runtime import hardware


def fake_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], driver: str) -> None:
    told = {"name": names, "driver_version": [driver] * len(names)}
    cases = [f"*={field}) printf '%s\\n' {' '.join(map(repr, values))};;" for field, values in told.items()]
    tool = folder / "nvidia-smi"
    tool.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *cases, "esac", ""]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_ranks_as_mpi_tells_them() -> None:
    told = {
        "OMPI_COMM_WORLD_RANK": 3,
        "OMPI_COMM_WORLD_SIZE": 4,
        "OMPI_COMM_WORLD_LOCAL_RANK": 1,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    }
    with patch_environment(**told):
        assert hardware.get_cpu_distributed_information() == hardware.CPUInformation(3, 4, 1, 2)


def test_gpus_are_counted_by_their_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.get_gpu_info() == ([], 0)
    assert hardware.check_cuda_p2p_ib_support()


@pytest.mark.parametrize(
    ("names", "driver", "supported"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.10.01", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "535.10.01", True),
        (["NVIDIA H200"] * 8, "535.10.01", True),
    ],
)
def test_peer_to_peer_of_consumer_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], driver: str, supported: bool
) -> None:
    fake_tool(tmp_path, monkeypatch, names, driver)
    assert hardware.get_gpu_info() == (names, len(names))
    assert hardware.check_cuda_p2p_ib_support() is supported


@pytest.mark.parametrize(("release", "warned"), [("5.4.0-90-generic", True), ("5.10.0+deb", False), ("6.1", False)])
def test_old_kernels_are_warned_of(
    release: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.uname", lambda: ("Linux", "host", release, "", ""))
    monkeypatch.setattr("platform.release", lambda: release)
    with caplog.at_level(logging.WARNING):
        hardware.check_os_kernel()
    assert bool(caplog.records) is warned


def test_processor_lists() -> None:
    assert hardware.parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert hardware.parse_cpu_list("\n") == set()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_affinity_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.sched_getaffinity(0)
    one = {min(own)}
    monkeypatch.setattr(hardware, "_processors_near", lambda index: one)
    hardware.set_numa_affinity.cache_clear()
    try:
        hardware.set_numa_affinity(0)
        assert os.sched_getaffinity(0) == one
        os.sched_setaffinity(0, own)
        hardware.set_numa_affinity(0)
        assert os.sched_getaffinity(0) == own, "a second call must leave what was set meanwhile"
        hardware.override_numa_affinity(0)
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, own)
        hardware.set_numa_affinity.cache_clear()

# SPDX-License-Identifier: Apache-2.0
"""What the machine is: ranks told by the starter, GPUs told by their own tool, processors near a device."""

from __future__ import annotations

import logging

import pytest

from accelerate.core.env import patch_environment
from accelerate.runtime import hardware


def test_ranks_as_mpi_tells_them() -> None:
    told = {
        "OMPI_COMM_WORLD_RANK": 3,
        "OMPI_COMM_WORLD_SIZE": 4,
        "OMPI_COMM_WORLD_LOCAL_RANK": 1,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    }
    with patch_environment(**told):
        assert hardware.get_cpu_distributed_information() == hardware.CPUInformation(3, 4, 1, 2)


@pytest.mark.parametrize(("driver", "supported"), [("535.10.01", False), ("550.40.07", True)])
def test_peer_to_peer_of_consumer_cards(
    driver: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"name": ["NVIDIA GeForce RTX 4090"] * 2, "driver_version": [driver] * 2}
    monkeypatch.setattr(hardware, "_nvidia_smi", fields.get)
    assert hardware.get_gpu_info() == (fields["name"], 2)
    assert hardware.check_cuda_p2p_ib_support() is supported


@pytest.mark.parametrize(
    ("release", "warned"), [("5.4.0-90-generic", True), ("5.10.0+deb", False), ("6.1", False)]
)
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

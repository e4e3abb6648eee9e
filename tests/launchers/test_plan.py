# SPDX-License-Identifier: Apache-2.0
"""What a machine can carry: processes against processors, limits of containers, devices that a notebook has used."""

import types

import pytest
import torch

from accelerate.core import system
from accelerate.core.errors import LaunchError
from accelerate.launchers.plan import shortage_of_cpus


def test_more_processes_or_threads_than_processors_are_one_warning(monkeypatch):
    monkeypatch.setattr(system, "usable_cpu_count", lambda: 2)
    assert shortage_of_cpus(2, 1) is None
    told = shortage_of_cpus(3, 64)
    assert "3 processes share 2 processors" in told and "--num_processes 2" in told
    told = shortage_of_cpus(1, 64)
    assert (
        "1 process of 64 threads share 2 processors" in told
        and "--num_cpu_threads_per_process 2" in told
    )


def test_a_notebook_that_used_a_device_does_not_fork(monkeypatch):
    from accelerate.launchers import notebook

    used = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch, "npu", used, raising=False)
    with pytest.raises(LaunchError, match="NPU was used"):
        notebook._check_untouched("npu")
    monkeypatch.setattr(used, "is_initialized", lambda: False)
    notebook._check_untouched("npu")


def test_limits_of_containers_are_heeded(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "CONTROL_GROUPS", tmp_path)
    read = system.Path.read_text
    own = "0::/outer/inner\n"
    monkeypatch.setattr(
        system.Path,
        "read_text",
        lambda path, *rest: own if str(path) == "/proc/self/cgroup" else read(path, *rest),
    )
    outer, inner = tmp_path / "outer", tmp_path / "outer/inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (outer / "memory.max").write_text(f"{10 * 2**20}\n")
    (outer / "memory.current").write_text(f"{7 * 2**20}\n")
    (outer / "memory.stat").write_text(f"anon 1\ninactive_file {2**20}\n")
    (outer / "cpu.max").write_text("150000 100000\n")
    assert system.available_memory() == 4 * 2**20
    assert system.usable_cpu_count() == system.physical_cores() == 1

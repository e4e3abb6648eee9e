# SPDX-License-Identifier: Apache-2.0
"""What a machine can carry: processes against processors and free memory, limits of containers."""

import types

import pytest
import torch

from accelerate.core import system
from accelerate.core.errors import ConfigurationError, LaunchError
from accelerate.launchers import capacity
from accelerate.launchers.capacity import Capacity, check, check_forked
from accelerate.launchers.registry import launcher_class
from accelerate.launchers.spec import LaunchSpec, Program

GIB = 2**30
SMALL = Capacity(2, 23 * GIB)


def spec(processes, machines=1, threads=None, device="cpu", hostfile=None):
    return LaunchSpec(
        Program(__file__), num_processes=processes, num_machines=machines, threads=threads, device=device,
        hostfile=hostfile,
    )  # fmt: skip


def test_more_than_memory_holds_is_refused_with_numbers():
    with pytest.raises(ConfigurationError) as caught:
        check(spec(500), False, SMALL)
    told = str(caught.value)
    assert "num_processes=500" in told and "73.2 GiB" in told and "23.0 GiB are free" in told
    assert f"at most {23 * GIB // capacity.PROCESS} fit" in told and "--oversubscribe" in told
    memory, cpus = check(spec(500), True, SMALL)
    assert "73.2 GiB" in memory and "500 processes share 2 processors" in cpus


@pytest.mark.parametrize(
    ("launch", "engine", "refused"),
    [
        (spec(4), "local", False),
        (spec(500, machines=500), "static", False),  # each machine has one
        (spec(1000, machines=2), "static", True),
        (spec(1000, machines=2), "elastic", True),
        (spec(500), "mpi", True),
        (spec(500, hostfile="hosts")._replace(main_process_ip_given=True), "mpi", False),
        (spec(500), "slurm", False),
        (spec(500), "kubernetes", False),
        (spec(500, device="cuda"), "local", True),
    ],
)
def test_what_counts_is_this_machine_s_share(launch, engine, refused):
    launcher = launcher_class(engine).create(launch)
    try:
        check(launch, False, SMALL)
    except ConfigurationError:
        assert refused is launcher.uses_this_machine
    else:
        assert not refused


def test_more_processes_or_threads_than_processors_are_one_warning():
    assert check(spec(2, threads=1), False, SMALL) == []
    (told,) = check(spec(3, threads=64), False, SMALL)
    assert "3 processes share 2 processors" in told and "--num_processes 2" in told
    (told,) = check(spec(1, threads=64), False, SMALL)
    assert "1 process of 64 threads share 2 processors" in told and "--num_cpu_threads_per_process 2" in told
    assert check(spec(3, device="cuda", threads=64), False, SMALL) == []
    assert check(spec(3, threads=1), False, Capacity(8, None)) == []


def test_forked_functions(monkeypatch):
    monkeypatch.delenv("ACCELERATE_OVERSUBSCRIBE", raising=False)
    with pytest.raises(ConfigurationError, match="ACCELERATE_OVERSUBSCRIBE=1"):
        check_forked(1000, SMALL)
    monkeypatch.setenv("ACCELERATE_OVERSUBSCRIBE", "1")
    assert "1000 processes" in check_forked(1000, SMALL)
    assert check_forked(2, SMALL) is None


@pytest.mark.parametrize("way", ["debug", "notebook"])
def test_launchers_of_functions_refuse(monkeypatch, way):
    from accelerate.launchers import debug_launcher, notebook, notebook_launcher

    def start(*_):
        raise AssertionError("started")

    monkeypatch.delenv("ACCELERATE_OVERSUBSCRIBE", raising=False)
    monkeypatch.setattr(notebook, "run_functions", start)
    monkeypatch.setattr(notebook, "_check_untouched", lambda kind: None)
    monkeypatch.setattr(Capacity, "of_this_machine", lambda: SMALL)
    with pytest.raises(ConfigurationError, match="at most"):
        (debug_launcher if way == "debug" else notebook_launcher)(print, num_processes=5000)


def test_a_notebook_that_used_a_device_does_not_fork(monkeypatch):
    from accelerate.launchers import notebook

    used = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch, "npu", used, raising=False)
    with pytest.raises(LaunchError, match="NPU was used in this notebook before"):
        notebook._check_untouched("npu")
    monkeypatch.setattr(used, "is_initialized", lambda: False)
    notebook._check_untouched("npu")


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_containers_are_heeded(tmp_path, monkeypatch, version):
    monkeypatch.setattr(system, "CONTROL_GROUPS", tmp_path)
    read = system.Path.read_text
    told = "0::/outer/inner\n" if version == 2 else "4:memory:/outer/inner\n3:cpu,cpuacct:/outer/inner\n"
    monkeypatch.setattr(
        system.Path, "read_text", lambda path, *rest: told if str(path) == "/proc/self/cgroup" else read(path, *rest)
    )
    memory = tmp_path / ("outer" if version == 2 else "memory/outer")
    cpu = tmp_path / ("outer" if version == 2 else "cpu/outer")
    for folder in (memory / "inner", cpu / "inner"):
        folder.mkdir(parents=True, exist_ok=True)
    names = (
        {"limit": "memory.max", "used": "memory.current", "cached": "inactive_file"}
        if version == 2
        else {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "cached": "total_inactive_file"}
    )
    (memory / "inner" / names["limit"]).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    (memory / "inner" / names["used"]).write_text("5\n")
    (memory / names["limit"]).write_text(f"{10 * 2**20}\n")
    (memory / names["used"]).write_text(f"{7 * 2**20}\n")
    (memory / "memory.stat").write_text(f"anon 1\n{names['cached']} {2**20}\n")
    assert system.available_memory() == 4 * 2**20
    if version == 2:
        (cpu / "cpu.max").write_text("150000 100000\n")
    else:
        (cpu / "cpu.cfs_quota_us").write_text("150000\n")
        (cpu / "cpu.cfs_period_us").write_text("100000\n")
    assert system.usable_cpu_count() == system.physical_cores() == 1

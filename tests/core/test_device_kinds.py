# SPDX-License-Identifier: Apache-2.0
"""The table of device kinds, and what is read off it."""

import importlib.util
from pathlib import Path

import pytest

from accelerate.commands.config.default import machine_defaults
from accelerate.core import system
from accelerate.core.device_kinds import DEVICES
from accelerate.core.enums import DistributedType

PLUGINS = [kind for kind in DEVICES.values() if kind.extension is not None]


def test_each_kind_of_run_over_accelerators_has_a_row():
    runs = {kind.distributed for kind in DEVICES.values()}
    named = {run for run in DistributedType if run.value.startswith("MULTI_")} | {
        DistributedType.XLA
    }
    assert named <= runs


def test_programs_of_this_environment_are_found_without_the_path(tmp_path, monkeypatch):
    """As under `.venv/bin/python -m accelerate...` of an environment that is not activated."""
    program = tmp_path / "deepspeed"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(system.sys, "executable", str(tmp_path / "python"))
    assert (
        system.find_program("deepspeed") == str(program) and system.find_program("mpirun") is None
    )


@pytest.mark.parametrize("kind", PLUGINS, ids=lambda kind: kind.type)
def test_devices_of_an_extension_are_counted_without_torch(kind, tmp_path, monkeypatch):
    """What `launch` and `config default` see on a machine with two devices of a kind and its extension."""
    pattern = kind.device_files.replace("[0-9]*", "{}")
    for number in range(2):
        path = tmp_path / pattern.format(number)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: object() if name == kind.extension else real(name, *rest),
    )
    monkeypatch.setattr(
        system, "Path", lambda *parts: tmp_path if parts == ("/dev",) else Path(*parts)
    )
    monkeypatch.delenv(kind.visible, raising=False)
    assert system.accelerators() == system.Accelerators(kind.type, 2, kind.visible)
    assert machine_defaults()["distributed_type"] == kind.distributed.value
    monkeypatch.setenv(kind.visible, "1")
    assert system.accelerators().number == 1

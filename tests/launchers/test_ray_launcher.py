# SPDX-License-Identifier: Apache-2.0
"""The Ray engine without a cluster: what is refused, what is reserved, what a process sees. Ray need not be here."""

import pytest

from accelerate.core.errors import ConfigurationError
from accelerate.launchers import ray as engine
from accelerate.launchers.ray import RayLauncher, RayMember, _bundles, _visible
from accelerate.launchers.spec import LaunchSpec, Program

SCRIPT = Program(__file__, ("--lr", "1"))


def test_without_ray_the_install_command_is_told(monkeypatch):
    monkeypatch.setattr(engine, "is_available", lambda name: False)
    with pytest.raises(ConfigurationError, match=r"pip install 'ray>="):
        RayLauncher(LaunchSpec(SCRIPT)).check()


@pytest.mark.parametrize("address", ["somewhere", ":6379", "host:port", "ray://host"])
def test_an_address_that_is_none_is_refused(monkeypatch, address):
    monkeypatch.setattr(engine, "is_available", lambda name: True)
    with pytest.raises(ConfigurationError, match="host:port"):
        RayLauncher(LaunchSpec(SCRIPT), address).check()


def test_what_is_reserved():
    spec = LaunchSpec(SCRIPT, num_processes=4, threads=3)
    assert _bundles(spec, None) == ([{"CPU": 3}] * 4, "PACK")
    spec = LaunchSpec(SCRIPT, num_processes=4, num_machines=2)
    assert _bundles(spec, "GPU") == ([{"CPU": 2, "GPU": 2}] * 2, "STRICT_SPREAD")


def test_all_devices_of_a_machine_are_seen_in_the_order_of_its_ranks():
    def members(name, *given):
        return [RayMember(None, {"devices": [number], "visible": {name: text}}) for number, text in given]

    assert _visible(members("CUDA_VISIBLE_DEVICES", ("3", "3"), ("1", "1"))) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    intel = members("ONEAPI_DEVICE_SELECTOR", ("0", "level_zero:0"), ("1", "level_zero:1"))
    assert _visible(intel) == {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,1"}
    assert _visible([RayMember(None, {"devices": [], "visible": {"CUDA_VISIBLE_DEVICES": ""}})]) == {}


def test_a_dry_run_needs_no_cluster():
    told = RayLauncher(LaunchSpec(SCRIPT, num_processes=2, device="cpu"), "10.0.0.1:6379").dry_run()
    assert "# cluster: 10.0.0.1:6379" in told and "# rank 1" in told and "export RANK=1" in told
    assert told.count(f"{__file__} --lr 1") == 2

# SPDX-License-Identifier: Apache-2.0
"""The Ray engine without a cluster: what is refused, what is reserved, what a process sees. Ray need not be here."""

import pytest

from accelerate.core.errors import ConfigurationError, LaunchError
from accelerate.launchers import ray as engine
from accelerate.launchers.ray import RayLauncher, RayMember, _bundles, _placed, _visible
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
        RayLauncher(LaunchSpec(SCRIPT, ray_address=address)).check()


def test_what_is_reserved():
    spec = LaunchSpec(SCRIPT, num_processes=4, threads=3)
    assert _bundles(spec, None) == ([{"CPU": 3}] * 4, "PACK")
    spec = LaunchSpec(SCRIPT, num_processes=4, num_machines=2)
    assert _bundles(spec, "GPU") == ([{"CPU": 2, "GPU": 2}] * 2, "STRICT_SPREAD")


@pytest.mark.parametrize(
    ("given", "ordered"),
    [(["10", "9", "2"], ["2", "9", "10"]), (["GPU-b", "GPU-a"], ["GPU-a", "GPU-b"]), (["MIG-1", "3"], ["3", "MIG-1"])],
)
def test_local_ranks_follow_the_devices_of_their_machine(given, ordered):
    """Whatever actor got which device: the i-th process of a machine owns the i-th device of the list."""
    members = [
        RayMember(
            None,
            {
                "node": node, "host": "h", "devices": [device],
                "visible": {
                    "CUDA_VISIBLE_DEVICES": device, "HIP_VISIBLE_DEVICES": device,
                    "ONEAPI_DEVICE_SELECTOR": f"level_zero:{device}", "ROCR_VISIBLE_DEVICES": "4,5,6,7",
                },
            },
        )
        for node in ("far", "near")
        for device in given
    ]  # fmt: skip
    placed = _placed(members, "near")
    assert [member.node for member in placed] == ["near"] * len(given) + ["far"] * len(given)
    for start in (0, len(given)):
        here = placed[start : start + len(given)]
        assert [member.info["devices"] for member in here] == [[device] for device in ordered]
        listed = ",".join(ordered)
        # What the machine's owner has set stays.
        assert _visible(here) == {
            "CUDA_VISIBLE_DEVICES": listed, "HIP_VISIBLE_DEVICES": listed,
            "ONEAPI_DEVICE_SELECTOR": f"level_zero:{listed}",
        }  # fmt: skip


def test_processes_without_devices_and_with_the_same_one():
    def member(*devices):
        return RayMember(None, {"host": "h", "devices": [*devices], "visible": {"CUDA_VISIBLE_DEVICES": ""}})

    assert _visible([member(), member()]) == {}
    with pytest.raises(LaunchError, match="one device to several processes of h"):
        _visible([member("0"), member("0")])


def test_a_dry_run_needs_no_cluster():
    told = RayLauncher(LaunchSpec(SCRIPT, num_processes=2, device="cpu", ray_address="10.0.0.1:6379")).dry_run()
    assert "# cluster: 10.0.0.1:6379" in told and "# rank 1" in told and "export RANK=1" in told
    assert told.count(f"{__file__} --lr 1") == 2

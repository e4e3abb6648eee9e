# SPDX-License-Identifier: Apache-2.0
"""The Ray engine without a cluster: what is refused, what is reserved, what a process sees. Ray need not be here."""

import pytest

from accelerate.core.errors import ConfigurationError
from accelerate.launchers import ray as engine
from accelerate.launchers.ray import (
    Member,
    RayLauncher,
    bundles,
    check_resources,
    running_cluster,
    visible_devices,
)
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
    assert bundles(spec, None) == ([{"CPU": 3}] * 4, "PACK")
    spec = LaunchSpec(SCRIPT, num_processes=4, num_machines=2)
    reserved = bundles(spec, "GPU")
    assert reserved == ([{"CPU": 2, "GPU": 2}] * 2, "STRICT_SPREAD")
    check_resources(
        [("10.0.0.1", {"CPU": 2, "GPU": 2}), ("10.0.0.2", {"CPU": 9, "GPU": 3})], *reserved
    )
    with pytest.raises(ConfigurationError, match="2 machines with 2 CPU, 2 GPU each"):
        check_resources([("10.0.0.1", {"CPU": 2, "GPU": 2}), ("10.0.0.2", {"CPU": 8})], *reserved)


def test_a_process_sees_the_devices_of_its_machine():
    """Whatever actor got which device: the i-th process of a machine owns the i-th device of the list."""

    def member(*devices):
        visible = {
            name: "".join(devices) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        }
        visible |= {"ONEAPI_DEVICE_SELECTOR": f"level_zero:{visible['CUDA_VISIBLE_DEVICES']}"}
        # What the machine's owner has set stays.
        visible["ROCR_VISIBLE_DEVICES"] = "4,5,6,7"
        return Member(None, "h", "node", "10.0.0.1", "eth0", [*devices], visible, {})

    assert visible_devices([member("10"), member("9")]) == {
        "CUDA_VISIBLE_DEVICES": "10,9", "HIP_VISIBLE_DEVICES": "10,9", "ONEAPI_DEVICE_SELECTOR": "level_zero:10,9",
    }  # fmt: skip
    assert visible_devices([member(), member()]) == {}


def test_the_file_with_the_cluster_s_address_is_this_user_s(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert running_cluster() is None
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("10.0.0.1:6379")
    file.chmod(0o644)
    assert running_cluster() == "10.0.0.1:6379"
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match=r"mode 666.*--ray_address"):
        running_cluster()


def test_a_dry_run_needs_no_cluster():
    told = RayLauncher(
        LaunchSpec(SCRIPT, num_processes=2, device="cpu", ray_address="10.0.0.1:6379")
    ).dry_run()
    assert "# cluster: 10.0.0.1:6379" in told and "# rank 1" in told and "export RANK=1" in told
    assert told.count(f"{__file__} --lr 1") == 2

# SPDX-License-Identifier: Apache-2.0
"""The API's functions that turn arguments into commands and environments."""

import os
import sys
from pathlib import Path

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.launchers import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "OMP_NUM")):
            monkeypatch.delenv(name)


def parsed(*arguments):
    return launch_command_parser().parse_args([*arguments, "x.py", "--a", "1"])


def test_one_process():
    command, environment = prepare_simple_launcher_cmd_env(
        parsed("--cpu", "--mixed_precision", "bf16")
    )
    assert command == [sys.executable, "x.py", "--a", "1"]
    assert (
        environment["ACCELERATE_USE_CPU"] == "true"
        and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    )
    assert "MASTER_ADDR" not in environment
    assert prepare_simple_launcher_cmd_env(parsed("-m"))[0] == [
        sys.executable,
        "-m",
        "x.py",
        "--a",
        "1",
    ]
    assert prepare_simple_launcher_cmd_env(parsed("--no_python"))[0] == ["x.py", "--a", "1"]
    with pytest.raises(ValueError, match="no_python"):
        prepare_simple_launcher_cmd_env(parsed("--no_python", "-m"))


def test_several_processes_are_prepared_for_torch_s_runner():
    args = parsed("--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "1.2.3.4",
                  "--main_process_port", "55", "--use_fsdp", "--gpu_ids", "0,1")  # fmt: skip
    environment = prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank, args.rdzv_endpoint) == (
        "2",
        "2",
        1,
        "1.2.3.4:55",
    )
    assert (
        environment["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
        and environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    )
    args = parsed("--num_processes", "2", "--main_process_port", "0")
    prepare_multi_gpu_env(args)
    assert int(args.master_port) > 0


def test_deepspeed_s_own_starter():
    arguments = ["--use_deepspeed", "--num_processes", "4", "--zero_stage", "3"]
    assert prepare_deepspeed_cmd_env(parsed(*arguments))[0] is None
    command, environment = prepare_deepspeed_cmd_env(
        parsed(
            *arguments,
            "--num_machines",
            "2",
            "--machine_rank",
            "0",
            "--deepspeed_hostfile",
            "/h",
            "--main_process_ip",
            "1.2.3.4",
            "--main_process_port",
            "22",
        )
    )
    # By its path, if it is not on the PATH.
    assert Path(command[0]).name == "deepspeed"
    assert command[1:] == [
        "--hostfile", "/h", "--no_local_rank", "--launcher", "pdsh", "--num_gpus", "2",
        "--master_addr", "1.2.3.4", "--master_port", "22", "x.py", "--a", "1",
    ]  # fmt: skip
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


def test_tpu():
    _, environment = prepare_tpu(
        parsed("--mixed_precision", "bf16", "--downcast_bf16", "--debug"), {}
    )
    assert environment == {"XLA_DOWNCAST_BF16": "1", "ACCELERATE_DEBUG_MODE": "true"}

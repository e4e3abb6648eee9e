# SPDX-License-Identifier: Apache-2.0
"""The API's functions that turn arguments into commands and environments; the SageMaker estimator."""

import os
import sys

import pytest

from accelerate.commands.config.config_args import SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.core.enums import ComputeEnvironment, SageMakerDistributedType
from accelerate.launchers import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "OMP_NUM", "AWS_")):
            monkeypatch.delenv(name)


def parsed(*arguments):
    return launch_command_parser().parse_args([*arguments, "x.py", "--a", "1"])


def test_one_process():
    command, environment = prepare_simple_launcher_cmd_env(parsed("--cpu", "--mixed_precision", "bf16"))
    assert command == [sys.executable, "x.py", "--a", "1"]
    assert environment["ACCELERATE_USE_CPU"] == "true" and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "MASTER_ADDR" not in environment
    assert prepare_simple_launcher_cmd_env(parsed("-m"))[0] == [sys.executable, "-m", "x.py", "--a", "1"]
    assert prepare_simple_launcher_cmd_env(parsed("--no_python"))[0] == ["x.py", "--a", "1"]
    with pytest.raises(ValueError, match="no_python"):
        prepare_simple_launcher_cmd_env(parsed("--no_python", "-m"))


def test_several_processes_are_prepared_for_torch_s_runner():
    args = parsed("--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "1.2.3.4",
                  "--main_process_port", "55", "--use_fsdp", "--gpu_ids", "0,1")  # fmt: skip
    environment = prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank, args.rdzv_endpoint) == ("2", "2", 1, "1.2.3.4:55")
    assert environment["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD" and environment["CUDA_VISIBLE_DEVICES"] == "0,1"
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
    assert command == [
        "deepspeed", "--hostfile", "/h", "--no_local_rank", "--launcher", "pdsh", "--num_gpus", "2",
        "--master_addr", "1.2.3.4", "--master_port", "22", "x.py", "--a", "1",
    ]  # fmt: skip
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


def test_tpu():
    _, environment = prepare_tpu(parsed("--mixed_precision", "bf16", "--downcast_bf16", "--debug"), {})
    assert environment == {"XLA_DOWNCAST_BF16": "1", "ACCELERATE_DEBUG_MODE": "true"}


def sagemaker_config(**more):
    return SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=more.pop("kind", SageMakerDistributedType.NO),
        mixed_precision="no", use_cpu=False, debug=False, ec2_instance_type="ml.p3", iam_role_name="role", **more,
    )  # fmt: skip


def test_the_sagemaker_estimator(tmp_path, monkeypatch):
    metrics = tmp_path / "metrics.tsv"
    metrics.write_text("name\tregex\nloss\tloss: ([0-9.]+)\n")
    inputs = tmp_path / "inputs.tsv"
    inputs.write_text("channel\tplace\ntrain\ts3://bucket/train\n")
    monkeypatch.setenv("AWS_PROFILE", "")
    config = sagemaker_config(
        profile="prof", kind=SageMakerDistributedType.DATA_PARALLEL, sagemaker_inputs_file=str(inputs),
        sagemaker_metrics_file=str(metrics), additional_args={"volume_size": 50},
    )  # fmt: skip
    args = launch_command_parser().parse_args(
        ["--mixed_precision", "bf16", "code/train.py", "--lr", "0.1", "--flag", "True"]
    )
    arguments, channels = prepare_sagemager_args_inputs(config, args)
    assert channels == {"train": "s3://bucket/train"}
    assert arguments["entry_point"] == "train.py" and arguments["source_dir"] == "code"
    assert arguments["hyperparameters"] == {"lr": 0.1, "flag": True}
    assert arguments["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    assert arguments["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert arguments["environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"
    assert arguments["metric_definitions"] == [{"Name": "loss", "Regex": "loss: ([0-9.]+)"}]
    assert arguments["volume_size"] == 50 and arguments["instance_type"] == "ml.p3"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.py", "--flag"], "give --flag a value"),
        (["train.py", "word"], "belongs to no name"),
        (["train.sh"], "Python script"),
    ],
)
def test_what_sagemaker_cannot_run(words, told):
    args = launch_command_parser().parse_args(words)
    with pytest.raises(ValueError, match=told):
        prepare_sagemager_args_inputs(sagemaker_config(profile="p"), args)
    with pytest.raises(ValueError, match="credentials"):
        prepare_sagemager_args_inputs(sagemaker_config(), launch_command_parser().parse_args(["train.py"]))


def test_a_sagemaker_file_starts_the_job(tmp_path, monkeypatch):
    """With recorded calls of the client in place of Amazon's."""
    import types

    from accelerate.commands.launch import launch_command

    calls = []

    class Estimator:
        model_data = "s3://bucket/model"

        def __init__(self, **arguments):
            calls.append(arguments)

        def fit(self, inputs):
            calls.append(inputs)

    module = types.ModuleType("sagemaker.huggingface")
    module.HuggingFace = Estimator
    monkeypatch.setitem(sys.modules, "sagemaker", types.ModuleType("sagemaker"))
    monkeypatch.setitem(sys.modules, "sagemaker.huggingface", module)
    monkeypatch.setenv("AWS_PROFILE", "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "")
    path = tmp_path / "c.yaml"
    path.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.g5\n"
        "iam_role_name: role\nprofile: prof\nmixed_precision: fp16\nregion: eu-west-1\nnum_machines: 1\n"
    )
    launch_command(launch_command_parser().parse_args(["--config_file", str(path), "train.py", "--lr", "1"]))
    assert calls[0]["instance_type"] == "ml.g5" and calls[0]["environment"]["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert calls[1] is None
    assert (os.environ["AWS_PROFILE"], os.environ["AWS_DEFAULT_REGION"]) == ("prof", "eu-west-1")

# SPDX-License-Identifier: Apache-2.0
"""Jobs on Amazon SageMaker: the exact calls of its client, recorded by a package that stands in for it.

What is equal to accelerate 1.15 was recorded from its prepare_sagemager_args_inputs (its `accelerate launch` ends in
an AttributeError for any SageMaker file). Where the two differ on purpose, the test says why.
"""

import os
import sys

import pytest

from accelerate.commands.config.config_args import SageMakerConfig
from accelerate.commands.launch import launch_command, launch_command_parser, main
from accelerate.core.enums import ComputeEnvironment, SageMakerDistributedType
from accelerate.core.errors import ConfigurationError, LaunchError
from accelerate.launchers import prepare_sagemager_args_inputs

CLIENT = """
import os

CALLS = []
FAILURE = []


class Job:
    name = "job-1"

    def stop(self):
        CALLS.append(("stop", self.name))


class HuggingFace:
    model_data = "s3://bucket/model.tar.gz"
    latest_training_job = None

    def __init__(self, **arguments):
        CALLS.append(("HuggingFace", arguments, {k: v for k, v in os.environ.items() if k.startswith("AWS_")}))

    def fit(self, inputs=None):
        CALLS.append(("fit", inputs))
        self.latest_training_job = Job()
        if FAILURE:
            raise FAILURE[0]
"""
FILE = {
    "compute_environment": "AMAZON_SAGEMAKER",
    "distributed_type": "'NO'",
    "ec2_instance_type": "ml.c5.xlarge",
    "iam_role_name": "role",
    "profile": "prof",
    "region": "eu-west-1",
    "mixed_precision": "'no'",
    "num_machines": 1,
}
# Recorded from accelerate 1.15 for this file and `--dynamo_backend no`, without arguments of the script's own.
ENVIRONMENT = {
    "ACCELERATE_USE_SAGEMAKER": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO",
}
ARGUMENTS = {
    "image_uri": None,
    "entry_point": "train.py",
    "source_dir": "code",
    "role": "role",
    "transformers_version": "4.17.0",
    "pytorch_version": "1.10.2",
    "py_version": "py38",
    "base_job_name": "accelerate-sagemaker-1",
    "instance_count": 1,
    "instance_type": "ml.c5.xlarge",
    "debugger_hook_config": False,
    "distribution": None,
    "hyperparameters": {},
    "environment": ENVIRONMENT,
    "metric_definitions": None,
}
BOTH = {"distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}}


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """An environment without variables of a launch or an account, left as it was; a folder with a script."""
    saved = dict(os.environ)
    for name in saved:
        if name.startswith(("ACCELERATE_", "FSDP_", "OMP_", "AWS_")):
            del os.environ[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    yield
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A package `sagemaker` that records; its module."""
    package = tmp_path / "packages" / "sagemaker"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "huggingface.py").write_text(CLIENT)
    _forget()
    monkeypatch.syspath_prepend(str(package.parent))
    import sagemaker.huggingface

    yield sagemaker.huggingface
    _forget()


def _forget():
    for name in ("sagemaker", "sagemaker.huggingface"):
        sys.modules.pop(name, None)


def _hide(monkeypatch):
    """Have the package `sagemaker` not be installed."""

    class Absent:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name == "sagemaker":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    _forget()
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])


def launched(client, *words, **keys):
    """The estimator's arguments, the inputs and the AWS variables of a launch with these words and the file's keys."""
    file = "".join(
        f"{key}: {value}\n" for key, value in {**FILE, **keys}.items() if value is not None
    )
    with open("config.yaml", "w") as target:
        target.write(file)
    client.CALLS.clear()
    launch_command(launch_command_parser().parse_args(["--config_file", "config.yaml", *words]))
    (made, arguments, variables), (fit, inputs) = client.CALLS
    assert (made, fit) == ("HuggingFace", "fit")
    return arguments, inputs, variables


def test_a_cpu_instance(client, capsys):
    arguments, inputs, variables = launched(client, "code/train.py")
    assert (arguments, inputs) == (ARGUMENTS, None)
    assert variables == {"AWS_PROFILE": "prof", "AWS_DEFAULT_REGION": "eu-west-1"}
    assert "s3://bucket/model.tar.gz" in capsys.readouterr().err


def test_every_key_of_the_file_is_used(client):
    with open("inputs.tsv", "w") as file:
        file.write("channel\tdata_location\ntrain\ts3://bucket/train\n\ntest \t s3://bucket/test\n")
    with open("metrics.tsv", "w") as file:
        file.write('metric_name\tmetric_regex\nloss\tloss: "([0-9.]+)"\nf1\tf1 = (.*?);\n')
    arguments, inputs, _ = launched(
        client, "code/train.py", ec2_instance_type="ml.p4d.24xlarge", distributed_type="DATA_PARALLEL",
        num_machines=2, mixed_precision="bf16", image_uri="registry/image", base_job_name="mine",
        pytorch_version="'2.1'", transformers_version="'4.36'", py_version="py310", sagemaker_inputs_file="inputs.tsv",
        sagemaker_metrics_file="metrics.tsv", use_cpu="true", debug="true", enable_cpu_affinity="true",
        gpu_ids="'0,1'",
        dynamo_config="{dynamo_backend: INDUCTOR, dynamo_mode: max-autotune, dynamo_use_dynamic: true}",
        additional_args="{volume_size: 50, environment: {MINE: b}, hyperparameters: {z: 1}, "
        "debugger_hook_config: true}",
    )  # fmt: skip
    assert inputs == {"train": "s3://bucket/train", "test": "s3://bucket/test"}
    assert arguments == {
        **ARGUMENTS,
        **BOTH,
        "instance_type": "ml.p4d.24xlarge",
        "instance_count": 2,
        "image_uri": "registry/image",
        "base_job_name": "mine",
        "pytorch_version": "2.1",
        "transformers_version": "4.36",
        "py_version": "py310",
        "metric_definitions": [
            {"Name": "loss", "Regex": 'loss: "([0-9.]+)"'},
            {"Name": "f1", "Regex": "f1 = (.*?);"},
        ],
        "volume_size": 50,
        "debugger_hook_config": True,
        "hyperparameters": {"z": 1},
        "environment": {
            **ENVIRONMENT,
            "MINE": "b",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
            # 1.15 leaves these keys of a SageMaker file out: here the job runs as the file says.
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "ACCELERATE_DYNAMO_MODE": "max-autotune",
            "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_DEBUG_MODE": "true",
            "ACCELERATE_CPU_AFFINITY": "1",
            "CUDA_VISIBLE_DEVICES": "0,1",
        },
    }


def test_flags_and_variables_beat_the_file(client, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    dynamo = "{dynamo_backend: EAGER, dynamo_use_fullgraph: true}"
    words = ["--dynamo_backend", "inductor", "--num_machines", "3", "--cpu", "code/train.py"]
    arguments, _, _ = launched(
        client, *words, distributed_type="DATA_PARALLEL", dynamo_config=dynamo
    )
    assert arguments == {
        **ARGUMENTS,
        **BOTH,
        "instance_count": 3,
        "environment": {
            **ENVIRONMENT,
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
            "ACCELERATE_MIXED_PRECISION": "fp16",
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
            "ACCELERATE_USE_CPU": "true",
        },
    }
    arguments, _, _ = launched(client, "--mixed_precision", "bf16", "--use_fsdp", "code/train.py")
    assert arguments["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert arguments["environment"]["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
    for words in (
        ["--num_processes", "8"],
        ["--multi_gpu"],
        ["--main_process_ip", "10.0.0.1"],
        ["--engine", "slurm"],
    ):
        with pytest.raises(ConfigurationError, match=f"^{words[0]} has no effect .*SageMaker"):
            launched(client, *words, "code/train.py")


def test_credentials(client, monkeypatch):
    keys = ["--aws_access_key_id", "K", "--aws_secret_access_key", "S"]
    expected = {
        "AWS_ACCESS_KEY_ID": "K",
        "AWS_SECRET_ACCESS_KEY": "S",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }
    assert launched(client, *keys, "code/train.py", profile=None)[2] == expected
    for name in expected:
        monkeypatch.delenv(name)
    # 1.15 takes the file's profile even where keys are given: here a flag beats the file, as everywhere.
    assert launched(client, *keys, "code/train.py")[2] == expected
    for name in expected:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match="--aws_secret_access_key is missing"):
        launched(client, *keys[:2], "code/train.py", profile=None)
    assert client.CALLS == []
    # 1.15 refuses this: the client finds credentials of the environment or of the instance itself.
    assert launched(client, "code/train.py", profile=None)[2] == {"AWS_DEFAULT_REGION": "eu-west-1"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr 0.1 --epochs 3 --name word --neg -1 --none None", "same"),
        ("--flag True --other False", {"flag": True, "other": False}),
        ("--lr=0.1 --path=a=b", {"lr": 0.1, "path": "a=b"}),
        ("-x 1", {"x": 1}),
        # 1.15 makes numbers of whatever reads as one (5e-05, 7, 1, 1000, 1, a rounded one, inf): the script would get
        # another text than was written, or SageMaker text that is no JSON.
        ("--lr 5e-5 --id 007 --rate 1.0 --part 1_000 --plus +1",
         {"lr": "5e-5", "id": "007", "rate": 1.0, "part": "1_000", "plus": "+1"}),
        ("--big 12345678901234567890 --most inf --low true", {"big": 12345678901234567890, "most": "inf",
         "low": "true"}),
    ],
)  # fmt: skip
def test_arguments_of_the_script(client, words, expected):
    if expected == "same":
        expected = {"lr": 0.1, "epochs": 3, "name": "word", "neg": -1, "none": "None"}
    arguments, _, _ = launched(client, "code/train.py", *words.split())
    found = arguments["hyperparameters"]
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(v) for name, v in expected.items()
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--flag", "give --flag a value, as `--flag True`"),
        ("--flag --lr 1", "give --flag a value"),
        ("word", "'word' belongs to no name"),
        ("--sizes 1 2", "'2' belongs to no name"),
        ("--a1 1 --a1 2", "--a1 is there a second time"),
    ],
)
def test_arguments_that_cannot_be_passed(client, words, told):
    with pytest.raises(ConfigurationError, match=told):
        launched(client, "code/train.py", *words.split())
    assert client.CALLS == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"ec2_instance_type": None}, "needs ec2_instance_type"),
        ({"iam_role_name": "''"}, "needs iam_role_name"),
        # 1.15 starts both: machines that train alone on all data, a layout that nothing lays out.
        ({"num_machines": 2}, "num_machines=2 with distributed_type NO: each machine would train alone"),
        ({"distributed_type": "MODEL_PARALLEL"}, "MODEL_PARALLEL needs to know which"),
        ({"additional_args": "[1]"}, "additional_args must hold"),
        ({"sagemaker_inputs_file": "gone.tsv"}, "^sagemaker_inputs_file: gone.tsv cannot be read: No such file"),
        ({"sagemaker_inputs_file": "spaces.tsv"}, "^sagemaker_inputs_file: spaces.tsv:2: give two columns"),
    ],
)  # fmt: skip
def test_what_a_configuration_lacks(client, keys, told):
    with open("spaces.tsv", "w") as file:
        file.write("name\tplace\ntrain s3://x\n")
    with pytest.raises(ConfigurationError, match=told):
        launched(client, "code/train.py", **keys)
    assert client.CALLS == []


def test_a_distribution_of_one_s_own(client):
    own = "{distribution: {torch_distributed: {enabled: true}}}"
    for kind in ("'NO'", "DATA_PARALLEL"):
        arguments, _, _ = launched(
            client, "code/train.py", distributed_type=kind, num_machines=2, additional_args=own
        )  # fmt: skip
        assert arguments["distribution"] == {"torch_distributed": {"enabled": True}}
        assert arguments["instance_count"] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["code/trian.py"], "there is no script 'code/trian.py'.*did you mean code/train.py"),
        (["code/train.sh"], "'code/train.sh' is not one"),
        (["-m", "code.train"], "--module and --no_python cannot"),
        (["--no_python", "code/train.py"], "--module and --no_python cannot"),
    ],
)
def test_what_is_no_script(client, words, told):
    with pytest.raises(ConfigurationError, match=told):
        launched(client, *words)
    assert client.CALLS == []


def test_the_script_may_come_from_elsewhere(client):
    arguments, _, _ = launched(
        client, "train.py", additional_args="{source_dir: 's3://bucket/code.tar.gz'}"
    )
    assert (arguments["entry_point"], arguments["source_dir"]) == (
        "train.py",
        "s3://bucket/code.tar.gz",
    )


def test_dry_run_shows_the_calls_and_needs_no_client(tmp_path, monkeypatch, capsys):
    _hide(monkeypatch)
    (tmp_path / "c.yaml").write_text("".join(f"{key}: {value}\n" for key, value in FILE.items()))
    keys = ["--aws_access_key_id", "KEPT", "--aws_secret_access_key", "HIDDEN"]
    main(["--dry_run", "--config_file", "c.yaml", *keys, "code/train.py", "--lr", "0.1"])
    told = capsys.readouterr().out
    assert "HIDDEN" not in told and "KEPT" not in told and "AWS_PROFILE" not in os.environ
    assert "    hyperparameters={'lr': 0.1},\n" in told and told.endswith(").fit(inputs=None)\n")


def test_the_client_is_missing(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text("".join(f"{key}: {value}\n" for key, value in FILE.items()))
    _hide(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(["--config_file", "c.yaml", "code/train.py"])
    assert ended.value.code == 2 and "pip install 'sagemaker<3'" in capsys.readouterr().err


def test_failures_and_interruptions(client, capsys):
    client.FAILURE[:] = [RuntimeError("AccessDenied: role cannot be assumed")]
    with pytest.raises(LaunchError, match="SageMaker: RuntimeError: AccessDenied"):
        launched(client, "code/train.py")
    assert [call[0] for call in client.CALLS] == ["HuggingFace", "fit"]
    # Ctrl-C: the job would run on, and cost.
    client.FAILURE[:] = [KeyboardInterrupt()]
    with pytest.raises(SystemExit) as ended:
        launched(client, "code/train.py")
    assert ended.value.code == 130
    assert client.CALLS[-1] == ("stop", "job-1")
    assert "stop of job job-1" in capsys.readouterr().err


def test_the_api_s_function_takes_a_configuration_object():
    config = SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=SageMakerDistributedType.NO,
        mixed_precision="no", use_cpu=False, debug=False, ec2_instance_type="ml.c5.xlarge", iam_role_name="role",
        profile="prof",
    )  # fmt: skip
    args = launch_command_parser().parse_args(["train.py"])
    # The folder of a bare name is ".", so that the modules beside the script go along.
    assert prepare_sagemager_args_inputs(config, args) == ({**ARGUMENTS, "source_dir": "."}, None)
    assert (os.environ["AWS_PROFILE"], os.environ["AWS_DEFAULT_REGION"]) == ("prof", "us-east-1")

# SPDX-License-Identifier: Apache-2.0
"""Jobs on Amazon SageMaker: the exact calls of its clients, recorded by packages that stand in for them.

`make test-sagemaker` repeats this with the clients themselves.

What is equal to accelerate 1.15 was recorded from its prepare_sagemager_args_inputs (its `accelerate launch` ends in
an AttributeError for any SageMaker file). Where the two differ on purpose, the test says why.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
from types import SimpleNamespace

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

    def wait(self, logs):
        CALLS.append(("wait", logs))
        if FAILURE:
            raise FAILURE[0]

    def stop(self):
        CALLS.append(("stop", self.name))


class EstimatorBase:
    def __init__(
        self, role, instance_count, instance_type, volume_size, base_job_name, metric_definitions,
        debugger_hook_config, environment, source_dir, hyperparameters, entry_point, max_run,
    ):
        pass


class HuggingFace(EstimatorBase):
    model_data = "s3://bucket/model.tar.gz"
    latest_training_job = None

    def __init__(
        self, *, py_version, transformers_version, pytorch_version, image_uri, distribution, **arguments
    ):
        arguments |= {
            "py_version": py_version, "transformers_version": transformers_version, "pytorch_version": pytorch_version,
            "image_uri": image_uri, "distribution": distribution,
        }
        CALLS.append(("HuggingFace", arguments, {k: v for k, v in os.environ.items() if k.startswith("AWS_")}))

    def fit(self, inputs=None, wait=True):
        assert not wait, "it would not notice Ctrl-C"
        CALLS.append(("fit", inputs))
        self.latest_training_job = Job()
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
# Of version 3, what the launcher uses, with the fields that the tests name.
CONFIGS_3 = """
class Config:
    model_fields = ()

    def __init__(self, **arguments):
        assert set(arguments) <= set(self.model_fields), arguments
        self.arguments = arguments


def plain(value):
    if isinstance(value, Config):
        return (type(value).__name__, {name: plain(inner) for name, inner in value.arguments.items()})
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


for name, fields in {
    "SourceCode": "source_dir entry_script requirements",
    "Compute": "instance_type instance_count volume_size_in_gb enable_managed_spot_training",
    "StoppingCondition": "max_runtime_in_seconds max_wait_time_in_seconds",
    "Networking": "subnets security_group_ids enable_network_isolation",
    "OutputDataConfig": "s3_output_path",
    "CheckpointConfig": "s3_uri",
    "InputData": "channel_name data_source",
    "MetricDefinition": "name regex",
    "Torchrun": "process_count_per_node smp",
    "SMP": "tensor_parallel_degree",
}.items():
    globals()[name] = type(name, (Config,), {"model_fields": fields.split()})
"""
IMAGES_3 = """
def retrieve(**arguments):
    return ("retrieve", arguments)


def get_training_image_uri(**arguments):
    return ("get_training_image_uri", arguments)
"""
CLIENT_3 = """
import os
from types import SimpleNamespace

from sagemaker.train.configs import Config, plain

CALLS = []
FAILURE = []


class Job:
    training_job_name = "job-1"
    model_artifacts = SimpleNamespace(s3_model_artifacts="s3://bucket/model.tar.gz")

    def wait(self, logs):
        CALLS.append(("wait", logs))
        if FAILURE:
            raise FAILURE[0]

    def stop(self):
        CALLS.append(("stop", self.training_job_name))


class ModelTrainer(Config):
    model_fields = (
        "role base_job_name training_image source_code compute distributed networking stopping_condition tags "
        "output_data_config checkpoint_config environment hyperparameters training_mode"
    ).split()
    output_data_config = SimpleNamespace(s3_output_path="s3://bucket")
    _latest_training_job = None
    metrics = None

    def with_metric_definitions(self, metrics):
        self.metrics = plain(metrics)
        return self

    def train(self, input_data_config=None, wait=True, logs=True):
        aws = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
        CALLS.append((plain(self)[1], self.metrics, plain(input_data_config), aws))
        self._latest_training_job = Job()
        if wait:
            self._latest_training_job.wait(logs)
"""
ARGUMENTS_3 = {
    "role": "role",
    "base_job_name": "accelerate-sagemaker-1",
    "training_image": (
        "retrieve",
        {
            "framework": "huggingface", "region": "eu-west-1", "version": "4.17.0", "py_version": "py38",
            "base_framework_version": "pytorch1.10.2", "image_scope": "training", "instance_type": "ml.c5.xlarge",
        },
    ),
    "source_code": ("SourceCode", {"entry_script": "train.py", "source_dir": "code"}),
    "compute": ("Compute", {"instance_type": "ml.c5.xlarge", "instance_count": 1}),
    "stopping_condition": ("StoppingCondition", {"max_runtime_in_seconds": 86400}),
    "distributed": ("Torchrun", {}),
    "environment": ENVIRONMENT,
    "hyperparameters": {},
}  # fmt: skip
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


def installed(folder, version, files):
    """Write a package `sagemaker` with its metadata; the folder to import it from."""
    _forget()
    metadata = folder / f"sagemaker-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: sagemaker\nVersion: {version}\n")
    for name, text in {"__init__": "", **files}.items():
        path = folder / "sagemaker" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Version 2 of the client, which records; its module."""
    monkeypatch.syspath_prepend(
        installed(tmp_path / "packages", "2.257.0", {"huggingface": CLIENT})
    )
    import sagemaker.huggingface

    yield sagemaker.huggingface
    _forget()


@pytest.fixture
def client_3(tmp_path, monkeypatch):
    """Version 3 of the client, which records; the module with its records."""
    files = {
        "core/__init__": "",
        "core/image_uris": IMAGES_3,
        "train/__init__": CLIENT_3,
        "train/configs": CONFIGS_3,
        "train/distributed": "from sagemaker.train.configs import SMP, Torchrun",
    }
    monkeypatch.syspath_prepend(installed(tmp_path / "packages", "3.27.0", files))
    import sagemaker.train

    yield sagemaker.train
    _forget()


def _forget():
    for name in list(sys.modules):
        if name.partition(".")[0] == "sagemaker":
            del sys.modules[name]


def _hide(monkeypatch):
    """Have the package `sagemaker` not be installed."""
    version = importlib.metadata.version

    def without(name):
        if name == "sagemaker":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    _forget()
    monkeypatch.setattr(importlib.metadata, "version", without)


def launch(client, *words, **keys):
    """Launch with these words and the file's keys."""
    file = "".join(
        f"{key}: {value}\n" for key, value in {**FILE, **keys}.items() if value is not None
    )
    with open("config.yaml", "w") as target:
        target.write(file)
    client.CALLS.clear()
    launch_command(launch_command_parser().parse_args(["--config_file", "config.yaml", *words]))


def launched(client, *words, **keys):
    """The estimator's arguments, the inputs and the AWS variables of a launch with these words and the file's keys."""
    launch(client, *words, **keys)
    (made, arguments, variables), (fit, inputs), wait = client.CALLS
    assert (made, fit, wait) == ("HuggingFace", "fit", ("wait", True))
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
        ("--flag", "give --flag a value, as in `--flag True`"),
        ("--flag --lr 1", "give --flag a value"),
        ("word", "'word' does not follow a name"),
        ("--sizes 1 2", "'2' does not follow a name"),
        ("--a1 1 --a1 2", "--a1 appears twice"),
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
        ({"distributed_type": "MODEL_PARALLEL"}, "MODEL_PARALLEL does not say which kind"),
        ({"additional_args": "[1]"}, "additional_args must hold"),
        ({"sagemaker_inputs_file": "gone.tsv"}, "^sagemaker_inputs_file: gone.tsv cannot be read: No such file"),
        ({"sagemaker_inputs_file": "spaces.tsv"}, "^sagemaker_inputs_file: spaces.tsv:2: use two columns"),
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
        (
            ["code/trian.py"],
            "the script 'code/trian.py' does not exist.*did you mean code/train.py",
        ),
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


def test_version_3_of_the_client(client_3, capsys):
    launch(client_3, "code/train.py")
    aws = {"AWS_PROFILE": "prof", "AWS_DEFAULT_REGION": "eu-west-1"}
    assert [(ARGUMENTS_3, None, None, aws), ("wait", True)] == client_3.CALLS
    assert "s3://bucket/model.tar.gz" in capsys.readouterr().err


def test_every_key_of_the_file_with_version_3(client_3, capsys):
    with open("inputs.tsv", "w") as file:
        file.write("channel\tdata_location\ntrain\ts3://bucket/train\n")
    with open("metrics.tsv", "w") as file:
        file.write("metric_name\tmetric_regex\nf1\tf1 = (.*?);\n")
    with open("code/requirements.txt", "w") as file:
        file.write("accelerate\n")
    # Names of both versions.
    more = (
        "{volume_size: 50, max_run: 60, use_spot_instances: true, stopping_condition: {max_wait_time_in_seconds: 90}, "
        "networking: {subnets: [a]}, security_group_ids: [b], output_path: 's3://out', tags: [{Key: k, Value: v}], "
        "checkpoint_s3_uri: 's3://c', environment: {MINE: b}, hyperparameters: {z: [1]}, disable_profiler: true, "
        "wait: false, compute: {instance_count: 3}}"
    )
    keys = {
        "num_machines": 2, "mixed_precision": "bf16", "image_uri": "registry/image", "base_job_name": "mine",
        "sagemaker_inputs_file": "inputs.tsv", "sagemaker_metrics_file": "metrics.tsv", "gpu_ids": "'0,1'",
        "additional_args": more,
    }  # fmt: skip
    launch(client_3, "code/train.py", "--flag", "True", **keys)
    ((made, metrics, inputs, _),) = client_3.CALLS  # with `wait: false`
    assert made == {
        **ARGUMENTS_3,
        "base_job_name": "mine",
        "training_image": "registry/image",
        "source_code": (
            "SourceCode",
            {"entry_script": "train.py", "source_dir": "code", "requirements": "requirements.txt"},
        ),
        "compute": (
            "Compute",
            {
                "instance_type": "ml.c5.xlarge",
                "instance_count": 3,
                "volume_size_in_gb": 50,
                "enable_managed_spot_training": True,
            },
        ),
        "stopping_condition": (
            "StoppingCondition",
            {"max_runtime_in_seconds": 60, "max_wait_time_in_seconds": 90},
        ),
        "networking": ("Networking", {"subnets": ["a"], "security_group_ids": ["b"]}),
        "output_data_config": ("OutputDataConfig", {"s3_output_path": "s3://out"}),
        "checkpoint_config": ("CheckpointConfig", {"s3_uri": "s3://c"}),
        "tags": [{"key": "k", "value": "v"}],
        # As many processes as there are GPUs that they see.
        "distributed": ("Torchrun", {"process_count_per_node": 2}),
        "hyperparameters": {"flag": "True", "z": [1]},
        "environment": {
            **ENVIRONMENT,
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "MINE": "b",
        },
    }
    assert metrics == [("MetricDefinition", {"name": "f1", "regex": "f1 = (.*?);"})]
    assert inputs == [("InputData", {"channel_name": "train", "data_source": "s3://bucket/train"})]
    assert "will be at s3://bucket/model.tar.gz" in capsys.readouterr().err


TORCHRUN = ("Torchrun", {})
TENSOR_PARALLEL = ("Torchrun", {"smp": ("SMP", {"tensor_parallel_degree": 2})})


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("'NO'", None, TORCHRUN),
        ("DATA_PARALLEL", None, TORCHRUN),
        ("MODEL_PARALLEL", None, ("Torchrun", {"smp": ("SMP", {})})),
        ("MODEL_PARALLEL", "{distributed: {smp: {tensor_parallel_degree: 2}}}", TENSOR_PARALLEL),
        (
            "MODEL_PARALLEL",
            "{distribution: {smdistributed: {modelparallel: {parameters: {tensor_parallel_degree: 2}}}}}",
            TENSOR_PARALLEL,
        ),
        ("'NO'", "{distributed: {process_count_per_node: 1}}", ("Torchrun", {"process_count_per_node": 1})),
        # One process, without torchrun.
        ("'NO'", "{distribution: null}", None),
    ],
)  # fmt: skip
def test_how_version_3_starts_the_processes(client_3, kind, more, expected):
    launch(
        client_3, "code/train.py", distributed_type=kind, num_machines=2, additional_args=more
    )  # fmt: skip
    made = client_3.CALLS[0][0]
    assert made.get("distributed") == expected
    assert made["compute"][1]["instance_count"] == 2
    function, image = made["training_image"]
    if kind == "MODEL_PARALLEL":
        assert function == "get_training_image_uri"
        assert image["framework_version"] == "1.10.2"
        assert "modelparallel" in image["distribution"]["smdistributed"]
    else:
        assert function == "retrieve"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("{volum_size: 1}", ["no volum_size", "volume_size"]),
        # One error for all.
        (
            "{compute: {instance_typ: a}, foo: 1, distributed: {smp: {tensor_degree: 2}}}",
            ["no instance_typ", "instance_type", "no foo", "no tensor_degree", "tensor_parallel_degree"],
        ),
        ("{networking: [a]}", ["networking must hold"]),
        ("{tags: [a]}", ["tags must hold"]),
        ("{distribution: {mpi: {enabled: true}}}", ["not have the distribution mpi", "torch_distributed"]),
    ],
)  # fmt: skip
def test_names_that_version_3_does_not_have(client_3, more, told):
    with pytest.raises(ConfigurationError, match=r"^additional_args") as raised:
        launch(client_3, "code/train.py", additional_args=more)
    for fact in told:
        assert fact in str(raised.value)
    assert client_3.CALLS == []


def test_names_that_version_2_does_not_have(client):
    # The estimator would leave it out without a word.
    with pytest.raises(ConfigurationError, match=r"not have volum_size \(did you mean volume_size"):
        launch(client, "code/train.py", additional_args="{volum_size: 1, train_max_run: 9}")
    assert client.CALLS == []


@pytest.mark.parametrize(
    "value",
    ["word", "0.1", "1e-4", "5e-5", "007", "1.50", "True", "true", "null", "NaN", "{\"a\":1}", '"quoted"', "it's",
     "1E5", "-1", "a=b", "12345678901234567890123", "'5e-5'", "a b\n$c", "é"],
)  # fmt: skip
def test_the_script_gets_what_was_written(client_3, value):
    launch(client_3, "code/train.py", f"--name={value}")
    text = client_3.CALLS[0][0]["hyperparameters"]["name"]
    # The container reads it as JSON, keeps it in a variable between apostrophes, and reads and writes JSON again.
    with contextlib.suppress(ValueError):
        text = json.loads(text)
    assert "'" not in json.dumps(text)
    with contextlib.suppress(ValueError, TypeError):
        text = json.loads(text)
    if not isinstance(text, str):
        text = json.dumps(text)
    assert text == value


def test_names_of_one_letter(client_3):
    with pytest.raises(ConfigurationError, match="passes -x as --x"):
        launch(client_3, "code/train.py", "-x", "1")
    assert client_3.CALLS == []


def test_the_calls_of_a_dry_run_are_those_of_the_launch(client_3, capsys):
    with open("inputs.tsv", "w") as file:
        file.write("channel\tdata_location\ntrain\ts3://bucket/train\n")
    with open("metrics.tsv", "w") as file:
        file.write("metric_name\tmetric_regex\nf1\tf1 = (.*?);\n")
    words = ["code/train.py", "--lr", "5e-5"]
    keys = {
        "distributed_type": "MODEL_PARALLEL", "sagemaker_inputs_file": "inputs.tsv",
        "sagemaker_metrics_file": "metrics.tsv", "additional_args": "{logs: false, volume_size: 9}",
    }  # fmt: skip
    launch(client_3, *words, **keys)
    calls = list(client_3.CALLS)
    launch(client_3, "--dry_run", *words, **keys)
    assert client_3.CALLS == []
    exported, text = capsys.readouterr().out.split("ModelTrainer(", 1)
    assert exported == "export AWS_PROFILE=prof\nexport AWS_DEFAULT_REGION=eu-west-1\n"
    from sagemaker.core import image_uris
    from sagemaker.train import configs

    names = {**vars(configs), "ModelTrainer": client_3.ModelTrainer, "image_uris": image_uris}
    eval(f"ModelTrainer({text}", names)
    assert calls == client_3.CALLS


def test_a_dry_run_with_version_2(client, capsys):
    launch(
        client, "--dry_run", "code/train.py", "--lr", "0.1", additional_args="{wait: false}"
    )  # fmt: skip
    told = capsys.readouterr().out
    assert client.CALLS == []
    assert "HuggingFace(\n" in told and "    hyperparameters={'lr': 0.1},\n" in told
    assert told.endswith(").fit(inputs=None, wait=False)\n")


def test_a_dry_run_needs_no_client(tmp_path, monkeypatch, capsys):
    _hide(monkeypatch)
    (tmp_path / "c.yaml").write_text("".join(f"{key}: {value}\n" for key, value in FILE.items()))
    keys = ["--aws_access_key_id", "KEPT", "--aws_secret_access_key", "HIDDEN"]
    main(["--dry_run", "--config_file", "c.yaml", *keys, "code/train.py", "--lr", "0.1"])
    told, note = capsys.readouterr()
    assert "HIDDEN" not in told and "KEPT" not in told and "AWS_PROFILE" not in os.environ
    assert "    hyperparameters={'lr': '0.1'},\n" in told
    assert told.endswith(").train(input_data_config=None)\n")
    assert "version 3" in note


def test_the_client_is_missing(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text("".join(f"{key}: {value}\n" for key, value in FILE.items()))
    _hide(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(["--config_file", "c.yaml", "code/train.py"])
    assert ended.value.code == 2 and "pip install sagemaker" in capsys.readouterr().err


def test_a_client_without_the_part_that_trains(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path / "packages", "3.0.0", {"core/image_uris": ""}))
    with pytest.raises(ConfigurationError, match=r"version 3 .*sagemaker\.train"):
        launch(SimpleNamespace(CALLS=[]), "code/train.py")
    _forget()


@pytest.mark.parametrize("version", ["client", "client_3"])
def test_failures_and_interruptions(version, request, capsys):
    client = request.getfixturevalue(version)
    client.FAILURE[:] = [RuntimeError("AccessDenied: role cannot be assumed")]
    with pytest.raises(LaunchError, match="SageMaker: RuntimeError: AccessDenied"):
        launch(client, "code/train.py")
    # Ctrl-C: the job would run on, and cost.
    client.FAILURE[:] = [KeyboardInterrupt()]
    with pytest.raises(SystemExit) as ended:
        launch(client, "code/train.py")
    assert ended.value.code == 130
    assert client.CALLS[-1] == ("stop", "job-1")
    assert "requested job job-1 to stop" in capsys.readouterr().err


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

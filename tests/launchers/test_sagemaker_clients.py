# SPDX-License-Identifier: Apache-2.0
"""Jobs on Amazon SageMaker with the client itself, of version 2 or 3, and moto for its services.

The requests of both versions are compared with the same expectation. `make test-sagemaker` runs this with each.
"""

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from accelerate.commands.launch import main
from accelerate.launchers import sagemaker_clients

pytestmark = pytest.mark.thorough
if os.environ.get("SAGEMAKER_REQUIRED"):
    import moto
else:
    moto = pytest.importorskip("moto")
    pytest.importorskip("sagemaker")
import boto3  # noqa: E402
import botocore.client  # noqa: E402

VERSION = int(importlib.metadata.version("sagemaker").partition(".")[0])
only_3 = pytest.mark.skipif(VERSION < 3, reason="of version 3 of the client")
TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
FILE = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: {kind}
ec2_instance_type: ml.p4d.24xlarge
iam_role_name: {role}
region: eu-west-1
mixed_precision: bf16
num_machines: 2
transformers_version: 4.49.0
pytorch_version: 2.5.1
py_version: py311
sagemaker_inputs_file: inputs.tsv
sagemaker_metrics_file: metrics.tsv
additional_args: {more}
"""
TORCHRUN = {"torch_distributed": {"enabled": True}}
MORE = {
    "distribution": TORCHRUN, "volume_size": 50, "max_run": 600, "tags": [{"Key": "team", "Value": "a"}],
    "environment": {"MINE": "b"}, "subnets": ["subnet-1"], "security_group_ids": ["sg-1"],
    "encrypt_inter_container_traffic": True, "output_path": "s3://models/out",
    "checkpoint_s3_uri": "s3://models/checkpoints", "checkpoint_local_path": "/opt/ml/checkpoints",
}  # fmt: skip
SCRIPT = "print('trained')\n"
WORDS = ["--lr", "5e-5", "--epochs", "3", "--flag", "True", "--name", "it's", "--text", '"a" $HOME']
IMAGE = (
    "763104351884.dkr.ecr.eu-west-1.amazonaws.com/huggingface-pytorch-training:"
    "2.5.1-transformers4.49.0-gpu-py311-cu124-ubuntu22.04"
)


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """A folder with a script, an account with a role; the operations and parameters that botocore sends."""
    saved = dict(os.environ)
    for name in saved:
        if name.startswith(("ACCELERATE_", "AWS_")):
            del os.environ[name]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    Path("code/train.py").write_text(SCRIPT)
    Path("code/requirements.txt").write_text("accelerate\n")
    Path("inputs.tsv").write_text("channel\tlocation\ntrain\ts3://data/train\n")
    Path("metrics.tsv").write_text("name\tregex\nloss\tloss: ([0-9.]+)\n")
    sent = []
    send = botocore.client.BaseClient._make_api_call

    def record(self, operation, parameters):
        sent.append((operation, parameters))
        if operation == "SimulatePrincipalPolicy":  # moto does not have it
            return {"EvaluationResults": []}
        return send(self, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", record)
    with moto.mock_aws():
        boto3.client("iam").create_role(
            RoleName="trainer", AssumeRolePolicyDocument=json.dumps(TRUST)
        )
        boto3.client("iam").create_role(
            RoleName="stranger",
            AssumeRolePolicyDocument=json.dumps(TRUST).replace("sagemaker", "lambda"),
        )
        boto3.client("s3").create_bucket(
            Bucket="models", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        sent.clear()
        yield sent
    os.environ.clear()
    os.environ.update(saved)


def launch(*words, kind="'NO'", role="trainer", **more):
    """Run the launcher with a file in which `additional_args` has MORE, and what is given."""
    arguments = {**MORE, **more}
    for name in [name for name, value in arguments.items() if value is ...]:
        del arguments[name]
    Path("c.yaml").write_text(FILE.format(kind=kind, role=role, more=json.dumps(arguments)))
    main([*words, "--config_file", "c.yaml", "code/train.py", *WORDS])


def job_request(requests):
    """The one request that creates a job."""
    (job,) = [parameters for operation, parameters in requests if operation == "CreateTrainingJob"]
    return job


def downloaded(location):
    """The name and content of each object below a location of S3."""
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3")
    return {
        item["Key"].removeprefix(prefix).lstrip("/"): s3.get_object(Bucket=bucket, Key=item["Key"])[
            "Body"
        ].read()
        for item in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    }


def in_container_2(job):
    """The files of the script's folder and the command for the first machine, as version 2's container has them."""
    parameters = {name: json.loads(text) for name, text in job["HyperParameters"].items()}
    (archive,) = downloaded(parameters["sagemaker_submit_directory"]).values()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    starter = "python"
    if parameters.get("sagemaker_torch_distributed_enabled"):
        starter = "torchrun"
    command = [starter, parameters["sagemaker_program"]]
    for name, value in parameters.items():
        if not name.startswith("sagemaker_"):
            command += [f"--{name}", str(value)]
    return files, command


RUN_DRIVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, ".")
from scripts import environment
environment.read_source_code_json = lambda: json.loads(Path("sourcecode.json").read_text())
environment.read_distributed_json = lambda: json.loads(Path("distributed.json").read_text())
hosts = {"current_host": "algo-1", "hosts": ["algo-2", "algo-1"], "current_instance_type": "ml.p4d.24xlarge",
         "network_interface_name": "eth0"}
environment.num_gpus = lambda: 8
environment.set_env(hosts, {"train": {}}, json.loads(Path("hyperparameters.json").read_text()), "variables")
"""
SHOW_COMMAND = """
import json, sys
sys.path.insert(0, ".")
if "torchrun_driver" in open("sm_train.sh").read():
    from distributed_drivers import torchrun_driver as driver
    driver.pytorch_version = lambda: (2, 5)
else:
    from distributed_drivers import basic_script_driver as driver
print(json.dumps(driver.create_commands()))
"""


def in_container_3(job):
    """The same with version 3: its own drivers, as they were uploaded, make the command."""
    channels = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in job["InputDataConfig"]
    }
    for name, content in downloaded(channels["sm_drivers"]).items():
        path = Path("drivers", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    Path("drivers/hyperparameters.json").write_text(json.dumps(job["HyperParameters"]))
    os.environ["TRAINING_JOB_NAME"] = job["TrainingJobName"]
    run = {"cwd": "drivers", "check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-c", RUN_DRIVER], **run)
    python = [sys.executable, "-c", SHOW_COMMAND]
    shown = subprocess.run(
        ["bash", "-c", 'source variables && exec "$@"', "bash", *python], **run
    ).stdout
    command = json.loads(shown)
    if command[0] == "torchrun":
        assert command[1:3] == ["--nnodes=2", "--nproc_per_node=8"]
        assert {"--master_addr=algo-1", "--node_rank=0"} < set(command)
        command = ["torchrun", *command[command.index("train.py") :]]
    else:
        command[0] = "python"
    assert "install_requirements.py requirements.txt" in Path("drivers/sm_train.sh").read_text()
    return downloaded(channels["code"]), command


in_container = {2: in_container_2, 3: in_container_3}[VERSION]


def named(command):
    """A command with its pairs of a name and a value in a dict: version 2's container has them in any order."""
    return [*command[:2], dict(zip(command[2::2], command[3::2], strict=True))]


def test_the_requests_of_both_versions(requests, capsys):
    launch()
    job = job_request(requests)
    assert job["ResourceConfig"] == {
        "InstanceCount": 2,
        "InstanceType": "ml.p4d.24xlarge",
        "VolumeSizeInGB": 50,
    }
    assert job["Environment"] == {
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO",
        "ACCELERATE_USE_SAGEMAKER": "true",
        "MINE": "b",
    }
    assert job["AlgorithmSpecification"]["TrainingImage"] == IMAGE
    assert job["AlgorithmSpecification"]["TrainingInputMode"] == "File"
    assert job["AlgorithmSpecification"]["MetricDefinitions"] == [
        {"Name": "loss", "Regex": "loss: ([0-9.]+)"}
    ]
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 600}
    assert job["Tags"] == [{"Key": "team", "Value": "a"}]
    assert job["RoleArn"] == "arn:aws:iam::123456789012:role/trainer"
    assert job["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert job["EnableInterContainerTrafficEncryption"] is True
    assert job["OutputDataConfig"]["S3OutputPath"] == "s3://models/out"
    assert job["CheckpointConfig"] == {
        "S3Uri": "s3://models/checkpoints",
        "LocalPath": "/opt/ml/checkpoints",
    }
    channel = job["InputDataConfig"][0]
    assert channel["ChannelName"] == "train"
    assert channel["DataSource"]["S3DataSource"] == {
        "S3DataType": "S3Prefix",
        "S3Uri": "s3://data/train",
        "S3DataDistributionType": "FullyReplicated",
    }

    files, command = in_container(job)
    assert files["train.py"].decode() == SCRIPT
    assert "requirements.txt" in files
    assert named(command) == named(["torchrun", "train.py", *WORDS])

    described = boto3.client("sagemaker").describe_training_job(
        TrainingJobName=job["TrainingJobName"]
    )
    assert described["TrainingJobStatus"] == "Completed"
    assert (
        f"s3://models/out/{job['TrainingJobName']}/output/model.tar.gz" in capsys.readouterr().err
    )


def test_defaults_of_both_versions(requests):
    more = dict.fromkeys(MORE, ...) | {"distribution": TORCHRUN}
    launch(**more)
    job = job_request(requests)
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 24 * 60 * 60}
    assert job["ResourceConfig"]["VolumeSizeInGB"] == 30
    assert job["TrainingJobName"].startswith("accelerate-sagemaker-1-")


def test_data_parallelism(requests):
    versions = {"pytorch_version": "1.10.2", "transformers_version": "4.17.0", "py_version": "py38"}
    launch(kind="DATA_PARALLEL", distribution=..., **versions)
    job = job_request(requests)
    assert job["Environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"
    _, command = in_container(job)
    if VERSION == 2:
        assert job["HyperParameters"]["sagemaker_distributed_dataparallel_enabled"] == "true"
    else:
        assert command[0] == "torchrun"


@only_3
def test_model_parallelism(requests):
    launch(
        kind="MODEL_PARALLEL", distribution=..., distributed={"smp": {"tensor_parallel_degree": 4}}
    )
    job = job_request(requests)
    assert json.loads(job["HyperParameters"]["mp_parameters"]) == {"tensor_parallel_degree": 4}
    image = job["AlgorithmSpecification"]["TrainingImage"]
    assert image.endswith("/smdistributed-modelparallel:2.5.1-gpu-py311-cu124")
    _, command = in_container(job)
    assert command[:2] == ["torchrun", "train.py"]


@only_3
def test_one_process(requests):
    launch(distribution=None)
    _, command = in_container(job_request(requests))
    assert named(command) == named(["python", "train.py", *WORDS])


def test_a_dry_run_shows_the_calls(requests, capsys):
    launch("--dry_run")
    assert requests == []
    lines = capsys.readouterr().out.splitlines()
    calls = "\n".join(line for line in lines if not line.startswith("export "))
    if VERSION == 2:
        from sagemaker.huggingface import HuggingFace

        names = {"HuggingFace": HuggingFace}
    else:
        from sagemaker.core import image_uris
        from sagemaker.train import ModelTrainer, configs, distributed

        names = {**vars(configs), **vars(distributed), "ModelTrainer": ModelTrainer}
        names["image_uris"] = image_uris
    exec(calls, names)
    shown = job_request(requests)
    files, command = in_container(shown)
    requests.clear()
    launch()
    launched = job_request(requests)
    for part in ("ResourceConfig", "Environment", "AlgorithmSpecification", "StoppingCondition"):
        assert shown[part] == launched[part]
    assert in_container(launched) == (files, command)


def test_ctrl_c_stops_the_job(requests, monkeypatch, capsys):
    send = botocore.client.BaseClient._make_api_call

    def interrupt(self, operation, parameters):
        if operation == "StopTrainingJob":  # moto does not have it
            requests.append((operation, parameters))
            return {}
        if operation == "DescribeLogStreams":
            raise KeyboardInterrupt
        return send(self, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", interrupt)
    with pytest.raises(SystemExit) as ended:
        launch()
    assert ended.value.code == 130
    name = job_request(requests)["TrainingJobName"]
    assert requests[-1] == ("StopTrainingJob", {"TrainingJobName": name})
    assert name in capsys.readouterr().err


def test_a_job_that_is_not_followed(requests, capsys):
    launch(wait=False, logs=False)
    operations = [operation for operation, _ in requests]
    assert operations.count("CreateTrainingJob") == 1
    assert "DescribeLogStreams" not in operations
    assert "will be at s3://models/out/" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["volum_size", "max_runn", "subnet", "foo"])
def test_names_that_the_client_does_not_have(requests, capsys, name):
    with pytest.raises(SystemExit) as ended:
        launch(**{name: 1})
    assert ended.value.code == 2
    assert f"no {name}" in capsys.readouterr().err
    assert requests == []


@only_3
def test_each_field_exists_in_the_client():
    functions = sagemaker_clients._functions()
    for place in sagemaker_clients.FIELDS.values():
        field, _, inner = place.partition(".")
        assert field in functions["ModelTrainer"].model_fields
        if inner:
            assert inner in functions[sagemaker_clients.SECTIONS[field]].model_fields


@pytest.mark.parametrize("role", ["absent", "stranger"])
def test_a_role_that_cannot_train(requests, capsys, role):
    if (VERSION, role) == (2, "stranger"):
        pytest.skip("version 2 does not ask whom the role trusts")
    with pytest.raises(SystemExit) as ended:
        launch(role=role)
    assert ended.value.code != 0
    told = capsys.readouterr().err
    assert "SageMaker: " in told and role in told
    assert "CreateTrainingJob" not in [operation for operation, _ in requests]

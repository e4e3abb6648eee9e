# SPDX-License-Identifier: Apache-2.0
"""Launches that cannot be: one error that says what and where, exit code 2, and nothing is started."""

import socket

import pytest
from s3_server import SECRET, S3Server

from accelerate.commands import launch
from accelerate.core import buckets, system

CPU, GPUS = system.Accelerators("cpu", 0), system.Accelerators("cuda", 2, "CUDA_VISIBLE_DEVICES")
FILES = {
    "broken.yaml": "debug: false\nnum_processes: [2\nuse_cpu: true\n",
    "zero.json": '{"bf16": {}, "zero_optimization": {"stage": 2}}',
    "typed.yaml": "debug: false\nnum_processes: two\n",
    "typo.yaml": "debug: false\nnum_proceses: 2\n",
    "both.yaml": "use_cpu: true\ndistributed_type: MULTI_GPU\n",
    "rank.yaml": "use_cpu: true\nnum_machines: 2\nnum_processes: 2\nmachine_rank: 5\nmain_process_ip: 127.0.0.1\n",
}
TWO = "--cpu --num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1"
CASES = [
    (CPU, "none.py", "the script 'none.py' does not exist"),
    (CPU, "trian.py", "did you mean train.py?"),
    (CPU, "", "the following arguments are required: training_script"),
    (CPU, "-m no.such.module", "the module 'no.such.module' is neither in"),
    (
        CPU,
        "--no_python train.py",
        "the program 'train.py' is not on the PATH; the file with this name is not executable",
    ),
    (
        CPU,
        f"{TWO} --rdzv_conf join_timout=5 train.py",
        "unknown setting 'join_timout' (did you mean join_timeout?)",
    ),
    (CPU, "--log_dir= --num_processes 2 train.py", "log_dir='' does not name a folder"),
    (
        CPU,
        "--main_process_ip --cpu train.py",
        "expected one argument; write a value that begins with a hyphen as",
    ),
    (
        CPU,
        "--main_process_ip -x train.py",
        "main_process_ip='-x': '-x' is not a host name or address",
    ),
    (CPU, "--engine deepspeed train.py", "the deepspeed engine needs --deepspeed_hostfile"),
    (CPU, "--config_file zero.json train.py", "zero.json:1: unknown key bf16"),
    (
        CPU,
        "--num_proceses 2 train.py",
        "unknown option --num_proceses (did you mean --num_processes?)",
    ),
    (
        CPU,
        "--nproc-per-node=2 --num_processes 2 train.py",
        "nproc_per_node (flag --nproc_per_node) and num_processes (flag --num_processes) contradict each other",
    ),
    (CPU, "--standalone train.py", "unknown option --standalone: remove it"),
    (CPU, "-h resilence", "no topic or option 'resilence' (did you mean resilience?)"),
    (CPU, ".", "'.' is a folder without a __main__.py"),
    (
        CPU,
        "--mixed_precision bf61 train.py",
        "--mixed_precision='bf61' is not one of no, fp16, bf16, fp8",
    ),
    (
        GPUS,
        "--num_processes 3 train.py",
        "requests 3 processes on this machine, which has 2 cuda devices available",
    ),
    (
        GPUS,
        "--gpu_ids 1,2 train.py",
        "the device 2 does not exist; this machine has 2 (cuda 0 to 1)",
    ),
    (
        CPU,
        "--gpu_ids 0,1 train.py",
        "gpu_ids='0,1' (flag --gpu_ids): this machine does not have an accelerator",
    ),
    (
        CPU,
        "--multi_gpu train.py",
        "multi_gpu=True (flag --multi_gpu): this machine does not have an accelerator",
    ),
    (
        CPU,
        "--num_gpus=all train.py",
        "it means one process for each accelerator, but none is available",
    ),
    (CPU, "--num_processes 0 train.py", "--num_processes=0 is out of range: use 1"),
    (CPU, "--num_processes two train.py", "--num_processes='two' is not an integer"),
    (CPU, "--cpu --num_processes 99999999 train.py", "--num_processes=99999999 is out of range"),
    (CPU, "--config_file none.yaml train.py", "the configuration file none.yaml does not exist"),
    (
        CPU,
        "--use_deepspeed --deepspeed_config_file none.json train.py",
        "deepspeed_config_file='none.json' does not exist",
    ),
    (CPU, "--config_file broken.yaml train.py", "broken.yaml:3:8: not YAML"),
    (
        CPU,
        "--config_file typed.yaml train.py",
        "typed.yaml:2: num_processes='two' is not an integer",
    ),
    (
        CPU,
        "--config_file typo.yaml train.py",
        "typo.yaml:2: unknown key num_proceses (did you mean num_processes?)",
    ),
    (
        CPU,
        "--config_file both.yaml train.py",
        "use_cpu (both.yaml:1) and distributed_type MULTI_GPU (both.yaml:2)",
    ),
    (
        CPU,
        "--cpu --num_processes 2 --main_process_port PORT train.py",
        "port PORT is in use on this machine",
    ),
    (
        CPU,
        "--cpu --num_processes 2 --main_process_port 70000 train.py",
        "--main_process_port=70000 is out of range: use 0 to 65535",
    ),
    (
        CPU,
        "--cpu --num_machines 2 --num_processes 2 --machine_rank 1 --main_process_ip no.such.host.invalid train.py",
        "main_process_ip='no.such.host.invalid' does not resolve",
    ),
    (
        CPU,
        f"{TWO} --machine_rank 2 train.py",
        "machine_rank=2 is out of range: with num_machines=2 it is 0 to 1",
    ),
    (CPU, "--config_file rank.yaml train.py", "machine_rank is from rank.yaml:4"),
    (
        CPU,
        f"{TWO} --num_processes 3 train.py",
        "num_processes=3 is the total over all machines",
    ),
    (CPU, f"{TWO} --engine local train.py", "engine='local' (flag --engine) means one machine"),
    (
        CPU,
        "--cpu --multi_gpu train.py",
        "cpu (flag --cpu) and multi_gpu (flag --multi_gpu) contradict each other",
    ),
    (
        CPU,
        "--use_fsdp --use_deepspeed train.py",
        "use_fsdp (flag --use_fsdp) and use_deepspeed (flag --use_deepspeed)",
    ),
    (
        CPU,
        "--num_processes 2 --log_dir train.py train.py",
        "log_dir='train.py': train.py is not a folder",
    ),
    (
        CPU,
        "--num_processes 2 --error_file . train.py",
        "error_file='.' is a folder: name the file to write",
    ),
    (
        CPU,
        "--resume s3://bucket train.py",
        "s3://bucket: `pip install accelerate[buckets]`",
    ),
    (
        CPU,
        "--resume s4://bucket/run train.py",
        "'s4://bucket/run'",
    ),
    (
        CPU,
        "--log_dir s3://bucket/logs train.py",
        "log_dir='s3://bucket/logs'",
    ),
    (
        CPU,
        "-m --no_python train.py",
        "module (flag --module) and no_python (flag --no_python) contradict each other",
    ),
]


@pytest.mark.parametrize(
    ("machine", "line", "told"), CASES, ids=[line or "nothing" for _, line, _ in CASES]
)
def test_one_error_and_nothing_started(machine, line, told, tmp_path, monkeypatch, capsys):
    for name in ("ACCELERATE_CONFIG_FILE", "OMP_NUM_THREADS", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(system, "accelerators", lambda: machine)
    monkeypatch.setattr(buckets, "is_available", lambda name: name != "obstore")
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as end:
            launch.main(line.replace("PORT", port).split())
    assert end.value.code == 2
    errors = [
        text
        for text in capsys.readouterr().err.splitlines()
        if not text.startswith("accelerate: 2 ")
    ]
    assert len(errors) == 1 and errors[0].startswith("accelerate: error: ")
    assert told.replace("PORT", port) in errors[0]
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "fault, told", [("403", "AccessDenied"), ("skew", "clock"), (None, "bucket")]
)
def test_a_bucket_that_cannot_be_saved_to_is_known_before_the_start(
    fault, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    with S3Server(buckets=["bucket"] if fault else [], faults=lambda request: fault):
        with pytest.raises(SystemExit) as end:
            launch.main(["--cpu", "--resume", "s3://bucket/run", "train.py"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and told in error and "s3://bucket/run" in error
    assert SECRET not in error and not (tmp_path / "started").exists()


def test_the_project_is_a_variable_of_the_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    launch.main(["--cpu", "--dry_run", "--resume", "memory://project/run", "train.py"])
    assert "ACCELERATE_RESUME=memory://project/run" in capsys.readouterr().out

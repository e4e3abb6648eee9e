# SPDX-License-Identifier: Apache-2.0
"""Launch configuration files: read, refused with line and key, written, brought up to date."""

import json

import pytest

from accelerate.config import launch_file
from accelerate.config.launch_settings import resolve_settings
from accelerate.core.errors import ConfigurationError

FULL = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: max-autotune
fp8_config:
  backend: TE
  fp8_format: E4M3
  override_linear_precision: [false, false, true]
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
gpu_ids: 0,1
parallelism_config:
  parallelism_config_tp_size: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@pytest.fixture
def read(tmp_path):
    def from_text(text, name="config.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return launch_file.read(path)

    return from_text


def test_the_api_s_keys_become_options_with_their_line(read, tmp_path):
    found = read(FULL)
    settings = resolve_settings({"num_processes": 4}, found)
    assert (
        settings["use_fsdp"] is True and settings.origin("use_fsdp") == f"{tmp_path}/config.yaml:3"
    )
    assert settings["fsdp_version"] == "2"
    assert settings["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert settings["dynamo_backend"] == "inductor"
    assert settings["fp8_backend"] == "te" and settings["fp8_format"] == "E4M3"
    assert (
        settings["use_parallelism_config"] is True and settings["parallelism_config_tp_size"] == 2
    )
    assert settings["gpu_ids"] == "0,1"
    assert settings["mixed_precision"] == "bf16"
    assert settings.origin("mixed_precision") == f"{tmp_path}/config.yaml:22"
    assert (
        settings["num_processes"] == 4
        and settings.origin("num_processes") == "flag --num_processes"
    )
    assert settings["max_restarts"] == 0 and settings.origin("max_restarts") == "default"


def test_json_says_the_same(read):
    found = read(
        json.dumps(
            {"compute_environment": "LOCAL_MACHINE", "num_processes": 3, "mixed_precision": "no"},
            indent=1,
        ),
        "c.json",
    )
    assert found.values["num_processes"].value == 3
    assert found.values["num_processes"].origin.endswith("c.json:3")


def test_yaml_words_keep_their_meaning(read):
    found = read("mixed_precision: no\nuse_cpu: yes\ndistributed_type: NO\n")
    assert found.values["mixed_precision"].value == "no"
    assert found.values["cpu"].value is True
    assert found.data["distributed_type"] == "NO"


def test_older_spellings_are_read_and_noted(read):
    found = read(
        "distributed_type: TPU\nfp16: true\ndynamo_backend: INDUCTOR\nuse_mps_device: true\n"
        "fsdp_config:\n  fsdp_sharding_strategy: 2\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
    )
    assert found.data["distributed_type"] == "XLA"
    assert found.values["mixed_precision"].value == "fp16"
    assert found.data["dynamo_config"] == {"dynamo_backend": "inductor"}
    assert found.data["fsdp_config"] == {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
    }
    assert len(found.notes) == 6 and any(
        "use_mps_device no longer has an effect" in note for note in found.notes
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "num_process: 2\n",
            r"config.yaml:1: unknown key num_process \(did you mean num_processes\?\)",
        ),
        ("a: 1\n\nfsdp_config:\n", r":1: unknown key a;"),
        ("debug: false\nfsdp_config:\n  fsdp_versoin: 2\n", r":3: .*did you mean fsdp_version"),
        ("debug: 7x\n", r":1: debug='7x' is not a truth value"),
        ("num_processes: two\n", r":1: num_processes='two' is not an integer"),
        ("num_processes: 2.5\n", r"not an integer"),
        ("num_processes: [2]\n", r"not an integer"),
        ("mixed_precision: bf61\n", r"not one of no, fp16, bf16, fp8 \(did you mean bf16\?\)"),
        ("fsdp_config: 3\n", r":1: fsdp_config must hold"),
        ("debug: false\ndebug: true\n", r":2: the key debug appears twice, first on line 1"),
        ("debug: [false\nuse_cpu: x\n", r":\d+:\d+: not YAML"),
        ("just words\n", r":1: expected"),
        ("", r"is empty"),
        (b"\xff\xfe\x00", r"cannot be read"),
        ("debug: 2001-99-99\n", r"not YAML: "),
    ],
)
def test_what_is_wrong_is_named(read, text, told):
    with pytest.raises(ConfigurationError, match=told):
        read(text)


def test_broken_json_says_where(read):
    with pytest.raises(ConfigurationError, match=r"c\.json:2:"):
        read('{"debug": false\n "use_cpu": true}', "c.json")


def test_written_files_read_back(tmp_path, read):
    data = {
        "mixed_precision": "no",
        "num_processes": 2,
        "fsdp_config": {"fsdp_version": "2"},
        "gpu_ids": None,
    }
    for name in ("a.yaml", "a.json"):
        found = launch_file.read(launch_file.write(tmp_path / name, data))
        assert found.data == {
            "mixed_precision": "no",
            "num_processes": 2,
            "fsdp_config": {"fsdp_version": "2"},
        }


def test_the_place_follows_the_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "h"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert launch_file.default_file() == tmp_path / "h/accelerate/default_config.yaml"
    monkeypatch.delenv("HF_HOME")
    assert launch_file.default_file() == tmp_path / "x/huggingface/accelerate/default_config.yaml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        launch_file.default_file() == tmp_path / ".cache/huggingface/accelerate/default_config.yaml"
    )

# SPDX-License-Identifier: Apache-2.0
"""`accelerate to-fsdp2`: each key of FSDP1 becomes what it means to FSDP2, and the launcher takes the result."""

import pytest
import yaml

from accelerate.commands import launch
from accelerate.commands.to_fsdp2 import main, to_fsdp2_command, to_fsdp2_command_parser
from accelerate.config import launch_file

OLD = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_process_ip: 10.0.0.1
mixed_precision: bf16
num_machines: 1
num_processes: 4
use_cpu: true
"""


@pytest.fixture
def convert(tmp_path, capsys):
    def run(text):
        source, target = tmp_path / "old.yaml", tmp_path / "new.yaml"
        source.write_text(text)
        main(["--config_file", str(source), "--output_file", str(target), "--overwrite"])
        return yaml.safe_load(target.read_text()), capsys.readouterr().out

    return run


def test_each_key_becomes_what_it_means(convert):
    data, told = convert(OLD)
    assert data["fsdp_config"] == {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_version": 2,
    }
    others = yaml.safe_load(OLD)
    assert {key: data[key] for key in others if key != "fsdp_config"} == {
        key: value for key, value in others.items() if key != "fsdp_config"
    }
    for key in ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params"):
        assert f"fsdp_{key}: " in told
    assert told.count("is removed") == 4 and "fsdp_version: 2" in told


@pytest.mark.parametrize(
    ("strategy", "machines", "reshard", "told"),
    [
        ("SHARD_GRAD_OP", 1, False, None),
        ("2", 1, False, "is now SHARD_GRAD_OP"),
        ("NO_SHARD", 1, False, "FSDP2 always shards"),
        ("HYBRID_SHARD", 1, True, "on one machine"),
        ("HYBRID_SHARD", 2, True, "dp_replicate_size 2, dp_shard_size 2"),
        ("HYBRID_SHARD_ZERO2", 4, False, "dp_replicate_size 4, dp_shard_size 1"),
        ("HYBRID_SHARD", 3, True, "set parallelism_config"),
    ],
)
def test_strategies(convert, strategy, machines, reshard, told):
    text = OLD.replace("FULL_SHARD", strategy).replace(
        "num_machines: 1", f"num_machines: {machines}"
    )
    data, said = convert(text)
    assert data["fsdp_config"]["fsdp_reshard_after_forward"] is reshard
    assert "fsdp_sharding_strategy" not in data["fsdp_config"]
    assert told is None or told in said
    replicas = machines if strategy.startswith("HYBRID") and machines in (2, 4) else None
    assert (
        data.get("parallelism_config", {}).get("parallelism_config_dp_replicate_size") == replicas
    )


def test_state_dicts(convert):
    data, told = convert(OLD.replace("SHARDED_STATE_DICT", "LOCAL_STATE_DICT"))
    assert (
        data["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
        and "not have a local format" in told
    )
    data, told = convert(OLD.replace("  fsdp_state_dict_type: SHARDED_STATE_DICT\n", ""))
    assert (
        "fsdp_state_dict_type" not in data["fsdp_config"] and "FSDP1 saves FULL_STATE_DICT" in told
    )


def test_version_2_stays_what_it_is(convert, tmp_path):
    first, _ = convert(OLD)
    again, told = convert((tmp_path / "new.yaml").read_text())
    assert again == first and "nothing to change" in told
    mixed = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
    mixed += "  fsdp_reshard_after_forward: false\n  fsdp_sharding_strategy: FULL_SHARD\n"
    data, told = convert(mixed)
    assert data["fsdp_config"]["fsdp_reshard_after_forward"] is False and "already set" in told


def test_the_launcher_takes_the_result(convert, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    convert(OLD.replace("FULL_SHARD", "HYBRID_SHARD").replace("num_machines: 1", "num_machines: 2"))
    assert launch_file.read(tmp_path / "new.yaml").notes == []
    (tmp_path / "train.py").write_text("")
    launch.main(
        ["--config_file", str(tmp_path / "new.yaml"), "--dry_run", str(tmp_path / "train.py")]
    )
    told = capsys.readouterr().out
    for line in ("FSDP_VERSION=2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2", "WORLD_SIZE=4"):
        assert f"export {line}\n" in told
    assert "export FSDP_RESHARD_AFTER_FORWARD=" in told


def test_what_cannot_be_is_refused_and_nothing_written(tmp_path, capsys):
    source, target = tmp_path / "old.yaml", tmp_path / "new.yaml"

    def refused(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["--config_file", str(source), *map(str, arguments)])
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "old.yaml does not exist" in refused("--output_file", target)
    source.write_text(OLD)
    assert "--overwrite" in refused()
    assert "is a folder" in refused("--output_file", tmp_path)
    assert "already exists" in refused("--output_file", source)
    assert source.read_text() == OLD
    main(["--config-file", str(source), "--overwrite"])
    assert launch_file.read(source).data["fsdp_config"]["fsdp_version"] == "2"
    source.write_text("distributed_type: MULTI_GPU\n")
    assert "distributed_type is MULTI_GPU" in refused("--output_file", target)
    source.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 1\n")
    assert "old.yaml:3: unknown key" in refused("--output_file", target)
    source.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD\n")
    assert "'SHARD' is not one of FULL_SHARD" in refused("--output_file", target)
    assert not target.exists()


def test_the_function_raises_errors_of_files(tmp_path):
    source, target = tmp_path / "old.yaml", tmp_path / "new.yaml"
    words = ["--config_file", str(source), "--output_file", str(target)]
    args = to_fsdp2_command_parser().parse_args(words)
    with pytest.raises(FileNotFoundError, match=r"old\.yaml"):
        to_fsdp2_command(args)
    source.write_text(OLD)
    target.write_text("mine")
    with pytest.raises(FileExistsError, match=r"new\.yaml.*--overwrite"):
        to_fsdp2_command(args)
    assert target.read_text() == "mine"

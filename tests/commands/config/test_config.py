# SPDX-License-Identifier: Apache-2.0
"""`accelerate config` and the API's configuration objects."""

import argparse
import builtins
import json

import pytest

from accelerate.commands import config
from accelerate.commands.config import config_utils, questions
from accelerate.commands.config.config import config_command_parser
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.config.update import update_command_parser
from accelerate.commands.env import env_command_parser
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.core import system
from accelerate.core.enums import ComputeEnvironment, DistributedType
from accelerate.core.errors import ConfigurationError
from accelerate.parallel.choice import choose_strategy
from accelerate.parallelism_config import ParallelismConfig


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_CONFIG_FILE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(system, "accelerators", lambda: system.Accelerators("cpu", 0))


def test_default_is_written_once_and_loads(tmp_path, capsys):
    config.main(["default", "--mixed_precision", "bf16"])
    assert config.default_config_file == str(tmp_path / "accelerate/default_config.yaml")
    loaded = load_config_from_file(None)
    assert isinstance(loaded, ClusterConfig)
    assert loaded.compute_environment is ComputeEnvironment.LOCAL_MACHINE
    assert loaded.distributed_type is DistributedType.NO
    assert (loaded.mixed_precision, loaded.num_processes, loaded.use_cpu) == ("bf16", 1, True)
    assert loaded.fsdp_config == {}
    assert config.write_basic_config() is False
    with pytest.raises(ValueError, match="bf61"):
        config.write_basic_config("bf61", tmp_path / "other.yaml")
    path = config.write_basic_config(save_location=tmp_path / "new.yaml")
    assert load_config_from_file(path).to_dict()["mixed_precision"] == "no"


def test_update_writes_todays_keys(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\n")
    config.main(["update", "--config_file", str(path)])
    assert "fp16 is now mixed_precision" in capsys.readouterr().out
    loaded = load_config_from_file(path)
    assert loaded.mixed_precision == "fp16" and loaded.num_processes == 2
    assert "fp16:" not in path.read_text()


def test_explain_shows_origins(tmp_path, capsys, monkeypatch):
    config.main(["default"])
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    capsys.readouterr()
    config.main(["show", "--mixed_precision", "fp16"])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert rows["mixed_precision"].split()[1:] == ["fp16", "flag", "--mixed_precision"]
    assert rows["gradient_accumulation_steps"].split()[1:3] == ["4", "variable"]
    assert "default_config.yaml:" in rows["num_processes"]


def test_show_as_json(tmp_path, capsys):
    file = tmp_path / "own.yaml"
    file.write_text("num_processes: 2\nfsdp_config: {}\n")
    config.main(["show", "--json", "--cpu", "--config_file", str(file)])
    shown = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in shown["options"]}
    assert shown["file"] == str(file) and rows["device"]["value"] == "cpu"
    assert rows["num_processes"] == {
        "name": "num_processes",
        "value": 2,
        "origin": f"{file}:1",
    }
    config.main(["show", "aws_secret_access_key", "--aws_secret_access_key", "abc", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["options"]
    assert row["value"] == "***"


def test_show_without_a_file_shows_where_a_launch_runs(monkeypatch, capsys):
    monkeypatch.delenv(
        "FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False
    )  # plugins of other tests set it
    config.main(["show", "--num_processes", "2", "--use_fsdp"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split()[0] for line in lines] == [
        "device", "num_processes", "num_machines", "mixed_precision", "layout", "file:"
    ]  # fmt: skip
    assert lines[0].split()[1:] == ["cpu", "default"] and lines[4].split()[1:] == [
        "FSDP",
        "flag",
        "--use_fsdp",
    ]


@pytest.mark.parametrize(
    "name", ["mixed_precision", "mixed-precision", "ACCELERATE_MIXED_PRECISION"]
)
def test_explain_shows_only_the_named_options(name, tmp_path, capsys):
    config.main(["explain", name, "--mixed_precision", "fp16", "num_processes"])
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert shown == ["mixed_precision", "num_processes", "file:"]


@pytest.mark.parametrize(
    "arguments",
    [["defualt"], ["default", "--config_file", "/"], ["update", "--config_file", "/no/such.yaml"]],
)
def test_what_cannot_be_ends_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        config.main(arguments)
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err


def answers(monkeypatch, *lines):
    given = iter(lines)

    def reply(prompt=""):
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", reply)
    return given


def test_questions_on_a_cpu_machine(monkeypatch, tmp_path):
    left = answers(
        monkeypatch, "", "", "1", "", ""
    )  # machines, processes, precision, compile, write
    path = questions.run(tmp_path / "c.yaml")
    assert list(left) == []
    loaded = load_config_from_file(path)
    assert (loaded.use_cpu, loaded.mixed_precision, loaded.num_processes) == (True, "bf16", 1)


def test_questions_go_back_and_follow_the_answers(monkeypatch, tmp_path):
    monkeypatch.setattr(system, "accelerators", lambda: system.Accelerators("cuda", 8))
    answers(
        monkeypatch,
        "0", "2", "<", "2", "1", "10.0.0.1", "", "x", "16",  # up to the number of processes
        "1", "", "", "", "Block", "", "", "", "",  # FSDP and its questions
        "",  # nothing split beside that
        "1", "", "", "0",  # precision, compile, affinity, write
    )  # fmt: skip
    loaded = load_config_from_file(questions.run(tmp_path / "c.yaml"))
    assert loaded.distributed_type is DistributedType.FSDP
    assert (
        loaded.num_machines,
        loaded.machine_rank,
        loaded.main_process_ip,
        loaded.main_process_port,
    ) == (
        2,
        1,
        "10.0.0.1",
        29500,
    )
    assert (
        loaded.num_processes == 16 and loaded.mixed_precision == "bf16" and loaded.use_cpu is False
    )
    assert loaded.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert "fsdp_sharding_strategy" not in loaded.fsdp_config


@pytest.mark.parametrize(
    "fsdp, given, sizes",
    [
        (False, ["1", "1", "", "", ""], {"tp": 2, "dp_replicate": 4}),  # tp, cp, sp, pp
        (False, ["1", "", "", "", "3"], {"pp": 8}),
        (
            True,
            ["1", "1", "1", ""],
            {"tp": 2, "cp": 2, "dp_shard": 2},
        ),  # sp and pp are refused beside cp: copies
        (
            True,
            ["1", "", "<", "1", "", "", "1"],
            {"tp": 2, "pp": 2, "dp_shard": 2},
        ),  # FSDP takes the last two
        (True, ["1", "", "", "", "", "2"], {"dp_replicate": 4, "dp_shard": 2}),
        (
            True,
            ["1", "3", "2", "", ""],
            {"tp": 4, "dp_shard": 2},
        ),  # 8 is not offered: it leaves FSDP none
        (False, ["1", "", "", "", ""], {}),
    ],
)
def test_questions_split_a_model(monkeypatch, tmp_path, fsdp, given, sizes):
    """Every size that is offered leaves a layout that runs on the number of processes."""
    before = ["", "8", *(["1", "", "", "", "Block", "", "", "", ""] if fsdp else ["0"])]
    left = answers(monkeypatch, *before, *given, "", "", "0")  # precision, compile, write
    loaded = load_config_from_file(questions.run(tmp_path / "c.yaml"))
    assert list(left) == []
    assert loaded.parallelism_config == {
        f"parallelism_config_{name}_size": size for name, size in sizes.items()
    }
    if sizes:
        layout = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
        assert choose_strategy(
            8, layout, FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
        )


def test_an_ended_input_is_said(monkeypatch, tmp_path):
    answers(monkeypatch, "1")
    with pytest.raises(ConfigurationError, match="config default"):
        questions.run(tmp_path / "c.yaml")
    assert not (tmp_path / "c.yaml").exists()


def test_each_question_has_help_and_a_way_back(monkeypatch, tmp_path, capsys):
    assert all(question.help for question in questions.QUESTIONS)
    left = answers(monkeypatch, "?", "2", "back", "1", "?", "", "1", "", "")
    assert load_config_from_file(questions.run(tmp_path / "c.yaml")).num_machines == 1
    told = capsys.readouterr().out
    assert list(left) == [] and "`accelerate launch --num_machines`" in " ".join(told.split())


def test_the_preview_is_the_file(monkeypatch, tmp_path, capsys):
    for name in ("c.yaml", "c.json"):
        answers(monkeypatch, "", "", "1", "", "")
        path = questions.run(tmp_path / name)
        lines = capsys.readouterr().out.splitlines()
        assert "?" in lines[0] and "<" in lines[0]
        preview = [line.removeprefix("  ") for line in lines]
        content = path.read_text().splitlines()
        start = preview.index(content[0])
        assert preview[start : start + len(content)] == content


def test_single_questions_for_other_packages(monkeypatch, capsys):
    answers = iter(["", "many", "3", "7", "1"])
    monkeypatch.setattr("builtins.input", lambda *prompt: next(answers))
    assert config_utils._ask_field("a name: ", default="none") == "none"
    assert config_utils._ask_field("how many: ", int, error_message="a number") == 3
    assert capsys.readouterr().out == "a number\n"
    convert = config_utils._convert_mixed_precision
    assert config_utils._ask_options("precision", ["no", "fp16"], convert).value == "fp16"
    assert config_utils._convert_distributed_mode(4).value == "MULTI_GPU"
    assert config_utils._convert_yes_no_to_bool("Yes") is True


def test_commands_as_functions(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    commands = argparse.ArgumentParser()
    subparsers = commands.add_subparsers()
    update_command_parser(subparsers, [])
    env_command_parser(subparsers)
    config_command_parser(subparsers)
    args = commands.parse_args(["update", "--config_file", str(path)])
    assert args.func(args) is None
    assert load_config_from_file(path).use_cpu
    args = commands.parse_args(["env", "--config_file", str(path)])
    assert args.func(args)["config"]["use_cpu"] is True

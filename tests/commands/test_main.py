# SPDX-License-Identifier: Apache-2.0
"""The `accelerate` command: finds its sub-commands, starts light, and launches parsers that others may build on."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from accelerate.commands import estimate, launch, to_fsdp2, tpu
from accelerate.commands import main as command
from accelerate.commands import test as checks
from accelerate.commands.env import env_command, env_command_parser
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.config.launch_settings import given, resolve_settings
from accelerate.core.options import GROUPS
from accelerate.launchers.spec import Program


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_unknown_commands_get_the_nearest():
    done = run("lunch")
    assert done.returncode == 2 and "did you mean launch" in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            "config default --config_file taken/file.yaml",
            2,
            "config_file='taken/file.yaml': taken is not a folder",
        ),
        ("launch --cpu --log_dir taken taken", 2, "log_dir='taken': taken is not a folder"),
        (
            "launch --cpu --log_dir taken/logs taken",
            2,
            "log_dir='taken/logs': taken is not a folder",
        ),
        ("launch --cpu --log_dir /proc/absent taken", 2, "log_dir='/proc/absent'"),
        ("launch --cpu --log_dir /proc taken", 2, "log_dir='/proc'"),
        ("launch --cpu --log_dir /sys taken", 2, "log_dir='/sys'"),
        # Only the attempt shows that nothing can be written here.
        (
            "config default --config_file /proc/file.yaml",
            1,
            "/proc/file.yaml cannot be read or written",
        ),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(
    line, code, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "taken").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accelerate", *line.split()])
    with pytest.raises(SystemExit) as end:
        command.main()
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == code and len(lines) == 1, lines
    assert lines[0].startswith(f"accelerate: error: {message}")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("help",), 0, "usage: accelerate <command>"),
        (("help", "merge-weights"), 0, "usage: accelerate merge-weights"),
        (("version",), 0, "independent implementation"),
    ],
)
def test_help_and_version_are_commands(words, code, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    with contextlib.suppress(SystemExit):
        command.main()
    assert text in capsys.readouterr().out


def test_console_commands_are_those_of_the_api(monkeypatch, capsys):
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "scripts"
    ]
    assert set(scripts) == {
        "accelerate",
        *(f"accelerate-{name}" for name in ("config", "estimate-memory", "launch", "merge-weights")),
    }  # fmt: skip
    for name, target in scripts.items():
        monkeypatch.setattr(sys, "argv", [name, "-h"])
        with pytest.raises(SystemExit) if name != "accelerate-config" else contextlib.nullcontext():
            getattr(command, target.partition(":")[2])()
        assert f"usage: {name.replace('-', ' ', 1)}" in capsys.readouterr().out


def test_every_command_shows_help_without_torch():
    script = (
        "import sys\nfrom accelerate.commands import main\n"
        "for name in main.COMMANDS:\n    sys.argv = ['accelerate', name, '-h']\n"
        "    try: main.main()\n    except SystemExit as end: assert not end.code, name\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules and 'yaml' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in command.COMMANDS)


def test_a_launch_starts_light(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    heavy = ("accelerate.utils", "dataclasses", "difflib", "inspect", "torch", "yaml")
    script.write_text(f"import sys; print(*(set({heavy}) & set(sys.modules)))")
    done = run("launch", "--cpu", "--num_processes", "1", str(script))
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


def test_env_as_json(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: x\nadditional_args:\n  max_tokens: 5\n"
        "  environment: {HF_TOKEN: hf_1, WANDB_API_KEY: abc, HF_HOME: /x}\n"
    )
    told = json.loads(run("env", "--json", "--config_file", str(file)).stdout)
    assert told["packages"]["torch"].startswith("2.") and told["cores"] >= 1
    hidden = {"HF_TOKEN": "***", "WANDB_API_KEY": "***", "HF_HOME": "/x"}
    assert told["config"]["additional_args"] == {"max_tokens": 5, "environment": hidden}


def test_env_shows_no_python_objects_and_no_secrets(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: AMAZON_SAGEMAKER\nuse_cpu: true\nec2_instance_type: x\nadditional_args:\n"
        "  environment: {PROXY: 'http://me:pa@ss@proxy:80/x', HF_HOME: /x}\n"
        "  indexes: ['https://u:w@pypi/simple', b]\n"
    )
    args = env_command_parser().parse_args(["--config_file", str(file)])
    args_of_absent = env_command_parser().parse_args([])
    env_command(args)
    env_command(args_of_absent)
    text = capsys.readouterr().out
    assert not re.search(r"None|True|False|[\[{]", text), text
    assert "PROXY: http://me:***@proxy:80/x\n" in text and "use_cpu: true\n" in text
    assert "indexes: https://u:***@pypi/simple, b\n" in text


def test_the_parser_has_both_spellings_and_the_api_s_defaults():
    parser = launch_command_parser()
    args = parser.parse_args(
        ["--num-processes", "2", "--mixed_precision", "bf16", "x.py", "--lr", "1", "--cpu"]
    )
    assert (args.num_processes, args.mixed_precision, args.training_script) == (2, "bf16", "x.py")
    assert args.training_script_args == ["--lr", "1", "--cpu"] and args.cpu is False
    assert (args.fsdp_version, args.fsdp_offload_params, args.fsdp_min_num_params) == (
        "1",
        "false",
        100000000,
    )
    assert (args.rdzv_backend, args.max_restarts, args.monitor_interval, args.tee) == (
        "static",
        0,
        0.1,
        "0",
    )
    assert parser.parse_args(["--no_tpu_cluster", "x.py"]).tpu_use_cluster is False
    args = parser.parse_args(["--slurm_options", "--partition=gpu --exclusive", "--cpu", "x.py"])
    assert args.slurm_options == "--partition=gpu --exclusive" and args.cpu is True


def test_the_parser_is_a_sub_command_of_another_tool():
    tool = argparse.ArgumentParser()
    launch_command_parser(subparsers=tool.add_subparsers())
    args = tool.parse_args(["launch", "--num_processes", "3", "x.py", "--a"])
    assert args.func is launch_command and args.num_processes == 3


def shown(capsys, *words):
    with pytest.raises(SystemExit) as end:
        launch_command_parser().parse_args(words)
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("mixd", "mixed_precision"),
        ("accumulat", "gradient_accumulation_steps"),
        ("presicion", "precision"),
    ],
)
def test_help_suggests_the_nearest(word, meant, capsys):
    with pytest.raises(SystemExit) as end:
        launch_command_parser().parse_args(["-h", word])
    assert end.value.code == 2 and f"did you mean {meant}" in capsys.readouterr().err


def test_help_of_each_command_fits_100_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    for words in [("-h",), *((name, "-h") for name in command.COMMANDS), ("launch", "-h", "all")]:
        monkeypatch.setattr(sys, "argv", ["accelerate", *words])
        with contextlib.suppress(SystemExit):
            command.main()
        lines = capsys.readouterr().out.splitlines()
        assert lines and max(map(len, lines)) <= 100, words


def test_help_by_topic_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    usual, everything = shown(capsys, "-h"), shown(capsys, "-h", "all")
    assert everything == shown(capsys, "--help-all")
    assert max(map(len, (usual + everything).splitlines())) <= 80 and len(usual.splitlines()) < 90
    assert (
        "examples:" in usual and "--num_processes" in usual and "--fsdp_offload_params" not in usual
    )
    topics = [shown(capsys, "-h", group.title.lower()) for group in GROUPS]
    for group, text in zip(GROUPS, topics, strict=True):
        assert f"\n  {group.title.lower()} " in usual
        for option in group.options:
            assert option.flag in text and option.flag in everything
            listed = text.replace("\n", " ").replace(" ", "").replace("-", "")
            assert all(choice.replace("-", "") in listed for choice in option.choices), option.name
    assert shown(capsys, "-h", "max-restarts").count("--") == 1


def test_options_of_torchrun():
    args = launch_command_parser().parse_args(
        [
            "--nproc_per_node",
            "4",
            "--nnodes",
            "1:3",
            "--node_rank",
            "1",
            "--master_addr",
            "a",
            "--master_port",
            "29511",
            "x.py",
        ]
    )
    assert (args.machine_rank, args.main_process_ip, args.main_process_port) == (1, "a", 29511)
    settings = resolve_settings(given(args))
    assert (settings["num_processes"], settings.origin("num_processes")) == (
        12,
        "flag --nproc_per_node",
    )


def test_launch_command_returns_to_its_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os\nopen(sys.argv[1], 'w').write(os.environ['ACCELERATE_MIXED_PRECISION'])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    parser = launch_command_parser()
    launch_command(
        parser.parse_args(
            ["-q", "--cpu", "--mixed_precision", "bf16", str(script), str(tmp_path / "out"), "0"]
        )
    )
    assert (tmp_path / "out").read_text() == "bf16"
    with pytest.raises(SystemExit) as end:
        launch_command(parser.parse_args(["-q", "--cpu", str(script), str(tmp_path / "out"), "5"]))
    assert end.value.code == 5
    # A namespace that another tool made: what differs from the defaults counts as given.
    plain = argparse.Namespace(
        **vars(parser.parse_args(["-q", str(script), str(tmp_path / "out"), "0"]))
    )
    del plain.given_options
    plain.cpu, plain.mixed_precision, plain.quiet = True, "fp16", True
    launch_command(plain)
    assert (tmp_path / "out").read_text() == "fp16"


def test_the_api_s_names_of_parsers_and_helpers():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    launch_command_parser(commands)
    estimate.estimate_command_parser(commands)
    tpu.tpu_command_parser(commands)
    to_fsdp2.to_fsdp2_command_parser(commands)
    checks.test_command_parser(commands)
    args = parser.parse_args(["tpu-config", "--tpu_name", "pod"])
    assert args.func is tpu.tpu_command_launcher and args.tpu_name == "pod"
    assert to_fsdp2.convert_config_to_fsdp2({"distributed_type": "FSDP"})["fsdp_config"] == {
        "fsdp_version": 2
    }
    assert estimate.add_timm_hub_prefix("timm/resnet18") == "hf-hub:timm/resnet18"
    assert estimate.add_timm_hub_prefix("resnet18") == "resnet18"
    words = ["--rate", "5e-5", "--train", "False", "--steps", "3", "--name", "bert"]
    assert launch._convert_nargs_to_dict(words) == {
        "rate": 5e-5,
        "train": False,
        "steps": 3,
        "name": "bert",
    }


def test_options_behind_the_script_are_named_unless_it_has_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text("import sys")
    Path("parses.py").write_text("parser.add_argument('--num_processes')")
    for script, options in (
        ("parses.py", ("--num_processes", "2")),
        ("plain.py", ("--gpu_size", "2", "--seed=1")),
    ):
        launch.show_misplaced(Program(script, options))
    assert capsys.readouterr().err == ""
    launch.show_misplaced(Program("plain.py", ("--lr", "1", "--num-processes=2", "--multi_gpu")))
    (line,) = capsys.readouterr().err.splitlines()
    assert all(fact in line for fact in ("plain.py", "--num-processes=2", "--multi_gpu"))


@pytest.mark.parametrize("command", ["main completion bash", "launch -h"])
def test_a_closed_standard_output_is_no_error(command):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m accelerate.commands.{command} >&-"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")

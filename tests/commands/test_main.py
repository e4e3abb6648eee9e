# SPDX-License-Identifier: Apache-2.0
"""The `accelerate` command: finds its sub-commands, starts light, and launches parsers that others may build on."""

import argparse
import json
import subprocess
import sys

import pytest

from accelerate.commands import main as command
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.config.launch_settings import given, resolve_settings
from accelerate.core.options import GROUPS


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.main", *arguments], capture_output=True, text=True, timeout=60
    )


def test_unknown_commands_get_the_nearest():
    done = run("lunch")
    assert done.returncode == 2 and "did you mean launch" in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("config default --config_file taken/file.yaml", 2, "config_file='taken/file.yaml': taken is not a folder"),
        ("launch --cpu --log_dir taken taken", 2, "log_dir='taken': taken is not a folder"),
        # Only the attempt shows that nothing can be written here.
        ("config default --config_file /proc/file.yaml", 1, "/proc/file.yaml cannot be read or written"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(line, code, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accelerate", *line.split()])
    with pytest.raises(SystemExit) as end:
        command.main()
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == code and len(lines) == 1, lines
    assert lines[0].startswith(f"accelerate {line.split()[0]}: error: {message}")


def test_every_command_shows_help_without_torch():
    script = (
        "import sys\nfrom accelerate.commands import main\n"
        "for name in main.COMMANDS:\n    sys.argv = ['accelerate', name, '-h']\n"
        "    try: main.main()\n    except SystemExit as end: assert not end.code, name\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules and 'yaml' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in command.COMMANDS)


def test_a_launch_starts_light(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    heavy = ("accelerate.utils", "dataclasses", "difflib", "inspect", "torch", "yaml")
    script.write_text(f"import sys; print(*(set({heavy}) & set(sys.modules)))")
    done = run("launch", "--cpu", "--num_processes", "1", str(script))
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


def test_env_as_json():
    told = json.loads(run("env", "--json").stdout)
    assert told["packages"]["torch"].startswith("2.") and told["cores"] >= 1


def test_the_parser_has_both_spellings_and_the_api_s_defaults():
    parser = launch_command_parser()
    args = parser.parse_args(["--num-processes", "2", "--mixed_precision", "bf16", "x.py", "--lr", "1", "--cpu"])
    assert (args.num_processes, args.mixed_precision, args.training_script) == (2, "bf16", "x.py")
    assert args.training_script_args == ["--lr", "1", "--cpu"] and args.cpu is False
    assert (args.fsdp_version, args.fsdp_offload_params, args.fsdp_min_num_params) == ("1", "false", 100000000)
    assert (args.rdzv_backend, args.max_restarts, args.monitor_interval, args.tee) == ("static", 0, 0.1, "0")
    assert parser.parse_args(["--no_tpu_cluster", "x.py"]).tpu_use_cluster is False


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


def test_help_by_topic_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    usual, everything = shown(capsys, "-h"), shown(capsys, "-h", "all")
    assert everything == shown(capsys, "--help-all")
    assert max(map(len, (usual + everything).splitlines())) <= 80 and len(usual.splitlines()) < 90
    assert "examples:" in usual and "--num_processes" in usual and "--fsdp_offload_params" not in usual
    topics = [shown(capsys, "-h", group.title.lower()) for group in GROUPS]
    for group, text in zip(GROUPS, topics, strict=True):
        assert f"\n  {group.title.lower()} " in usual
        for option in group.options:
            assert option.flag in text and option.flag in everything
            listed = text.replace("\n", " ").replace(" ", "").replace("-", "")
            assert all(choice.replace("-", "") in listed for choice in option.choices), option.name
    assert shown(capsys, "-h", "max-restarts").count("--") == 1


def test_help_has_colours_on_request_only(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[36m--cpu\x1b[0m" in shown(capsys, "-h", "hardware")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(capsys, "-h", "hardware")


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
    assert (settings["num_processes"], settings.origin("num_processes")) == (12, "flag --nproc_per_node")


def test_launch_command_returns_to_its_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os\nopen(sys.argv[1], 'w').write(os.environ['ACCELERATE_MIXED_PRECISION'])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    parser = launch_command_parser()
    launch_command(
        parser.parse_args(["-q", "--cpu", "--mixed_precision", "bf16", str(script), str(tmp_path / "out"), "0"])
    )
    assert (tmp_path / "out").read_text() == "bf16"
    with pytest.raises(SystemExit) as end:
        launch_command(parser.parse_args(["-q", "--cpu", str(script), str(tmp_path / "out"), "5"]))
    assert end.value.code == 5
    # A namespace that another tool made: what differs from the defaults counts as given.
    plain = argparse.Namespace(**vars(parser.parse_args(["-q", str(script), str(tmp_path / "out"), "0"])))
    del plain.given_options
    plain.cpu, plain.mixed_precision, plain.quiet = True, "fp16", True
    launch_command(plain)
    assert (tmp_path / "out").read_text() == "fp16"

# SPDX-License-Identifier: Apache-2.0
"""`accelerate tpu-config`: the command line that gcloud really gets."""

import json
import shlex
import subprocess
import sys

import pytest

from accelerate.commands.tpu import build_wheel, main
from accelerate.core.version import __version__

POD = ["--tpu_name", "n", "--tpu_zone", "z"]
FILE = "tpu_name: kept\ntpu_zone: there\ndistributed_type: XLA\n"


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ACCELERATE_CONFIG_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.sh").write_text('echo one\n# not this\n\n  echo "two three"\n')
    (tmp_path / "file.yaml").write_text(FILE)
    (tmp_path / "listed.yaml").write_text(FILE + "commands:\n- echo a\n- echo b\n")
    (tmp_path / "named.yaml").write_text(FILE + "command_file: steps.sh\n")


def expected(steps, name="n", zone="z", alpha=""):
    return f"gcloud{alpha} compute tpus tpu-vm ssh {name} --zone {zone} --command cd /usr/share; {steps} --worker all"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([*POD, "--command", "echo hi"], expected("echo hi")),
        (
            [*POD, "--command", "echo hi", "--command", "echo a b", "ls"],
            expected("echo hi; echo a b; ls"),
        ),
        ([*POD, "--command", "ls", "--use_alpha"], expected("ls", alpha=" alpha")),
        ([*POD, "--command_file", "steps.sh"], expected('echo one; echo "two three"')),
        (["--config_file", "listed.yaml"], expected("echo a; echo b", "kept", "there")),
        (["--config_file", "named.yaml"], expected('echo one; echo "two three"', "kept", "there")),
        (
            ["--config_file", "listed.yaml", "--command", "ls", "--tpu_name", "n"],
            expected("ls", "n", "there"),
        ),
    ],
)
def test_debug_prints_the_command_and_runs_nothing(arguments, line, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    main([*arguments, "--debug"])
    told = capsys.readouterr().out.removeprefix("Running ")
    assert " ".join(shlex.split(told)) == line


def test_this_installation_is_copied_and_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    main(
        [
            *POD,
            "--command",
            "ls",
            "--install_accelerate",
            "--accelerate_version",
            __version__,
            "--debug",
        ]
    )
    copy, run = (
        shlex.split(line.removeprefix("Running ")) for line in capsys.readouterr().out.splitlines()
    )
    name = f"accelerate-{__version__}-py3-none-any.whl"
    assert copy[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"] and copy[5].endswith(name)
    assert copy[6:] == ["n:~/", "--zone", "z", "--worker", "all"]
    assert " ".join(run) == expected(f"pip uninstall -y accelerate; pip install ~/{name}; ls")

    # The wheel is this package: it installs without an index, and a name of ours that the other package has not works.
    place = tmp_path / "site"
    monkeypatch.undo()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(place),
    ]
    subprocess.run([*pip, str(build_wheel(tmp_path))], check=True, capture_output=True, timeout=120)
    code = "import accelerate.core.errors as e; print(e.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(place)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.startswith(str(place))
    assert (place / "bin" / "accelerate").is_file()


def fake_gcloud(folder, monkeypatch, code):
    """A gcloud that notes its arguments and ends with `code`."""
    folder.mkdir()
    program = folder / "gcloud"
    program.write_text(
        f"#!{sys.executable} -S\nimport json, sys\n"
        f"json.dump(sys.argv[1:], open({str(folder / 'argv')!r}, 'w'))\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder / "argv"


def test_gcloud_gets_the_arguments_and_its_code_is_ours(tmp_path, monkeypatch, capsys):
    (tmp_path / "home" / "accelerate").mkdir(parents=True)
    (tmp_path / "home" / "accelerate" / "default_config.yaml").write_text(FILE)
    argv = fake_gcloud(tmp_path / "good", monkeypatch, 0)
    main(["--command", "echo 'a;b'"])
    words = ["compute", "tpus", "tpu-vm", "ssh", "kept", "--zone", "there"]
    words += ["--command", "cd /usr/share; echo 'a;b'", "--worker", "all"]
    assert json.loads(argv.read_text()) == words
    fake_gcloud(tmp_path / "bad", monkeypatch, 3)
    with pytest.raises(SystemExit) as end:
        main(["--command", "ls"])
    assert end.value.code == 3 and "exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--command", "ls"], "tpu_name is missing: add --tpu_name"),
        (["--tpu_name", "n", "--command", "ls"], "tpu_zone is missing"),
        (POD, "nothing to run"),
        ([*POD, "--command_file", "none.sh"], "none.sh cannot be read"),
        (
            [*POD, "--command_file", "steps.sh", "--command", "ls"],
            "--command_file and --command contradict",
        ),
        (
            [*POD, "--install_accelerate", "--accelerate_version", "dev"],
            "the workers get the version that runs this",
        ),
        (["--config_file", "none.yaml", "--command", "ls"], "none.yaml does not exist"),
        ([*POD, "--command", "ls"], "gcloud is not on the PATH"),
        ([*POD, "--commnd", "ls"], "did you mean --command"),
    ],
)
def test_what_is_missing_is_named(arguments, told, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and told in capsys.readouterr().err

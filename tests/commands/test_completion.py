# SPDX-License-Identifier: Apache-2.0
"""`accelerate completion`: the scripts in the real shells, where they are installed."""

import contextlib
import io
import shutil
import subprocess

import pytest

from accelerate.commands import completion

shtab = pytest.importorskip("shtab")
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
$(complete -p accelerate | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script_of(shell):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        completion.main([shell])
    return out.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_tab_in_bash(folder):
    script = folder / "completion.bash"
    script.write_text(script_of("bash"))

    def words(*line):
        done = subprocess.run(
            ["bash", "--norc", "-c", COMPLETE, "bash", str(script), "accelerate", *line],
            cwd=folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert words("la") == ["launch"]
    assert words("launch", "--mixed_pre") == ["--mixed_precision"]
    assert words("launch", "--mixed_precision", "") == ["no", "fp16", "bf16", "fp8"]
    assert words("launch", "--cpu", "tr") == ["train.py"]
    assert "show" in words("config", "")
    # Each command completes its options, those of the parser that it runs with.
    for command, option in (
        ("merge-weights", "--remove"),
        ("report", "--format"),
        ("env", "--js"),
        ("test", "--num"),
    ):
        assert words(command, option)[0].startswith(option)
    assert words("monitor", "tr") == words("report", "tr") == ["train.py"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_tab_in_fish(folder):
    (folder / "accelerate.fish").write_text(script_of("fish"))

    def words(line):
        command = ["fish", "--no-config", "-c", f"source accelerate.fish; complete -C '{line}'"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), done
        return [text.partition("\t")[0] for text in done.stdout.splitlines()]

    assert words("accelerate la") == ["launch"]
    assert words("accelerate launch --mixed_pre") == ["--mixed_precision"]
    assert sorted(words("accelerate launch --mixed_precision ")) == ["bf16", "fp16", "fp8", "no"]
    assert words("accelerate launch --cpu tr") == ["train.py"]
    assert "show" in words("accelerate config ")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(shell):
    assert "estimate-memory" in (text := script_of(shell)) and "mixed_precision" in text


def test_without_shtab(monkeypatch, capsys):
    monkeypatch.setattr(completion, "is_available", lambda name: False)
    with pytest.raises(SystemExit) as end:
        completion.main(["bash"])
    assert end.value.code == 1 and "pip install shtab" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""`accelerate completion`: the script in a real bash; what the other shells get has the same words."""

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


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_tab_in_bash(tmp_path, capsys):
    completion.main(["bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()

    def words(*line):
        done = subprocess.run(
            ["bash", "--norc", "-c", COMPLETE, "bash", str(script), "accelerate", *line],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert words("la") == ["launch"]
    assert words("launch", "--mixed_pre") == ["--mixed_precision"]
    assert words("launch", "--mixed_precision", "") == ["no", "fp16", "bf16", "fp8"]
    assert words("launch", "--cpu", "tr") == ["train.py"]
    assert "show" in words("config", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(shell, capsys):
    completion.main([shell])
    assert "estimate-memory" in (text := capsys.readouterr().out) and "mixed_precision" in text


def test_without_shtab(monkeypatch, capsys):
    monkeypatch.setattr(completion, "is_available", lambda name: False)
    with pytest.raises(SystemExit) as end:
        completion.main(["bash"])
    assert end.value.code == 1 and "pip install shtab" in capsys.readouterr().err

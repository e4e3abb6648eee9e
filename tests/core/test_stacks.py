# SPDX-License-Identifier: Apache-2.0
from accelerate.core.stacks import line_in_words


def test_paths_below_the_current_folder_are_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert line_in_words(str(tmp_path / "examples/train.py"), 7) == "examples/train.py:7"
    assert line_in_words(f"{tmp_path}s/train.py", 7) == f"{tmp_path}s/train.py:7"
    tmp_path.rmdir()
    assert line_in_words(str(tmp_path / "train.py"), 7) == f"{tmp_path}/train.py:7"

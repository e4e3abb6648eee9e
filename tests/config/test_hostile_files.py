# SPDX-License-Identifier: Apache-2.0
"""Configuration files that are damaged, or no files: each is refused with its name."""

from __future__ import annotations

import json
import os

import pytest

from accelerate.config import launch_file
from accelerate.config.deepspeed import HfDeepSpeedConfig
from accelerate.core.errors import ConfigurationError


@pytest.mark.parametrize(
    "content",
    [
        b"a: \0",
        "a: 1".encode("utf-16"),
        "a: \xe9".encode("latin-1"),
        b"a: [1",
        b"a: 1\na: 2",
        b"? [a]\n: b",
    ],
    ids=["nul", "utf-16", "latin-1", "bracket", "twice", "list as key"],
)
def test_yaml_files(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        launch_file.read(path)


@pytest.mark.parametrize("text", ['{"num_processes": 1, "num_processes": 2}', '{"a": NaN}', "\0"])
def test_json_files(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        launch_file.read(path)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        HfDeepSpeedConfig(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "config.yaml"
    make = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path),
    }
    make[kind]()
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        launch_file.read(path)


def test_a_mark_at_the_start_is_fine(tmp_path):
    for name, text in (
        ("a.yaml", "num_processes: 3\n"),
        ("b.json", json.dumps({"num_processes": 3})),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert launch_file.read(tmp_path / name).values["num_processes"].value == 3

# SPDX-License-Identifier: Apache-2.0
"""Configuration files that would take all memory or never end: each is refused with its name."""

from __future__ import annotations

import json
import os
import signal

import pytest

from accelerate.config import launch_file
from accelerate.config.deepspeed_file import HfDeepSpeedConfig
from accelerate.core.errors import ConfigurationError


@pytest.fixture(autouse=True)
def limit():
    """A file that is not refused at once ends the test, not the run."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def chain(merge):
    rows = ["a0: &a0 {x: 1}"]
    for n in range(1, 41):
        refs = f"[*a{n - 1}, *a{n - 1}]"
        rows.append(f"a{n}: &a{n} {{<<: {refs}}}" if merge else f"a{n}: &a{n} {refs}")
    return "\n".join(rows)


TEXTS = {
    "alias bomb": chain(False),
    "merge chain": chain(True),
    "itself": "a: &a [*a]",
    "aliases": "a: &a 1\nb: [" + "*a, " * 200 + "]",
    "size": "a: 1\n" + "# x\n" * 5_000_000,
    "values": "a: [" + "1, " * 30_000 + "]",
    "flow depth": "a: " + "[" * 5000 + "]" * 5000,
    "block depth": "- " * 5000 + "a",
    "nul": "a: \0",
    "utf-16": "a: 1".encode("utf-16"),
    "latin-1": "a: \xe9".encode("latin-1"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_yaml_files(tmp_path, name):
    path = tmp_path / "config.yaml"
    text = TEXTS[name]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        launch_file.read(path)


JSON_TEXTS = [
    "[" * 100_000,
    '{"a": ' + "9" * 5000 + "}",
    '{"num_processes": 1, "num_processes": 2}',
    '{"a": NaN}',
    "\0",
]


@pytest.mark.parametrize("text", JSON_TEXTS, ids=["deep", "digits", "twice", "nan", "nul"])
def test_json_files(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        launch_file.read(path)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        HfDeepSpeedConfig(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "config.yaml"
    make = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
    }
    make[kind]()
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        launch_file.read(path)
    if kind != "loop":
        with pytest.raises(ConfigurationError, match=r"config\.yaml"):
            HfDeepSpeedConfig(str(path))


def test_a_mark_at_the_start_is_fine(tmp_path):
    for name, text in (("a.yaml", "num_processes: 3\n"), ("b.json", json.dumps({"num_processes": 3}))):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert launch_file.read(tmp_path / name).values["num_processes"].value == 3

# SPDX-License-Identifier: Apache-2.0
"""The check of commit subjects, in a repository of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "subjects.py"


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def check(folder):
    return subprocess.run(
        [sys.executable, folder / "tools" / TOOL.name], capture_output=True, text=True
    )


def test_long_subjects_since_the_check_exists(tmp_path):
    repository = tmp_path / "repository"
    (repository / "tools").mkdir(parents=True)
    git(repository, "init", "-q")
    git(repository, "commit", "-q", "--allow-empty", "-m", "b" * 73)
    shutil.copy(TOOL, repository / "tools")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "the check")
    git(repository, "commit", "-q", "--allow-empty", "-m", "a" * 72)
    assert check(repository).returncode == 0
    git(repository, "commit", "-q", "--allow-empty", "-m", "c" * 73)
    result = check(repository)
    assert result.returncode == 1
    assert "c" * 73 in result.stdout and "b" * 73 not in result.stdout
    git(tmp_path, "clone", "-q", "--depth", "1", repository.as_uri(), "shallow")
    assert check(tmp_path / "shallow").returncode == 0

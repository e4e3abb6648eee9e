# SPDX-License-Identifier: Apache-2.0
"""Fail where the subject of one of the last 50 commits has more than 72 characters.

    python tools/subjects.py

Merges, and commits before the one that added this file, do not count. In a shallow clone that is the oldest commit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 72


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints; none outside of a clone."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.splitlines()


def too_long() -> list[str]:
    """Hash and subject of each commit whose subject is too long."""
    added = git("log", "--diff-filter=A", "--format=%H", "--", "tools/subjects.py")
    if not added:
        return []
    lines = git("log", "--no-merges", "-50", "--format=%h %s", f"{added[0]}..HEAD")
    return [line for line in lines if len(line.partition(" ")[2]) > LIMIT]


if __name__ == "__main__":
    commits = too_long()
    for commit in commits:
        print(f"the subject has more than {LIMIT} characters: {commit}")
    sys.exit(bool(commits))

# SPDX-License-Identifier: Apache-2.0
"""The commands of the tables in `examples/README.md`, as a user types them."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = re.findall(
    r"^\| `python examples/([^`]+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE
)
PACKAGES = {"fine_tuning/lora.py": ("peft",), "fine_tuning/qlora.py": ("peft", "bitsandbytes")}


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_its_table_and_no_warning(command: str, tmp_path: Path) -> None:
    script, *arguments = shlex.split(command)
    for package in PACKAGES.get(script, ("sklearn",)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3
    # Those of other libraries are theirs.
    assert not re.search("^(?!.*site-packages).*Warning", done.stderr, re.MULTILINE), done.stderr

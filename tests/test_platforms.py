# SPDX-License-Identifier: Apache-2.0
"""Windows and macOS, simulated: what they lack is hidden, what they refuse is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parent / "helpers"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are simulated on Linux")
@pytest.mark.parametrize("system", ["windows", "macos"])
def test_a_simulated_system_imports_trains_saves_resumes_and_launches(system, tmp_path):
    command = [sys.executable, str(HELPERS / "platform_run.py"), system, str(tmp_path)]
    paths = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

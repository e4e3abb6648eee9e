# SPDX-License-Identifier: Apache-2.0
"""torch_xla for a TPU notebook of Google Colaboratory, in the version that fits its torch."""

from __future__ import annotations

import subprocess
import sys

from ..core import system
from ..core.errors import LaunchError


def install_xla(upgrade: bool = False) -> None:
    """Install torch_xla for the installed torch, with the TPU library. In a notebook of Google Colaboratory only.

    `upgrade` replaces a torch_xla that is there. Raises LaunchError elsewhere, and where pip fails.
    """
    if "google.colab" not in sys.modules:
        raise LaunchError("install_xla() works in Google Colaboratory only; elsewhere: pip install 'torch_xla[tpu]'")
    version = system.torch_build().get("version")
    if version is None:
        raise LaunchError("install_xla() found no torch to match: install torch first")
    # torch_xla is released with torch, under the same major and minor number.
    minor = ".".join(version.split(".")[:2])
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *(["--upgrade"] if upgrade else []),
        f"torch_xla[tpu]~={minor}.0",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} failed (exit code {done.returncode}):\n{done.stderr.strip()[-1000:]}")

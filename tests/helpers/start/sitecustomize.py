# SPDX-License-Identifier: Apache-2.0
"""With this folder in PYTHONPATH, each interpreter starts without torch's compiler."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import without_compiler  # noqa: F401

del sys.path[-1]

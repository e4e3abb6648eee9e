# SPDX-License-Identifier: Apache-2.0
"""Runs a script with other seeds: `seeded.py 3 SCRIPT ARGUMENTS` adds 3 to each seed that it sets."""

import runpy
import sys
from pathlib import Path

import torch

seed_all = torch.manual_seed
number = int(sys.argv[1])
torch.manual_seed = lambda seed: seed_all(seed + number)
del sys.argv[:2]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")

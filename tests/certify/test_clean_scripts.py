# SPDX-License-Identifier: Apache-2.0
"""Examples and scripts of clients are certified by the command: equal in their layouts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLIENTS = Path(__file__).parent / "clean"
DATA_PARALLEL = ("ddp:2", "fsdp:2")
# (name, script and its arguments, layouts, package that it needs).
SCRIPTS = [
    ("digits", [EXAMPLES / "train_digits.py"], DATA_PARALLEL, "sklearn"),
    ("gpt", [EXAMPLES / "train_gpt.py", "--resume"], DATA_PARALLEL, "rich"),
    ("average", [EXAMPLES / "features/ema.py"], DATA_PARALLEL, "sklearn"),
    ("weighted_tokens", [EXAMPLES / "features/gradient_weights.py"], DATA_PARALLEL, "torch"),
    ("adapters", [EXAMPLES / "features/lora.py"], DATA_PARALLEL, "sklearn"),
    ("texts", [EXAMPLES / "features/text_classification.py"], DATA_PARALLEL, "torch"),
    ("gan", [EXAMPLES / "recipes/gan.py"], DATA_PARALLEL, "sklearn"),
    ("cluster", [EXAMPLES / "clusters/train.py"], DATA_PARALLEL, "torch"),
    ("peft", [EXAMPLES / "recipes/finetune_lora.py", "--steps", "6"], ("ddp:2",), "peft"),
    ("diffusers", [EXAMPLES / "recipes/diffusion.py"], ("ddp:2",), "diffusers"),
    ("trainer", [CLIENTS / "trainer.py"], DATA_PARALLEL, "transformers"),
    ("trainer_bf16", [CLIENTS / "trainer.py", "--bf16"], ("ddp:2",), "transformers"),
    ("trainer_lora", [CLIENTS / "trainer.py", "--lora"], ("ddp:2",), "peft"),
    ("trl", [CLIENTS / "sft.py"], ("ddp:2",), "trl"),
]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "script", "layouts", "package"), SCRIPTS, ids=lambda value: value)
def test_script_is_equal(tmp_path, name, script, layouts, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-m", "accelerate.commands.main", "certify", "--cpu", "--steps", "3"]
    command += ["--layouts", *layouts, "--folder", tmp_path / "records", "--", *script]
    certified = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    print(certified.stdout, certified.stderr)
    assert certified.returncode == 0, certified.stdout + certified.stderr

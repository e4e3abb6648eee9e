# SPDX-License-Identifier: Apache-2.0
"""Examples and scripts of clients are certified by the command: equal in their layouts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import certified
import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLIENTS = Path(__file__).parent / "clean"
DATA_PARALLEL = ("ddp:2", "fsdp:2")
HSDP = "ddp:2xfsdp:2"
BF16 = {"mixed_precision": "bf16"}
COMPILED = {"dynamo_config": {"dynamo_backend": "aot_eager"}}


@dataclass(frozen=True)
class Clean:
    """A script that trains the same model in each layout.

    Fields:
        name: of the case.
        command: the script and its arguments.
        layouts: to certify.
        package: that it needs.
        options: of the configuration file.
    """

    name: str
    command: tuple[str | Path, ...]
    layouts: tuple[str, ...] = DATA_PARALLEL
    package: str = "torch"
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    Clean("digits", (EXAMPLES / "train_digits.py",), (*DATA_PARALLEL, HSDP), "sklearn"),
    Clean("gpt", (EXAMPLES / "train_gpt.py", "--resume"), (*DATA_PARALLEL, HSDP), "rich"),
    Clean("gpt_bf16", (EXAMPLES / "train_gpt.py", "--resume"), DATA_PARALLEL, "rich", BF16),
    Clean("gpt_compiled", (EXAMPLES / "train_gpt.py", "--resume"), DATA_PARALLEL, "rich", COMPILED),
    Clean("average", (EXAMPLES / "features/ema.py",), DATA_PARALLEL, "sklearn"),
    Clean("weighted_tokens", (EXAMPLES / "features/gradient_weights.py",), (*DATA_PARALLEL, HSDP)),
    Clean("adapters", (EXAMPLES / "features/lora.py",), DATA_PARALLEL, "sklearn"),
    Clean("texts", (EXAMPLES / "features/text_classification.py",)),
    Clean("early_stopping", (EXAMPLES / "features/early_stopping.py",), DATA_PARALLEL, "sklearn"),
    Clean("metrics", (EXAMPLES / "features/metrics.py",), DATA_PARALLEL, "sklearn"),
    Clean("folds", (EXAMPLES / "features/cross_validation.py",), DATA_PARALLEL, "sklearn"),
    Clean("resume", (EXAMPLES / "features/resume.py",), DATA_PARALLEL, "sklearn"),
    Clean("gan", (EXAMPLES / "recipes/gan.py",), DATA_PARALLEL, "sklearn"),
    Clean("cluster", (EXAMPLES / "clusters/train.py",)),
    Clean("peft", (EXAMPLES / "recipes/finetune_lora.py", "--steps", "6"), ("ddp:2",), "peft"),
    Clean("diffusers", (EXAMPLES / "recipes/diffusion.py",), ("ddp:2",), "diffusers"),
    Clean("classifier", (CLIENTS / "classifier.py",), DATA_PARALLEL, "transformers"),
    Clean("classifier_bf16", (CLIENTS / "classifier.py",), DATA_PARALLEL, "transformers", BF16),
    Clean("trainer", (CLIENTS / "trainer.py",), DATA_PARALLEL, "transformers"),
    Clean("trainer_bf16", (CLIENTS / "trainer.py", "--bf16"), DATA_PARALLEL, "transformers"),
    Clean("trainer_lora", (CLIENTS / "trainer.py", "--lora"), ("ddp:2",), "peft"),
    Clean("trl", (CLIENTS / "sft.py",), ("ddp:2",), "trl"),
]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", certified.seeds("0"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_script_is_equal(tmp_path: Path, case: Clean, seed: int) -> None:
    if importlib.util.find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed")
    config_file = tmp_path / "config.yaml"
    config_file.write_text(yaml.safe_dump(case.options))
    command = [sys.executable, "-m", "accelerate.commands.main", "certify", "--cpu", "--steps", "3"]
    command += ["--layouts", *case.layouts, "--folder", tmp_path / "records"]
    command += ["--config_file", config_file, "--", CLIENTS / "seeded.py", str(seed), *case.command]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert run.returncode == 0, run.stdout + run.stderr

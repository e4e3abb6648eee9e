# SPDX-License-Identifier: Apache-2.0
"""Which packages and devices are here: told without importing them, and true."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from accelerate.core import availability


@pytest.mark.parametrize(
    "package", ["transformers", "torchdata", "matplotlib", "tensorboard", "deepspeed", "wandb"]
)
def test_package_questions_agree_with_the_import_system(package: str) -> None:
    told = getattr(availability, f"is_{package}_available")()
    assert told is (importlib.util.find_spec(package) is not None)


def test_asking_imports_nothing() -> None:
    source = """
import sys
from accelerate.core import availability as a
answers = [a.is_transformers_available(), a.is_wandb_available(), a.is_torchdata_stateful_dataloader_available()]
assert all(type(answer) is bool for answer in answers)
assert not {"torch", "transformers", "torchdata"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_device_questions() -> None:
    assert availability.is_cuda_available() is torch.cuda.is_available()
    assert availability.is_mps_available() is torch.backends.mps.is_available()
    assert not availability.is_mps_available(min_version="99.0")
    assert availability.is_xpu_available(check_device=True) is torch.xpu.is_available()
    for absent in ("npu", "mlu", "sdaa", "musa", "neuron"):
        assert getattr(availability, f"is_{absent}_available")(check_device=True) is False
    assert (
        availability.is_hpu_available(init_hccl=True) is False
        and availability.is_habana_gaudi1() is False
    )
    with pytest.raises(ValueError, match="takes either"):
        availability.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the machine has an accelerator")
def test_precisions_of_the_cpu() -> None:
    assert availability.is_bf16_available() and availability.is_fp16_available()
    assert availability.check_cuda_fp8_capability() is False


@pytest.mark.parametrize("package", ["deepspeed", "torchao"])
def test_required_packages_are_asked_for_at_the_call(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorated = getattr(availability, f"{package}_required")(lambda: "ran")
    monkeypatch.setattr("accelerate.core.imports.is_available", lambda name: False)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        decorated()
    monkeypatch.setattr("accelerate.core.imports.is_available", lambda name: True)
    assert decorated() == "ran"

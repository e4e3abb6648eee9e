# SPDX-License-Identifier: Apache-2.0
"""Is this package installed, is this device here: one public function a question, over the table of `core.imports`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

from packaging.version import parse

from . import env
from .imports import compare_versions, is_available, required

F = TypeVar("F", bound=Callable[..., Any])


def _installed(package: str, short: str = "") -> Callable[[], bool]:
    """The function `is_<short>_available`: whether a package is installed. Nothing is imported to find out."""

    def question() -> bool:
        return is_available(package)

    question.__name__ = question.__qualname__ = f"is_{short or package}_available"
    question.__doc__ = f"Whether the package `{package}` is installed."
    return question


is_numpy_available: Callable[[], bool] = _installed("numpy")
is_tqdm_available: Callable[[], bool] = _installed("tqdm")
is_aim_available: Callable[[], bool] = _installed("aim")
is_amdsmi_available: Callable[[], bool] = _installed("amdsmi")
is_boto3_available: Callable[[], bool] = _installed("boto3")
is_clearml_available: Callable[[], bool] = _installed("clearml")
is_comet_ml_available: Callable[[], bool] = _installed("comet_ml")
is_datasets_available: Callable[[], bool] = _installed("datasets")
is_deepspeed_available: Callable[[], bool] = _installed("deepspeed")
is_dvclive_available: Callable[[], bool] = _installed("dvclive")
is_import_timer_available: Callable[[], bool] = _installed("import_timer")
is_lomo_available: Callable[[], bool] = _installed("lomo_optim", "lomo")
is_matplotlib_available: Callable[[], bool] = _installed("matplotlib")
is_megatron_lm_available: Callable[[], bool] = _installed("megatron", "megatron_lm")
is_mlflow_available: Callable[[], bool] = _installed("mlflow")
is_msamp_available: Callable[[], bool] = _installed("msamp")
is_pandas_available: Callable[[], bool] = _installed("pandas")
is_peft_available: Callable[[], bool] = _installed("peft")
is_pynvml_available: Callable[[], bool] = _installed("pynvml")
is_pytest_available: Callable[[], bool] = _installed("pytest")
is_rich_available: Callable[[], bool] = _installed("rich")
is_sagemaker_available: Callable[[], bool] = _installed("sagemaker")
is_schedulefree_available: Callable[[], bool] = _installed("schedulefree")
is_swanlab_available: Callable[[], bool] = _installed("swanlab")
is_timm_available: Callable[[], bool] = _installed("timm")
is_torchao_available: Callable[[], bool] = _installed("torchao")
is_torchdata_available: Callable[[], bool] = _installed("torchdata")
is_torchvision_available: Callable[[], bool] = _installed("torchvision")
is_trackio_available: Callable[[], bool] = _installed("trackio")
is_transformer_engine_available: Callable[[], bool] = _installed("transformer_engine")
is_transformers_available: Callable[[], bool] = _installed("transformers")
is_triton_available: Callable[[], bool] = _installed("triton")
is_wandb_available: Callable[[], bool] = _installed("wandb")


def is_tensorboard_available() -> bool:
    """Whether a TensorBoard writer is installed: `tensorboard` or `tensorboardX`."""
    return is_available("tensorboard") or is_available("tensorboardX")


# Packages of a certain version, or with a certain part


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in at least `min_version` if given."""
    if not is_available("bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_8bit_bnb_available() -> bool:
    """Whether the installed bitsandbytes has 8-bit layers."""
    return is_bnb_available(min_version="0.37.2")


def is_4bit_bnb_available() -> bool:
    """Whether the installed bitsandbytes has 4-bit layers."""
    return is_bnb_available(min_version="0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether the installed bitsandbytes supports devices other than CUDA. Imports bitsandbytes."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether the installed torchdata has `StatefulDataLoader` (0.8 and later)."""
    return is_available("torchdata") and compare_versions("torchdata", ">=", "0.8.0")


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether the installed Transformer Engine has the MXFP8 recipe (2.1 and later)."""
    return is_available("transformer_engine") and compare_versions(
        "transformer-engine", ">=", "2.1.0"
    )


def is_pippy_available() -> bool:
    """Whether torch has pipeline stages (`torch.distributed.pipelining`), as every supported version does."""
    return True


def is_weights_only_available() -> bool:
    """Whether `torch.load(weights_only=True)` accepts a list of safe classes, as in every supported version."""
    return True


# Devices


def is_cuda_available() -> bool:
    """Whether torch sees a CUDA (or ROCm) device. It uses the management library, so that a fork stays possible."""
    import torch

    with env.patch_environment(pytorch_nvml_based_cuda_check="1"):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether torch is built for ROCm and finds a device."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch, of at least `min_version`, sees Apple's Metal device."""
    import torch

    return (
        parse(parse(torch.__version__).base_version) >= parse(min_version)
        and torch.backends.mps.is_available()
    )


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether torch finds an Intel GPU; with `check_device`, also whether its devices can be counted."""
    import torch

    return torch.xpu.is_available() and (not check_device or torch.xpu.device_count() > 0)


def is_xccl_available() -> bool:
    """Whether torch is built with the collective library for Intel GPUs."""
    import torch

    return bool(torch.distributed.distributed_c10d.is_xccl_available())


def is_npu_available(check_device: bool = False) -> bool:
    """Whether torch_npu is installed and finds an Ascend device; `check_device` also counts the devices."""
    return _plugin_device("torch_npu", "npu", check_device)


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether torch_mlu is installed and finds a Cambricon device."""
    return _plugin_device("torch_mlu", "mlu", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether torch_sdaa is installed and finds a Tecorigin device."""
    return _plugin_device("torch_sdaa", "sdaa", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Whether torch_musa is installed and finds a Moore Threads device."""
    return _plugin_device("torch_musa", "musa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Whether torch_neuronx is installed and finds a Neuron device."""
    return _plugin_device("torch_neuronx", "neuron", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether Habana's torch bridge is installed and finds a Gaudi; `init_hccl` also loads its collectives."""
    found = _plugin_device("habana_frameworks.torch", "hpu", False)
    if found and init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return found


def is_habana_gaudi1() -> bool:
    """Whether this machine has a first-generation Gaudi, which does not support fp16."""
    if not is_hpu_available():
        return False
    import torch

    return str(torch.hpu.get_device_name()).upper() == "GAUDI"  # type: ignore[attr-defined]


def _plugin_device(module: str, device: str, count: bool) -> bool:
    """Whether the module that adds a device type to torch is installed, loads, and shows such a device."""
    if not _find(module):
        return False
    import torch

    importlib.import_module(module)
    namespace = getattr(torch, device, None)
    if namespace is None or not namespace.is_available():
        return False
    return not count or namespace.device_count() > 0


@functools.cache
def _find(module: str) -> bool:
    root = module.partition(".")[0]
    return (
        importlib.util.find_spec(root) is not None and importlib.util.find_spec(module) is not None
    )


def is_torch_distributed_available() -> bool:
    """Whether the installed torch was built with its distributed package."""
    return bool(importlib.import_module("torch.distributed").is_available())


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and, if requested, runs on a TPU or a GPU."""
    if check_is_tpu and check_is_gpu:
        raise ValueError("is_torch_xla_available takes either check_is_tpu or check_is_gpu")
    if not is_available("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


# Precisions


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine's device supports bfloat16. The CPU does, and so does a TPU unless `ignore_tpu` is true."""
    from . import devices

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return devices.supports_bf16(devices.accelerator_type() or "cpu")


def is_fp16_available() -> bool:
    """Whether this machine's device supports float16, as all do except the first Gaudi."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Whether a package for training in fp8 is installed: torchao, Transformer Engine or MS-AMP."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()


def check_cuda_fp8_capability() -> bool:
    """Whether the current CUDA device has fp8 matrix units: compute capability 8.9 or later; False without one."""
    import torch

    return is_cuda_available() and torch.cuda.get_device_capability() >= (8, 9)


# Decorators


def torchao_required(func: F) -> F:
    """Decorate a function to raise an ImportError that names torchao if it is missing when called."""
    return required("torchao", func)


def deepspeed_required(func: F) -> F:
    """Decorate a function to raise an ImportError that names DeepSpeed if it is missing when called."""
    return required("deepspeed", func)

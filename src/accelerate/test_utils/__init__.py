# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of training code: skip conditions, test case classes, launching of scripts, a small regression."""

from ..core.lazy import attach

_CONDITIONS = """
device_count get_backend memory_allocated_func require_aim require_bnb require_clearml require_comet_ml require_cpu
require_cuda require_cuda_or_hpu require_cuda_or_xpu require_datasets require_deepspeed require_dvclive
require_fp16 require_fp8 require_fsdp2 require_hpu require_huggingface_suite require_import_timer
require_matplotlib require_mlflow require_mlu require_mps require_multi_device require_multi_gpu
require_multi_gpu_or_xpu require_multi_xpu require_musa require_neuron require_non_cpu require_non_hpu
require_non_torch_xla require_non_xpu require_npu require_pandas require_peft require_pippy require_schedulefree
require_sdaa require_single_device require_single_gpu require_single_xpu require_swanlab require_tensorboard
require_timm require_torch_min_version require_torchao require_torchdata_stateful_dataloader require_torchvision
require_tp require_tpu require_trackers require_trackio require_transformer_engine require_transformer_engine_mxfp8
require_transformers require_triton require_wandb require_xpu run_first skip slow torch_device
"""

EXPORTS = {
    "test_utils.cases": ["AccelerateTestCase", "MockingTestCase", "TempDirTestCase"],
    "test_utils.conditions": _CONDITIONS.split(),
    "test_utils.launching": [
        "DEFAULT_LAUNCH_COMMAND",
        "SubprocessCallException",
        "are_the_same_tensors",
        "assert_same_run",
        "assert_exception",
        "capture_call_output",
        "execute_subprocess_async",
        "get_launch_command",
        "get_torch_dist_unique_port",
        "path_in_accelerate_package",
        "pytest_xdist_worker_id",
        "run_command",
    ],
    "test_utils.training": ["RegressionDataset", "RegressionModel"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, ["testing"])

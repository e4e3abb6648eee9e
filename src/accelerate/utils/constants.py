# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.constants`: fixed names. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "core.constants": [
        "FSDP2_STATE_DICT_TYPE",
        "FSDP_AUTO_WRAP_POLICY",
        "FSDP_BACKWARD_PREFETCH",
        "FSDP_SHARDING_STRATEGY",
        "FSDP_STATE_DICT_TYPE",
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
        "MODEL_NAME",
        "OPTIMIZER_NAME",
        "PROFILE_PATTERN_NAME",
        "RNG_STATE_NAME",
        "SAFE_MODEL_NAME",
        "SAFE_WEIGHTS_INDEX_NAME",
        "SAFE_WEIGHTS_NAME",
        "SAFE_WEIGHTS_PATTERN_NAME",
        "SAMPLER_NAME",
        "SCALER_NAME",
        "SCHEDULER_NAME",
        "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "TORCH_LAUNCH_PARAMS",
        "WEIGHTS_INDEX_NAME",
        "WEIGHTS_NAME",
        "WEIGHTS_PATTERN_NAME",
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)

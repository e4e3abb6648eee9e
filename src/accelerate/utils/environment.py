# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.environment`: the environment and the machine. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "core.availability": ["check_cuda_fp8_capability"],
    "core.env": [
        "are_libraries_initialized",
        "clear_environment",
        "convert_dict_to_env_variables",
        "get_int_from_env",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "purge_accelerate_environment",
        "str_to_bool",
    ],
    "runtime.hardware": [
        "CPUInformation",
        "check_cuda_p2p_ib_support",
        "get_cpu_distributed_information",
        "get_current_device_type",
        "get_gpu_info",
        "override_numa_affinity",
        "set_numa_affinity",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)

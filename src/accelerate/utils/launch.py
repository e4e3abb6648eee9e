# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.launch`: commands and environments of processes to start. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "core.env": ["env_var_path_add"],
    "launchers.compat": [
        "prepare_deepspeed_cmd_env",
        "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs",
        "prepare_simple_launcher_cmd_env",
        "prepare_tpu",
    ],
    "commands.launch": ["_convert_nargs_to_dict"],
    "launchers.notebook": ["PrepareForLaunch"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)

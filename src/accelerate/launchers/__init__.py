# SPDX-License-Identifier: Apache-2.0
"""From a launch specification to running processes. Importing this starts nothing and imports no torch."""

from ..core.lazy import attach

EXPORTS = {
    "launchers.notebook": [
        "PrepareForLaunch",
        "debug_launcher",
        "install_xla",
        "notebook_launcher",
    ],
    "launchers.ports": ["is_port_in_use"],
    "launchers.compat": [
        "prepare_deepspeed_cmd_env",
        "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs",
        "prepare_simple_launcher_cmd_env",
        "prepare_tpu",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, all_public=True)

# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.launch. Change the table, then run the script.

from ..commands.launch import _convert_nargs_to_dict as _convert_nargs_to_dict
from ..core.env import env_var_path_add as env_var_path_add
from ..launchers.compat import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from ..launchers.compat import prepare_multi_gpu_env as prepare_multi_gpu_env
from ..launchers.compat import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from ..launchers.compat import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from ..launchers.compat import prepare_tpu as prepare_tpu
from ..launchers.notebook import PrepareForLaunch as PrepareForLaunch

EXPORTS: dict[str, list[str]]

# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.launchers. Change the table, then run the script.

from .compat import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from .compat import prepare_multi_gpu_env as prepare_multi_gpu_env
from .compat import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from .compat import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from .compat import prepare_tpu as prepare_tpu
from .notebook import PrepareForLaunch as PrepareForLaunch
from .notebook import debug_launcher as debug_launcher
from .notebook import install_xla as install_xla
from .notebook import notebook_launcher as notebook_launcher
from .ports import is_port_in_use as is_port_in_use

EXPORTS: dict[str, list[str]]

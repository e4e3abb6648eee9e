# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.environment. Change the table, then run the script.

from ..core.availability import check_cuda_fp8_capability as check_cuda_fp8_capability
from ..core.env import are_libraries_initialized as are_libraries_initialized
from ..core.env import clear_environment as clear_environment
from ..core.env import convert_dict_to_env_variables as convert_dict_to_env_variables
from ..core.env import get_int_from_env as get_int_from_env
from ..core.env import parse_choice_from_env as parse_choice_from_env
from ..core.env import parse_flag_from_env as parse_flag_from_env
from ..core.env import patch_environment as patch_environment
from ..core.env import purge_accelerate_environment as purge_accelerate_environment
from ..core.env import str_to_bool as str_to_bool
from ..runtime.hardware import CPUInformation as CPUInformation
from ..runtime.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from ..runtime.hardware import get_cpu_distributed_information as get_cpu_distributed_information
from ..runtime.hardware import get_current_device_type as get_current_device_type
from ..runtime.hardware import get_gpu_info as get_gpu_info
from ..runtime.hardware import override_numa_affinity as override_numa_affinity
from ..runtime.hardware import set_numa_affinity as set_numa_affinity

EXPORTS: dict[str, list[str]]

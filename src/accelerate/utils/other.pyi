# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.other. Change the table, then run the script.

from ..checkpointing.weights import load as load
from ..checkpointing.weights import save as save
from ..core.modules import get_model_tp_size as get_model_tp_size
from ..core.modules import get_module_children_bottom_up as get_module_children_bottom_up
from ..core.modules import model_has_dtensor as model_has_dtensor
from ..core.objects import convert_bytes as convert_bytes
from ..core.objects import get_pretty_name as get_pretty_name
from ..core.objects import merge_dicts as merge_dicts
from ..core.objects import recursive_getattr as recursive_getattr
from ..data_loader.packing import pack as pack
from ..data_loader.token_batches import TokenBatchSampler as TokenBatchSampler
from ..launchers.ports import get_free_port as get_free_port
from ..launchers.ports import is_port_in_use as is_port_in_use
from ..parallel.compile import compile_regions as compile_regions
from ..parallel.compile import compile_regions_deepspeed as compile_regions_deepspeed
from ..parallel.compile import compile_regions_fsdp2 as compile_regions_fsdp2
from ..parallel.matrices import register_matrix_optimizer as register_matrix_optimizer
from ..parallel.unwrap import extract_model_from_parallel as extract_model_from_parallel
from ..placement.tied import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from ..runtime.hardware import check_os_kernel as check_os_kernel
from ..state import wait_for_everyone as wait_for_everyone
from ..torch_internals.compiled import has_compiled_regions as has_compiled_regions
from ..torch_internals.compiled import is_compiled_module as is_compiled_module

EXPORTS: dict[str, list[str]]
